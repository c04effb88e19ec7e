"""Which way operations are computed here, and whether a kernel compiles and agrees with torch."""

import importlib.util
import time
from importlib import metadata

import torch

from lightning_moeclip.diagnosis.findings import Finding, within
from lightning_moeclip.kernels.backend import is_interpreted, runs_triton
from lightning_moeclip.kernels.router import route

__all__ = ["kernels_finding"]

_COMPILE_S = 120.0  # the first kernel of a machine also builds Triton's launcher with a C compiler


def kernels_finding() -> Finding:
    """Whether Triton's kernels are compiled, interpreted or left to torch, tried out on a small one."""
    has_gpu = torch.cuda.is_available()
    if not runs_triton(torch.zeros(1, device="cuda" if has_gpu else "cpu")):
        return _by_torch(has_gpu=has_gpu)
    how = f"Triton {metadata.version('triton')}" + (", interpreted on the CPU" if is_interpreted() else "")
    if is_interpreted():
        advice = "Unset TRITON_INTERPRET for training: the interpreter is slow, and made for tests."
        return Finding("kernels", "warning", how, advice)
    begin = time.monotonic()
    try:
        agrees = within(_COMPILE_S, _agrees_with_torch)
    except Exception as error:  # whatever a compiler raises is what is to be told
        told = f"{how} does not compile a kernel: {type(error).__name__}: {str(error)[:300]}"
        advice = "Uninstall triton to have torch compute all of it, or install a C compiler, which Triton needs."
        return Finding("kernels", "error", told, advice)
    if not agrees:
        advice = "Install a triton that this torch was released with: pip install torch triton in a new environment."
        return Finding("kernels", "error", f"{how} routes tokens to other experts than torch does", advice)
    return Finding("kernels", "ok", f"{how}: compiled and right after {time.monotonic() - begin:.1f} s")


def _by_torch(*, has_gpu: bool) -> Finding:
    if importlib.util.find_spec("triton") is None:
        told = "Triton is not installed: torch computes all operations"
        advice = 'Write pip install "lightning-moeclip[kernels]", which is faster on GPUs.' if has_gpu else ""
        return Finding("kernels", "note" if has_gpu else "ok", told, advice)
    return Finding("kernels", "ok", f"Triton {metadata.version('triton')}, no GPU: torch computes all operations")


def _agrees_with_torch() -> bool:
    logits = torch.linspace(-1, 1, 64).sin().view(8, 8)
    wanted, found = route(logits, 2, normalize_topk=True), route(logits.cuda(), 2, normalize_topk=True)
    return torch.equal(found[1].cpu(), wanted[1]) and torch.allclose(found[0].cpu(), wanted[0])
