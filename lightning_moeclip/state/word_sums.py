"""Sums of the 64-bit words of memory, which a flipped bit always changes, taken while the memory is copied."""

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["FLOATS", "MODULUS", "WORD", "copy_and_sum", "device_sum", "in_threads", "sum_words"]

WORD, MODULUS = 8, 2**64
FLOATS: dict[torch.dtype, type[np.floating[Any]]] = {torch.float32: np.float32, torch.float64: np.float64}
_PART_BYTES = 512 * 1024  # in the cache of one core, with its copy

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results in order, worked out by as many threads as torch may use.

    Each takes a tensor at a time and waits for nobody: where ranks share processors, the short calls of torch's own
    threads would wait for each other hundreds of times.
    """
    number = min(torch.get_num_threads(), len(items))
    if number <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(work, items))


def copy_and_sum(target: Tensor, source: Tensor, dtype: type[np.floating[Any]] | None) -> tuple[int, bool]:
    """Copy [n] uint8 on the host.

    Returns:
        Sum of the words of ``source``, and whether its values, of ``dtype``, are finite; True without a dtype.
    """
    target_bytes, source_bytes, total, is_finite = target.numpy(), source.numpy(), 0, True
    for start in range(0, len(source_bytes), _PART_BYTES):
        part = source_bytes[start : start + _PART_BYTES]
        target_bytes[start : start + _PART_BYTES] = part
        total += _sum_array(part)
        if dtype is not None:
            # the extremes of numpy hold NaN where there is one, and take half of the time of its sum
            values = part.view(dtype)
            is_finite &= math.isfinite(np.maximum.reduce(values)) and math.isfinite(np.minimum.reduce(values))
    return total % MODULUS, is_finite


def sum_words(memory: Tensor) -> int:
    """Sum modulo 2**64 of the 64-bit words of [n] uint8 on the host, the last one padded with zeros."""
    return _sum_array(memory.numpy()) % MODULUS


def _sum_array(memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> int:
    end = len(memory) // WORD * WORD
    rest = int.from_bytes(memory[end:].tobytes(), sys.byteorder)
    return int(np.add.reduce(memory[:end].view(np.int64))) + rest


def device_sum(memory: Tensor) -> Tensor:
    """0-d int64: ``sum_words`` of [n] uint8 on any device, without waiting for it."""
    if memory.storage_offset() % WORD:
        memory = memory.clone()  # int64 views start at whole words
    end = len(memory) // WORD * WORD
    rest = torch.nn.functional.pad(memory[end:], (0, end + WORD - len(memory)))
    return memory[:end].view(torch.int64).sum() + rest.view(torch.int64).sum()
