"""Sums of squares that are right for large tensors.

On a CPU ``torch.linalg.vector_norm`` adds up float32 one number after the other: of 25 million random elements it
misses 0.3 % of the sum, of equal ones 2 %. Rows of a few thousand elements are added up in float64 instead, in the same
time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["sum_of_squares"]

_ROW = 4096
_LARGE = 2**18  # below it the error of one row after the other is under 3e-5, also for equal elements


def sum_of_squares(tensors: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """Sum of the squares of all elements.

    Args:
        tensors: real or complex, any shapes, dtypes and devices; 16 bits are squared in float32.
        device: of the result.

    Returns:
        0-d, float64; not finite when an element, or the square of a float32 element, is not.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        if tensor.numel() < _LARGE or tensor.dtype in (torch.float64, torch.complex128):
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            total += _by_rows(tensor).to(device)
    for (dtype, _), members in small.items():
        norms = torch._foreach_norm(members, 2, dtype=_wide(dtype))
        total += torch.stack(norms).double().square().sum().to(device)
    return total


def _by_rows(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=_wide(tensor.dtype))
    rest = torch.linalg.vector_norm(flat[whole:], dtype=_wide(tensor.dtype))
    return rows.double().square().sum() + rest.double().square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that squares are summed in."""
    return torch.promote_types(dtype, torch.float32)
