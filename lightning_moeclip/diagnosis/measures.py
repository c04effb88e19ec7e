"""Errors, norms and counts of tensors, of which a rank may hold a part."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moeclip.diagnosis.observations import Sketch

__all__ = ["grad", "norm", "num_nonfinite", "numbers", "on_this_rank", "relative_error", "root_of_squares"]

_FLOOR = 1e-6  # of the norm of all: a gradient that is truly zero is noise over noise otherwise


def relative_error(found: Tensor, reference: Tensor, norm_of_all: float) -> float:
    """||found - ref|| / max(||ref||, 1e-6 ||all ref||); infinite where it is no number, 0 where all are zero."""
    floor = max(norm(reference), _FLOOR * norm_of_all)
    difference = norm(found - reference)
    if difference == 0.0:
        return 0.0
    error = difference / floor if floor > 0.0 else float("inf")
    return error if error == error else float("inf")


def numbers(values: Tensor) -> Sketch:
    """A sketch as plain numbers."""
    return tuple(values.tolist())


@torch.no_grad()
def on_this_rank(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, dense: a sparse one cannot be cut."""
    if not isinstance(tensor, DTensor):
        return tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    # all ranks have the same placements: a pending sum is one on all of them
    settled = (
        tensor
        if not any(p.is_partial() for p in tensor.placements)
        else tensor.redistribute(placements=[_settled(p) for p in tensor.placements])
    )
    return settled.to_local().detach()


def _settled(placement: Any) -> Any:
    return torch.distributed.tensor.Replicate() if placement.is_partial() else placement


def num_nonfinite(tensor: Tensor) -> int:
    """Elements that are NaN or infinite."""
    return int((~tensor.isfinite()).sum())


def grad(parameter: nn.Parameter) -> Tensor | None:
    """What this rank holds of a gradient."""
    return None if parameter.grad is None else on_this_rank(parameter.grad)


def norm(tensor: Tensor) -> float:
    """L2 norm."""
    return float(tensor.detach().norm())


def root_of_squares(tensors: Iterable[Tensor]) -> float:
    """L2 norm of all of them together."""
    return float(sum(norm(t) ** 2 for t in tensors)) ** 0.5
