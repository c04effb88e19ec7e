"""The memory that gradients live in: one slab per process group, dtype and device, allocated once, at fixed places.

Buckets are parts of a slab and ``.grad`` views them, so nothing is allocated for a gradient after the first step. On a
GPU the slab is memory that NCCL has registered, where torch's build can do that: a collective then needs no copy into
buffers of its own.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.mesh import Axis
from lightning_moeclip.parallel.plan import BucketPlan, SyncPlan

__all__ = ["Slabs", "places_of"]

_log = logging.getLogger("lightning_moeclip")

# a gradient worth aligning, and every bucket, begins at a multiple of so many elements: 128 bytes at least
_ALIGNMENT, _LARGE = 64, 1024


def places_of(plan: BucketPlan) -> list[tuple[int, int]]:
    """Where each gradient of a bucket begins and ends in its flat buffer."""
    places, end = [], 0
    for planned in plan.parameters:
        size = int(torch.Size(planned.shape).numel())
        first = _aligned(end) if size >= _LARGE else end
        end = first + size
        places.append((first, end))
    return places


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Slabs:
    """The slabs of one plan; making them is a collective on GPUs.

    Attributes:
        flats: zeros for every bucket of the plan, in its order, each a part of a slab.
    """

    def __init__(self, plan: SyncPlan, groups: Mapping[Axis, dist.ProcessGroup | None]) -> None:
        """Allocate.

        Args:
            plan: equal on all ranks.
            groups: who sums a bucket, by its axis.
        """
        self._registered: list[tuple[Any, Any]] = []  # backends and pools
        sizes = [places_of(bucket)[-1][1] for bucket in plan.buckets]
        members: dict[tuple[Axis, torch.dtype, torch.device], list[int]] = {}
        for index, bucket in enumerate(plan.buckets):
            members.setdefault((bucket.axis, bucket.dtype, bucket.device), []).append(index)
        flats: dict[int, Tensor] = {}
        for (axis, dtype, device), indices in members.items():
            places = [_aligned(sizes[index]) for index in indices]
            slab = self._slab(sum(places), dtype, device, groups[axis])
            for index, part in zip(indices, slab.split(places), strict=True):
                flats[index] = part[: sizes[index]]
        self.flats = [flats[index] for index in range(len(plan.buckets))]

    def _slab(self, numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
        if device.type == "cuda" and group is not None:
            made = _registered(numel, dtype, device, group)
            # all ranks have registered memory, or none
            everywhere = all(gather_objects(made is not None))
            _say_once("registered with NCCL" if everywhere else "plain: torch or NCCL cannot register it here")
            if made is not None:
                slab, backend, pool = made
                if everywhere:
                    self._registered.append((backend, pool))
                    return slab
                backend.deregister_mem_pool(pool)
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self) -> None:
        """Let NCCL forget the memory, which lives on as long as gradients view it."""
        for backend, pool in self._registered:
            backend.deregister_mem_pool(pool)
        self._registered.clear()


def _registered(
    numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any, Any] | None:
    """Zeros in a pool of their own that neither grows nor shrinks, registered once; None where there is no such."""
    backend: Any = group._get_backend(device)  # NCCL's, for one, has more than its base
    # a communicator is made by its first collective, and registering wants one
    sum_over(torch.zeros(1, device=device), group)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return None  # NCCL cannot register such segments (nccl#1584)
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            slab = torch.zeros(numel, dtype=dtype, device=device)
        backend.register_mem_pool(pool)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        _log.debug("No registered memory: %s", error)
        return None
    return slab, backend, pool


_said: set[str] = set()


def _say_once(how: str) -> None:
    if how not in _said and dist.get_rank() == 0:
        _log.info("Memory of gradients is %s.", how)
    _said.add(how)
