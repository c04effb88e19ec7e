"""What the ranks tell each other beside tensors: their values, and their errors.

A check that only some ranks fail must not leave the others waiting in the next collective: each rank brings its
error here, and all of them raise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch.distributed as dist

__all__ = ["gather_objects", "raise_together", "together"]

Value = TypeVar("Value")
# types that another rank can build from a message alone, and that users catch by name
_SHARED_TYPES: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}


def gather_objects(value: Value) -> list[Value]:
    """Values of all ranks, by rank; every rank of the default group must call this.

    Args:
        value: picklable. Without a process group the answer is ``[value]``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast("list[Value]", values)


def raise_together(error: Exception | None) -> None:
    """Raise on every rank when any rank has an error; every rank of the default group must call this.

    Args:
        error: what this rank found wrong, or None.

    Raises:
        Exception: ``error`` itself on the ranks that have one.
        ValueError: or TypeError or RuntimeError, on the others: the type of the first failing rank where it is one
            of these three, else RuntimeError, with the message of every failing rank behind its number.
    """
    told = gather_objects(None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    failed = {rank: found for rank, found in enumerate(told) if found is not None}
    if not failed:
        return
    kinds = [name for name, _ in failed.values()]
    messages = [
        f"rank {rank}: {message}" if name in _SHARED_TYPES else f"rank {rank}: {name}: {message}"
        for rank, (name, message) in failed.items()
    ]
    raise _SHARED_TYPES.get(kinds[0], RuntimeError)("\n".join(messages))


@contextmanager
def together() -> Iterator[None]:
    """Raise what the body raises on one rank on all of them; the body itself calls no collective.

    Raises:
        Exception: as in ``raise_together``.
    """
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    raise_together(found)
