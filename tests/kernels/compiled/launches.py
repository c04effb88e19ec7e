"""Calls of every operation of the package, in the dtypes and sizes that make its launchers choose what they do.

Tensors are on the CPU and nothing is computed by a kernel: sizes only have to be those of a real call.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from lightning_moeclip.kernels import contrastive_triton
from torch import Tensor

from lightning_moeclip import kernels
from tests.kernels.compiled.resources import TARGETS, Resources, compiling_for

__all__ = ["CASES", "FOLDER", "OPERATIONS", "compile_cases", "compiled"]

FOLDER = Path(next(iter(kernels.__path__))) if kernels.__file__ is None else Path(kernels.__file__).parent
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP64: "fp64"}

CASES: dict[str, Callable[[], object]] = {}
ALWAYS: set[str] = set()  # the cases that the tests compile; tests.benchmarks.kernel_resources compiles all


def case(operation: str, detail: str, call: Callable[..., object], *arguments: object, always: bool = True) -> None:
    """Add a call under "operation, detail"; ``always``: the tests compile it too."""
    name = f"{operation}, {detail}"
    assert name not in CASES, name
    CASES[name] = functools.partial(call, *arguments)
    # of both halves one is enough: the same instructions beside the type of the products
    if always and "fp16" not in detail:
        ALWAYS.add(name)


@contextlib.contextmanager
def as_on_a_gpu(target: str) -> Iterator[None]:
    """Operations on CPU tensors go to their launchers, which see a GPU of the target."""
    with pytest.MonkeyPatch.context() as patch:
        for path in FOLDER.glob("*.py"):
            module = importlib.import_module(f"lightning_moeclip.kernels.{path.stem}")
            if hasattr(module, "runs_triton"):
                patch.setattr(module, "runs_triton", lambda x: True)
        arch = TARGETS[target].arch
        patch.setattr(torch.version, "hip", None if isinstance(arch, int) else "6.4")
        patch.setattr(contrastive_triton, "_arch", lambda x: arch if isinstance(arch, int) else 0)
        yield


@functools.cache
def compiled(operation: str, target: str) -> tuple[Resources, ...]:
    """Every kernel that the cases of an operation launch, once however many of them do."""
    return compile_cases([name for name in CASES if name in ALWAYS and name.split(",")[0] == operation], target)


def compile_cases(names: Iterable[str], target: str) -> tuple[Resources, ...]:
    """Every kernel that some cases launch."""
    found: dict[object, Resources] = {}
    with as_on_a_gpu(target):
        for name in names:
            with compiling_for(target, name, found):
                CASES[name]()
    return tuple(found.values())


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """A matrix and a vector of a ragged size."""
    return [torch.ones(768, 1024, dtype=dtype), torch.ones(1003, dtype=dtype)]


def pack(source: torch.dtype, place: torch.dtype, accumulates: bool, sums: bool, mates: bool) -> None:
    from lightning_moeclip.kernels.grad_pack import grad_pack

    found, wide = gradients(source), FP64 if source is FP64 else FP32
    grad_pack(
        found,
        gradients(place),
        [torch.ones((), dtype=wide)] * len(found),
        accumulates=accumulates,
        with_statistics=sums or mates,
        mates=found if mates else None,
    )


for source, place in ((FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, BF16)):
    both = f"{NAMES[source]} to {NAMES[place]}"
    case("grad_pack", both, pack, source, place, False, False, False)
    case("grad_pack", f"{both}, sums", pack, source, place, False, True, False, always=source is place)
for dtype in (FP32, BF16):
    case("grad_pack", f"{NAMES[dtype]}, adds, sums", pack, dtype, dtype, True, True, False)
    case("grad_pack", f"{NAMES[dtype]}, mates", pack, dtype, dtype, False, True, True)


def unpack(source: torch.dtype, place: torch.dtype, sums: bool, residual: bool) -> None:
    from lightning_moeclip.kernels.grad_unpack import grad_unpack

    grad_unpack(gradients(source), gradients(place), torch.ones(()), with_statistics=sums, with_residual=residual)


for source, place in ((FP32, FP32), (FP32, BF16), (BF16, BF16)):
    both = f"{NAMES[source]} to {NAMES[place]}"
    case("grad_unpack", both, unpack, source, place, False, False)
    case("grad_unpack", f"{both}, residual", unpack, source, place, True, True)


def unscale(dtype: torch.dtype, zeros: bool) -> None:
    from lightning_moeclip.kernels.grad_unpack import unscale_

    unscale_(gradients(dtype), torch.ones(()), counts_zeros=zeros)


def statistics(dtype: torch.dtype) -> None:
    from lightning_moeclip.kernels.grad_statistics import grad_statistics

    grad_statistics(gradients(dtype))


for dtype in (FP32, FP16, BF16):
    case("unscale_", NAMES[dtype], unscale, dtype, False)
    case("unscale_", f"{NAMES[dtype]}, counts zeros", unscale, dtype, True)
for dtype in (FP64, FP32, FP16, BF16):
    case("grad_statistics", NAMES[dtype], statistics, dtype)


def route(dtype: torch.dtype, experts: int, top_k: int, normalize: bool, tokens: int = 4096) -> None:
    from lightning_moeclip.kernels.router import route as op

    weights, *_ = op(torch.zeros(tokens, experts, dtype=dtype, requires_grad=True), top_k, normalize_topk=normalize)
    torch.autograd.backward(weights, torch.ones_like(weights))


case("route", "8 experts, top 2, fp32", route, FP32, 8, 2, True)
case("route", "8 experts, top 1, fp32", route, FP32, 8, 1, False, always=False)
case("route", "8 experts, top 2, fp32, 1 token", route, FP32, 8, 2, True, 1)
case("route", "64 experts, top 4, bf16", route, BF16, 64, 4, True)


def sort(experts: int) -> None:
    from lightning_moeclip.kernels.permute import sort_by_expert

    sort_by_expert(torch.zeros(4096, 2, dtype=torch.int64), torch.full((experts,), 8192, dtype=torch.int32))


def move(dtype: torch.dtype, tokens: int, width: int) -> None:
    from lightning_moeclip.kernels.permute import permute, unpermute

    slot, row = torch.arange(2 * tokens), torch.arange(2 * tokens).view(tokens, 2)
    x = torch.zeros(tokens, width, dtype=dtype, requires_grad=True)
    weights = torch.zeros(tokens, 2, requires_grad=True)
    y = unpermute(permute(x, slot, row), weights, slot, row)
    torch.autograd.backward(y, torch.ones_like(y))


for experts in (8, 64):
    case("sort_by_expert", f"{experts} experts", sort, experts)
for dtype in (FP32, FP16, BF16):
    case("permute", f"width 768, {NAMES[dtype]}", move, dtype, 4096, 768, always=dtype is BF16)
case("permute", "width 512, a ragged number of tokens, bf16", move, BF16, 4099, 512)


def clip(dtype: torch.dtype, num: int, dim: int, halves: bool) -> None:
    from lightning_moeclip.kernels.contrastive import clip_gradients, clip_statistics

    image, text = torch.zeros(num, dim, dtype=dtype), torch.zeros(num, dim, dtype=dtype)
    by_row, by_column, _ = clip_statistics(image, text, torch.ones(()))
    factors = torch.ones((), dtype=FP64), torch.ones(num, dtype=FP64)
    clip_gradients(image, text, torch.ones(()), by_row, by_column, *factors, needs_halves=halves)


def sigmoid(dtype: torch.dtype, num: int, dim: int) -> None:
    from lightning_moeclip.kernels.contrastive import sigmoid_gradients, sigmoid_statistics

    image, text = torch.zeros(num, dim, dtype=dtype), torch.zeros(num, dim, dtype=dtype)
    sigmoid_statistics(image, text, torch.ones(()), torch.ones(()))
    sigmoid_gradients(image, text, torch.ones(()), torch.ones(()), torch.ones(()), needs_pull=True)


for dtype in (FP32, FP16, BF16):
    case("clip", f"width 512, {NAMES[dtype]}", clip, dtype, 512, 512, False)
    case("sigmoid", f"width 512, {NAMES[dtype]}", sigmoid, dtype, 512, 512)
case("clip", "width 512, halves, bf16", clip, BF16, 512, 512, True)
case("clip", "width 768, a ragged number of samples, bf16", clip, BF16, 501, 768, False)
case("sigmoid", "width 768, a ragged number of samples, bf16", sigmoid, BF16, 501, 768)

OPERATIONS = list(dict.fromkeys(name.split(",")[0] for name in CASES))
