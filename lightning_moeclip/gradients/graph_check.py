"""Whether every parameter's gradient passes exactly the boundaries of the regions that own it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_moeclip.gradients.boundary import Region, is_boundary

__all__ = ["find_leaks"]

_State = tuple[Region, ...]

# graphs compiled by AOTAutograd, and autograd Functions as the "eager" backend of torch.compile keeps them
_OPAQUE = {"CompiledFunctionBackward", "ApplyTemplateBackward"}
_PLAIN, _LEAF, _BOUNDARY, _CLOSED = range(4)
_MAX_NAMES = 3
_ACCUMULATE_GRAD = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)


def find_leaks(loss: Tensor, owners: Mapping[int, _State], names: Mapping[int, str]) -> list[str]:
    """Walk the graph of a loss and report what enters or leaves a region past its boundary.

    That happens where a region's weights are used without calling the module (``F.linear(x, proj.weight)``,
    ``proj.forward(x)``), where a tensor comes into a region by attribute or closure, and where one comes out by
    attribute or in an object that ``torch.utils._pytree`` does not know. Such gradients would be wrong by a scale.

    Some graphs cannot be looked into, and what is only reached through them is not judged: those of ``torch.compile``
    with everything before them, and what reentrant activation checkpointing recomputes. A node is visited once for each
    set of regions it is reached in.

    Args:
        loss: before its backward.
        owners: regions of each parameter by ``id``, outermost first; none where there is no entry.
        names: path by ``id`` of every parameter that is to be judged.

    Returns:
        One message for each way of being wrong, empty when the regions are closed.
    """
    return _Walk(owners, names).run(loss)


class _Walk:
    def __init__(self, owners: Mapping[int, _State], names: Mapping[int, str]) -> None:
        self.owners, self.names = owners, names
        # nodes and not their ids: a node's Python object lives only as long as somebody holds it
        self.seen: dict[_State, set[Any]] = {}
        self.misplaced: dict[tuple[_State, _State], list[int]] = {}
        self.escaped: dict[Region, None] = {}

    def run(self, loss: Tensor) -> list[str]:
        kinds: dict[type, int] = {_ACCUMULATE_GRAD: _LEAF}
        waiting: list[tuple[Any, _State]] = [] if loss.grad_fn is None else [(loss.grad_fn, ())]
        while waiting:
            node, state = waiting.pop()
            kind = kinds.get(type(node), -1)
            if kind < 0:
                kind = kinds[type(node)] = _kind_of(node)
            if kind == _LEAF:
                self.judge(id(node.variable), state)
                continue
            if kind == _CLOSED:
                continue
            if kind == _BOUNDARY:
                state = (*state, node.region) if node.is_exit else self.without(state, node.region)
            seen = self.seen.setdefault(state, set())
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append((child, state))
        return self.report()

    def without(self, state: _State, region: Region) -> _State:
        """The regions that a node before the entry of ``region`` is in."""
        if state and state[-1] is region:
            return state[:-1]
        self.escaped[region] = None
        return state

    def judge(self, parameter: int, state: _State) -> None:
        expected = self.owners.get(parameter, ())
        if state != expected and parameter in self.names:
            self.misplaced.setdefault((expected, state), []).append(parameter)

    def report(self) -> list[str]:
        order = {parameter: index for index, parameter in enumerate(self.names)}
        messages, blamed = [], set()
        for (expected, state), parameters in self.misplaced.items():
            listed = _list([self.names[p] for p in sorted(parameters, key=order.__getitem__)])
            missed, extra = _difference(expected, state), _difference(state, expected)
            if missed or not extra:
                blamed |= {*expected}
                messages.append(
                    f"{listed}: used past the output of {_regions(missed or expected)}. Call the module itself, "
                    "neither its forward nor a function of its weights, and return what it computes, in tensors, "
                    "lists, tuples or dicts."
                )
            else:
                blamed |= {*extra}
                messages.append(
                    f"{listed}: used to make a tensor that comes into {_regions(extra)} past its input. Pass the "
                    "tensor to the module as an argument, not by an attribute or a closure."
                )
        for region in self.escaped:
            if region not in blamed:
                messages.append(
                    f"A tensor made of the input of {_regions((region,))} reaches the loss past its output. Return it "
                    "from the module, in tensors, lists, tuples or dicts, instead of keeping it in an attribute."
                )
        return messages


def _kind_of(node: Any) -> int:
    if is_boundary(node):
        return _BOUNDARY
    return _CLOSED if type(node).__name__ in _OPAQUE else _PLAIN


def _difference(some: _State, others: _State) -> _State:
    """What is left of ``some`` when each of ``others`` has taken one away."""
    left = list(some)
    for region in others:
        if region in left:
            left.remove(region)
    return tuple(left)


def _regions(regions: Iterable[Region]) -> str:
    return "the region " + " in ".join(repr(region.name) for region in reversed(list(regions)))


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
