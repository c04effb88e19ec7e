"""Which way an operation is computed: by a Triton kernel on a GPU, by the same kernel under Triton's interpreter where
``TRITON_INTERPRET=1`` asks for it, by torch otherwise.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["is_interpreted", "num_warps", "runs_triton"]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache  # asked for every gradient of a step, and reading the environment takes a microsecond
def is_interpreted() -> bool:
    """Whether Triton's kernels run on the CPU; Triton reads the same variable when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on ``x`` is computed by a Triton kernel."""
    return (x.is_cuda or is_interpreted()) and _has_triton()


def num_warps(num_threads: int) -> int:
    """How many warps these threads are: 32 to each on NVIDIA's GPUs, 64 on AMD's for data centres.

    As many warps there would leave each thread half as much of a tile: 8 bytes a load where 16 are possible.
    """
    return num_threads // (32 if torch.version.hip is None else 64)
