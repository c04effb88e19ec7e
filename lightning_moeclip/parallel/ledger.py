"""Outputs whose backward is a collective, remembered for the length of a step.

A rank whose ``training_step`` returns None still has to take part in the backward collectives of the others.
While the strategy records, layers and losses enter their outputs here, and the strategy runs a backward with
zero cotangents through them in place of the missing loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["enter", "recording"]

_pages: list[list[Tensor]] = []


def enter(output: Tensor) -> Tensor:
    """Remember an output whose backward communicates; returns it unchanged."""
    if _pages and output.requires_grad:
        _pages[-1].append(output)
    return output


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Collect the outputs that are entered while the body runs."""
    page: list[Tensor] = []
    _pages.append(page)
    try:
        yield page
    finally:
        _pages.pop()
