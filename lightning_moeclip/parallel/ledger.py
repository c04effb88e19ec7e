"""Outputs whose backward is a collective, remembered for the length of a step.

A rank whose ``training_step`` returns None still has to take part in the backward collectives of the others.
While the strategy records, layers and losses enter their outputs here, and the strategy runs a backward with
zero cotangents through them in place of the missing loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["enter", "recording", "stand_in"]

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


def stand_in(outputs: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """A 0-d zero in place of a loss: its backward sends zero cotangents through ``outputs``, as the others' do."""
    return _StandIn.apply(torch.zeros((), device=device, requires_grad=True), *outputs)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, zero: Tensor, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(cotangent), *(torch.zeros_like(output) for output in ctx.saved_tensors))
