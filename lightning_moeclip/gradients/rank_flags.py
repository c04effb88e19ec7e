"""A yes or no of every rank in one sum of floats, from which each rank can be read again."""

from collections.abc import Sequence

__all__ = ["flag_fields", "flagged_ranks", "num_flag_fields"]

_BITS = 52  # a float64 sums so many different powers of two without rounding


def num_flag_fields(world_size: int) -> int:
    """Number of float64 that hold a flag of each rank."""
    return -(-world_size // _BITS)


def flag_fields(is_set: bool, *, rank: int, world_size: int) -> list[float]:
    """What ``rank`` puts into the sum: a power of two of its own, or zeros; [num_flag_fields]."""
    fields = [0.0] * num_flag_fields(world_size)
    fields[rank // _BITS] = 2.0 ** (rank % _BITS) if is_set else 0.0
    return fields


def flagged_ranks(totals: Sequence[float]) -> tuple[int, ...]:
    """The ranks whose flag is set in the sum over all ranks."""
    return tuple(
        index * _BITS + bit
        for index, total in enumerate(totals)
        if total
        for bit in range(_BITS)
        if int(total) >> bit & 1
    )
