"""What a layer's router decided since the auxiliary loss last looked.

Shapes: T tokens, E experts.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class _Kept:
    call: RoutingCall
    graph: "weakref.ref[Any] | None"

    def is_alive(self) -> bool:
        """Whether the layer's output, or what was made of it, can still be sent backward."""
        return self.graph is not None and self.graph() is not None


class RoutingRecord:
    """The calls of a layer since the auxiliary loss last read them.

    A layer may be called several times in one step (both towers, a shared block), so calls add up. They start anew when
    the auxiliary loss has read them, when a backward has passed through them, and between training and evaluation.
    A call whose output nothing can send backward any more (without gradients: any call) gives way to the next of its
    tower, so that what is never read does not pile up. Copies and pickles of a layer start with an empty record.

    Attributes:
        towers: names that all ranks have agreed to count, the same on every rank.
        outgoing: what logits pass through, in order, on their way out of the layer: boundaries of regions with a loss
            scale of their own, which logits would leave without being returned.
    """

    def __init__(self) -> None:
        self.towers: list[str | None] = [None, "image", "text"]
        self.outgoing: OrderedDict[int, Callable[[Tensor], Tensor]] = OrderedDict()
        self._calls: list[_Kept] = []
        self._is_training = False
        self._is_spent = False
        self._towers_without_graph: set[str | None] = set()

    def add(self, call: RoutingCall, output: Tensor, *, is_training: bool) -> None:
        """Enter a call.

        Args:
            call: its routing.
            output: of the layer, whose graph the call lives with.
            is_training: mode of the layer.

        Raises:
            RuntimeError: the call recomputes one that the auxiliary loss has read without a graph.
        """
        if in_backward():
            if torch.is_grad_enabled() and call.tower in self._towers_without_graph:
                raise RuntimeError(
                    "auxiliary_loss read a layer that ran without a graph, under reentrant activation checkpointing: "
                    "its gradient is lost. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
                )
            return
        for leave in self.outgoing.values():
            call = replace(call, logits=leave(call.logits))
        if self._is_spent or is_training != self._is_training:
            self._calls = []
        self._calls = [kept for kept in self._calls if kept.call.tower != call.tower or kept.is_alive()]
        self._calls.append(_Kept(call, weakref.ref(output.grad_fn) if output.grad_fn is not None else None))
        self._is_training, self._is_spent = is_training, False
        self._towers_without_graph = set()
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
        calls, self._calls = [kept.call for kept in self._calls], []
        self._towers_without_graph = {call.tower for call in calls if needs_grad and not call.logits.requires_grad}
        return calls

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoutingRecord":
        return RoutingRecord()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RoutingRecord, ()


class _Spend:
    """Hook that marks a record as that of a finished step, without keeping the record alive through the graph."""

    def __init__(self, record: RoutingRecord) -> None:
        self._record = weakref.ref(record)

    def __call__(self, grad: Tensor) -> None:
        record = self._record()
        if record is not None:
            record.spend()
