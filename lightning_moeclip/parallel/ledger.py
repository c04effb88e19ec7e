"""Outputs whose backward is a collective, remembered for the length of a step.

A rank whose ``training_step`` returns None still has to take part in the backward collectives of the others.
While the strategy records, layers and losses enter their outputs here, and the strategy runs a backward with
zero cotangents through them in place of the missing loss.

Under reentrant activation checkpointing an output has no graph: its layer runs again when a backward comes to the
checkpoint. There the checkpoint itself is remembered.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["Page", "enter", "recording", "stand_in"]


class Page(list[Tensor]):
    """Outputs with a graph, in the order in which they were made.

    Attributes:
        hidden: outputs without one, from within reentrant checkpoints.
        checkpoints: the outermost of these, nodes of the graph around them, once each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = []
        self.checkpoints: list[Any] = []


_pages: list[Page] = []


def enter(output: Tensor) -> Tensor:
    """Remember an output whose backward communicates; returns it unchanged."""
    if not _pages:
        return output
    page = _pages[-1]
    if output.requires_grad:
        page.append(output)
    elif not torch.is_grad_enabled() and (checkpoint := _outermost_checkpoint()) is not None:
        page.hidden.append(output)
        if not any(checkpoint is known for known in page.checkpoints):
            page.checkpoints.append(checkpoint)
    return output


def _outermost_checkpoint() -> Any | None:
    """The reentrant checkpoint whose first forward runs at the moment; None where there is none, or no graph for it."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            found = frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
    return found if found is not None and any(found.needs_input_grad) else None


@contextmanager
def recording() -> Iterator[Page]:
    """Collect the outputs that are entered while the body runs."""
    page = Page()
    _pages.append(page)
    try:
        yield page
    finally:
        _pages.pop()


def stand_in(outputs: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """A 0-d zero in place of a loss: its backward sends zero cotangents through ``outputs``, as the others' do.

    Args:
        outputs: a page, or outputs alone.
        device: of the zero.
    """
    zero = torch.zeros((), device=device, requires_grad=True)
    if not isinstance(outputs, Page) or not outputs.checkpoints:
        return _StandIn.apply(zero, *outputs)
    edges, zeros = [get_gradient_edge(output) for output in outputs], [torch.zeros_like(output) for output in outputs]
    for node in outputs.checkpoints:
        # one output is enough for the others to get zeros as well; what is no tensor looks like one of no dimension
        number = next((i for i, made in enumerate(node._input_metadata) if len(made.shape)), 0)
        made = node._input_metadata[number]
        edges.append(GradientEdge(node, number))
        zeros.append(torch.zeros(made.shape, dtype=made.dtype, device=made.device))
    return _StandInForNodes.apply(zero, edges, zeros)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, zero: Tensor, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(*outputs)
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(cotangent), *(torch.zeros_like(output) for output in ctx.saved_tensors))


class _StandInForNodes(torch.autograd.Function):
    """The same for nodes whose outputs nobody has: one backward within the backward, through all of them."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, edges: list[GradientEdge], zeros: list[Tensor]) -> Tensor:
        ctx.roots = edges, zeros
        return zero.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        edges, zeros = ctx.roots
        torch.autograd.backward(edges, zeros)
        return torch.zeros_like(cotangent), None, None
