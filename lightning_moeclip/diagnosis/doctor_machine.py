"""What the machine has for ranks: backends, memory for snapshots, shared memory, open files."""

import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_moeclip.diagnosis.findings import Finding
from lightning_moeclip.parallel.topology import rank_groups
from lightning_moeclip.state.snapshot import memory_bytes, share_of_memory

__all__ = ["backend_findings", "memory_finding", "open_files_finding", "shared_memory_finding"]

_GIB = 2**30
_SHARED_BYTES = 2**30  # NCCL takes some 30 MB a rank, and workers of a DataLoader hand over whole batches
_SNAPSHOTS = 2  # that CosineRollback keeps
_ADAMW_BYTES = 12  # of a parameter in a snapshot: float32 weight and two moments
_OTHER_FILES = 256  # libraries, loggers, workers of a DataLoader
_STORES = 4  # connections of a rank to the store: its group's, the watch's, and those of torchrun


def backend_findings() -> list[Finding]:
    """What ranks can talk through."""
    if not dist.is_available():
        return [Finding("backend", "error", "this torch has no torch.distributed", "Install torch from PyPI.")]
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    has_nccl = dist.is_nccl_available()
    nccl = "no NCCL" if not has_nccl else f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    told = f"{gloo}, {nccl}, torch is {build}"
    if not dist.is_gloo_available():
        return [Finding("backend", "error", told, "Install torch from PyPI: gloo carries what ranks agree on.")]
    count = torch.cuda.device_count()
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        told = f"{told}, {count} GPU(s): {', '.join(names)}"
        if not has_nccl:
            return [Finding("backend", "error", told, "Install torch from PyPI: GPUs talk through NCCL.")]
        return [Finding("backend", "ok", told)]
    if Path("/proc/driver/nvidia/gpus").is_dir() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        advice = "Install torch with CUDA: the command for this driver is on pytorch.org."
        return [Finding("backend", "warning", f"{told}, which sees none of this machine's NVIDIA GPUs", advice)]
    return [Finding("backend", "ok", f"{told}, no GPU: ranks run on the CPU over gloo")]


def memory_finding(ranks_per_node: int) -> Finding:
    """Room that ``CosineRollback`` takes for its snapshots, and what fits in.

    Args:
        ranks_per_node: ranks that share this machine's memory.
    """
    try:
        share, total = share_of_memory(ranks_per_node), memory_bytes()
    except ValueError as error:
        return Finding("memory for snapshots", "warning", "this system does not tell its memory", str(error))
    most = share / _SNAPSHOTS / _ADAMW_BYTES
    told = (
        f"{share / _GIB:.1f} GiB for each of {ranks_per_node} rank(s) of {total / _GIB:.1f} GiB: two snapshots of "
        f"{_count(most)} parameters under AdamW in float32"
    )
    return Finding("memory for snapshots", "ok", told)


def _count(number: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def shared_memory_finding(folder: str = "/dev/shm") -> Finding:
    """Room in shared memory, which NCCL and workers of a DataLoader need."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return Finding("shared memory", "note", f"{folder}: {error.strerror}")
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    told = f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB free in {folder}"
    if free < _SHARED_BYTES:
        advice = "Make room there, or give a container more: docker run --shm-size=8g (or --ipc=host)."
        return Finding("shared memory", "warning", told, advice)
    return Finding("shared memory", "ok", told)


def open_files_finding(world_size: int, expert_parallel_size: int) -> Finding:
    """Whether a rank may open as many files as gloo has connections.

    Args:
        world_size: number of ranks.
        expert_parallel_size: divides it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    groups = [("default", (tuple(range(world_size)),)), *rank_groups(world_size, expert_parallel_size).items()]
    # gloo connects every two ranks of a group; a rank is in one group of each axis
    sockets = sum(max((len(group) for group in found), default=1) - 1 for _, found in groups)
    needed = sockets + _STORES + _OTHER_FILES
    told = f"a rank may open {_limit(soft)}, and needs some {needed} among {world_size} ranks"
    if soft != resource.RLIM_INFINITY and soft < needed:
        advice = f"Write ulimit -n {needed * 2} before the launch (this user may have {_limit(hard)})."
        return Finding("open files", "error", told, advice)
    return Finding("open files", "ok", told)


def _limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY else str(number)
