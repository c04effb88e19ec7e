"""Sums over gradients in float64: what a pass over them can say beside moving them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "ABSOLUTE",
    "MAXIMUM",
    "NUM_COLUMNS",
    "NUM_NONFINITE",
    "NUM_ZEROS",
    "SIZE",
    "SQUARE",
    "TOTAL",
    "grad_statistics",
]

# columns of a row of sums; non-finite elements are counted and in no sum
SIZE, TOTAL, SQUARE, ABSOLUTE, NUM_NONFINITE, NUM_ZEROS, MAXIMUM, NUM_COLUMNS = range(8)


def grad_statistics(tensors: Sequence[Tensor]) -> Tensor:
    """One row of sums per tensor: [len(tensors), NUM_COLUMNS], float64, on the device of the tensors."""
    return torch.stack([_sums(t) for t in tensors])


_NUM_SUMS = 6
_HOST_BLOCK, _DEVICE_BLOCK = 2**16, 2**22


def _sums(gradient: Tensor) -> Tensor:
    """[7] float64: size, sum, squares, absolutes, non-finite, zeros, and last the maximum of the absolutes.

    Added up in float64, since variance and noise are differences of such sums.
    """
    flat = gradient.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    block = _HOST_BLOCK * torch.get_num_threads() if flat.device.type == "cpu" else _DEVICE_BLOCK
    rows = torch.stack([_sums_of_block(part) for part in flat.split(block)])
    return torch.cat([rows[:, :_NUM_SUMS].sum(0), rows[:, _NUM_SUMS].amax(0, keepdim=True)])


def _sums_of_block(block: Tensor) -> Tensor:
    """The same, of as many elements as may be there in float64 at once."""
    wide = block.double()
    clean = wide.nan_to_num(0.0, 0.0, 0.0)
    absolute = clean.abs()
    size = torch.tensor(float(block.numel()), dtype=torch.float64, device=block.device)
    maximum = absolute.max() if block.numel() else absolute.sum()
    num_finite, num_nonzero = (wide == clean).count_nonzero(), block.count_nonzero()
    sums = [clean.sum(), clean.square().sum(), absolute.sum()]
    return torch.stack([size, *sums, size - num_finite, size - num_nonzero, maximum])
