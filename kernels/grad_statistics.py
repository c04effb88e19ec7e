"""Sums over gradients in float64: what a pass over them can say beside moving them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["MAXIMUM", "NUM_COLUMNS", "NUM_NONFINITE", "NUM_ZEROS", "SIZE", "SQUARE", "TOTAL", "ABSOLUTE", "grad_statistics"]

# columns of a row of sums; non-finite elements are counted and in no sum
SIZE, TOTAL, SQUARE, ABSOLUTE, NUM_NONFINITE, NUM_ZEROS, MAXIMUM, NUM_COLUMNS = range(8)


def grad_statistics(tensors: Sequence[Tensor]) -> Tensor:
    """One row of sums per tensor: [len(tensors), NUM_COLUMNS], float64, on the device of the tensors."""
    raise NotImplementedError
