"""Sums over gradients in float64: what a pass over them can say beside moving them.

Sums are taken in float64 from the first element on, since variances and noise are differences of them.
"""

import math
from collections.abc import Sequence

import torch
from lightning_moeclip.kernels.backend import runs_triton
from torch import Tensor

__all__ = [
    "ABSOLUTE",
    "DTYPES",
    "MAXIMUM",
    "NUM_COLUMNS",
    "NUM_NONFINITE",
    "NUM_ZEROS",
    "SIZE",
    "SQUARE",
    "TOTAL",
    "HostSums",
    "as_reals",
    "check_dtype",
    "grad_statistics",
    "is_dense",
    "num_reals",
]

# columns of a row of sums; non-finite elements are counted and in no sum
SIZE, TOTAL, SQUARE, ABSOLUTE, NUM_NONFINITE, NUM_ZEROS, MAXIMUM, NUM_COLUMNS = range(8)

# elements that are in float64 at once: few enough for the cache of a core, enough to keep an accelerator busy
_HOST_BLOCK, _DEVICE_BLOCK = 2**16, 2**22
DTYPES = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128]
)


def grad_statistics(tensors: Sequence[Tensor]) -> Tensor:
    """One row of sums per tensor, all of them in one pass.

    Args:
        tensors: any shapes, strides and floating or complex dtypes, on one device. A complex element counts as two.

    Returns:
        [len(tensors), NUM_COLUMNS], float64, on the device of the tensors: number of elements, their sum, the sum of
        their squares, of their absolutes, non-finite elements, zeros, and the largest absolute.

    Raises:
        ValueError: they are on several devices.
        TypeError: a dtype that is not floating or complex.
        RuntimeError: on a GPU, while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() and tensors:  # the compiler cannot lower a list of none
        return _grad_statistics_op(list(tensors))
    return _grad_statistics(tensors)


def _grad_statistics(tensors: Sequence[Tensor]) -> Tensor:
    for tensor in tensors:
        check_dtype(tensor, "tensors")
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"tensors lie on {tensors[0].device} and {tensor.device}. Give those of one device at a time."
            )
    if not tensors:
        return torch.zeros(0, NUM_COLUMNS, dtype=torch.float64)
    if runs_triton(tensors[0]):
        from lightning_moeclip.kernels import grad_triton

        return grad_triton.statistics_of(tensors)
    if not tensors[0].is_cpu:
        return torch.stack([_row_on_device(as_reals(tensor)) for tensor in tensors])
    reals = [as_reals(tensor) for tensor in tensors]
    sums = HostSums(max(len(part) for part in reals))
    return torch.tensor([sums.row(part) for part in reals], dtype=torch.float64)


def check_dtype(tensor: Tensor, name: str) -> None:
    """Refuse what has no sums.

    Raises:
        TypeError: a dtype that is not floating or complex.
    """
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} holds a tensor of {tensor.dtype}. Give floating or complex ones of 16 bits or more.")


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill memory without holes or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted((tensor.stride(d), tensor.size(d)) for d in range(tensor.dim()) if tensor.size(d) != 1):
        if stride != reach:
            return False
        reach *= size
    return True


def as_reals(tensor: Tensor) -> Tensor:
    """[n] or, of complex numbers, [2 n]: its elements in the order of memory; a copy where there is no such view."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)


def num_reals(tensor: Tensor) -> int:
    """Real numbers in a tensor."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel()


class HostSums:
    """Rows of tensors in the memory of the host, block by block through one float64 block that stays in cache.

    On a CPU, looking at a number is free: what non-finite elements need is done only where there are some.
    """

    def __init__(self, longest: int) -> None:
        """Allocate.

        Args:
            longest: elements of the largest tensor.
        """
        self.block = _HOST_BLOCK * torch.get_num_threads()
        self._wide, self._squares = torch.empty(2, min(longest, self.block), dtype=torch.float64)

    def row(self, reals: Tensor) -> list[float]:
        """The NUM_COLUMNS sums of a flat real tensor."""
        row = [0.0] * NUM_COLUMNS
        for part in reals.split(self.block):
            self.add(row, part)
        return row

    def add(self, row: list[float], part: Tensor) -> None:
        """Add a block, of ``block`` elements at most, to a row."""
        size = len(part)
        if size == 0:
            return
        wide = self._wide[:size].copy_(part)
        total, num_nonfinite = wide.sum().item(), 0
        if not math.isfinite(total):
            num_nonfinite = size - int((wide - wide).eq_(0.0).sum())
            total = wide.nan_to_num_(0.0, 0.0, 0.0).sum().item()
        row[SIZE] += size
        row[TOTAL] += total
        # not a dot product, which adds up with few partial sums: 60 times the rounding
        row[SQUARE] += torch.mul(wide, wide, out=self._squares[:size]).sum().item()
        row[ABSOLUTE] += wide.abs_().sum().item()
        row[NUM_NONFINITE] += num_nonfinite
        row[MAXIMUM] = max(row[MAXIMUM], wide.amax().item())
        # as float64 numbers, whose sum is several times faster than a count and as exact
        row[NUM_ZEROS] += wide.eq_(0.0).sum().item() - num_nonfinite


def _row_on_device(reals: Tensor) -> Tensor:
    rows = torch.stack([_row_of_block(part) for part in reals.split(_DEVICE_BLOCK)])
    row = rows.sum(0)
    row[MAXIMUM] = rows[:, MAXIMUM].amax()
    return row


def _row_of_block(block: Tensor) -> Tensor:
    """The same without a look at any number: nothing waits for the device."""
    wide = block.double()
    clean = wide.nan_to_num(0.0, 0.0, 0.0)
    absolute = clean.abs()
    size = torch.full((), float(block.numel()), dtype=torch.float64, device=block.device)
    maximum = absolute.max() if block.numel() else absolute.sum()
    num_finite, num_nonzero = (wide == clean).count_nonzero(), block.count_nonzero()
    sums = [clean.sum(), clean.square().sum(), absolute.sum()]
    return torch.stack([size, *sums, size - num_finite, size - num_nonzero, maximum])


@torch.library.custom_op("moeclip::grad_statistics", mutates_args=())
def _grad_statistics_op(tensors: list[Tensor]) -> Tensor:
    return _grad_statistics(tensors)


@_grad_statistics_op.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.empty(len(tensors), NUM_COLUMNS, dtype=torch.float64, device=device)
