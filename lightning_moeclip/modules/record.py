"""What a layer's router decided since the auxiliary loss last looked.

Shapes: T tokens, E experts.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["RoutingCall", "RoutingRecord", "in_backward"]


def in_backward() -> bool:
    """Whether this runs inside a backward pass: there a forward is a recomputation of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class RoutingCall:
    """One call of a layer, as the auxiliary loss needs it.

    Attributes:
        tower: whose tokens they were.
        logits: [T, E], with their graph.
        counts: [E], choices per expert, int64.
    """

    tower: str | None
    logits: Tensor
    counts: Tensor


class RoutingRecord:
    """The calls of a layer since the auxiliary loss last read them.

    A layer may be called several times in one step (both towers, a shared block), so calls add up. They start anew when
    the auxiliary loss has read them, when a backward has passed through them, when their graph is gone, and when
    gradients are switched on or off: nothing outlives its step. Without gradients only the last call of each tower is
    kept. Copies and pickles of a layer start with an empty record.

    Attributes:
        towers: names that all ranks have agreed to count, the same on every rank.
    """

    def __init__(self) -> None:
        self.towers: list[str | None] = [None, "image", "text"]
        self._calls: list[RoutingCall] = []
        self._with_grad = False
        self._is_spent = False
        self._graph: weakref.ref[Any] | None = None
        self._lost_gradient = False

    def add(self, call: RoutingCall, output: Tensor) -> None:
        """Enter a call.

        Args:
            call: its routing.
            output: of the layer, whose graph the call lives with.

        Raises:
            RuntimeError: the call recomputes one that the auxiliary loss has read without a graph.
        """
        with_grad = torch.is_grad_enabled()
        if in_backward():
            if with_grad and self._lost_gradient:
                raise RuntimeError(
                    "auxiliary_loss read a layer that ran without a graph, under reentrant activation checkpointing: "
                    "its gradient is lost. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
                )
            return
        graph_is_gone = self._graph is not None and self._graph() is None
        if self._is_spent or graph_is_gone or with_grad != self._with_grad:
            self._calls = []
        if not with_grad:
            self._calls = [kept for kept in self._calls if kept.tower != call.tower]
        self._calls.append(call)
        self._with_grad, self._is_spent, self._lost_gradient = with_grad, False, False
        self._graph = weakref.ref(output.grad_fn) if output.grad_fn is not None else None
        if call.logits.requires_grad:
            call.logits.register_hook(_Spend(self))

    def spend(self) -> None:
        """Mark the calls as those of a step that is over."""
        self._is_spent = True

    def take(self, *, needs_grad: bool) -> list[RoutingCall]:
        """Hand out the calls and start anew.

        Args:
            needs_grad: whether the caller wants a gradient for the router.
        """
        calls, self._calls, self._graph = self._calls, [], None
        self._lost_gradient = needs_grad and any(not call.logits.requires_grad for call in calls)
        return calls

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoutingRecord":
        return RoutingRecord()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RoutingRecord, ()


class _Spend:
    """Hook that marks a record without keeping it, or itself, alive through the graph."""

    def __init__(self, record: RoutingRecord) -> None:
        self._record = weakref.ref(record)

    def __call__(self, grad: Tensor) -> None:
        record = self._record()
        if record is not None:
            record.spend()
