"""The only gradient calls into torch.distributed.

Each is entered by every rank of its group in the same order, whatever the data.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast_from_first", "start_sum", "sum_over"]


def start_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start summing ``tensor`` in place over ``group``; None when there is nobody to sum with."""
    if group is None:
        return None
    return dist.all_reduce(tensor, group=group, async_op=True)


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``tensor`` summed in place over ``group``."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite ``tensors`` with those of the first rank of ``group``, one collective per dtype and device.

    Args:
        tensors: any shapes, the same on every rank of the group.
        group: None leaves them as they are.
    """
    if group is None:
        return
    first = dist.get_global_rank(group, 0)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, first, group=group)
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
