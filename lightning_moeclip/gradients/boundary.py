"""Local loss scaling: inside a region of the model, cotangents are a times the true ones.

A region is one or several modules. At their outputs the cotangent is multiplied by a, at their inputs divided by a, so
that gradients of the parameters inside are a times too large and everything outside is unchanged. With a power of two
both are exact except where a 16-bit cotangent under- or overflows.

The boundaries are autograd Functions that forward hooks put around a module's tensors: full backward hooks see neither
keyword inputs nor outputs in a dict. Whoever owns the regions divides the gradients of their parameters by a.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

__all__ = ["INCOMING", "INSIDE", "NUM_CROSSINGS", "KeepsOutputs", "Region", "attach", "forget_compiled", "is_boundary"]

INCOMING, INSIDE, NUM_CROSSINGS = range(3)


class Region:
    """Scale and events of one region; compiled graphs hold on to both tensors, so they change only in place.

    Attributes:
        name: its path.
        scale: a of this region alone, not of the regions around it; 0-d, float32, a power of two.
        events: [3], float32, since the owner last zeroed it. ``events[INCOMING]``: 1 if a cotangent that came from
            outside was not finite. ``events[INSIDE]``: 1 if one was that was made inside, from finite ones. Only the
            first of the two is marked, also where the region was called several times in a row.
            ``events[NUM_CROSSINGS]`` counts the cotangents that came in.

    Args:
        name: path of the region.
        scale: first value of a.
        device: that of the modules.
    """

    __slots__ = ("events", "name", "scale")

    def __init__(self, name: str, *, scale: float = 1.0, device: torch.device | str | None = None) -> None:
        self.name = name
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.events = torch.zeros(3, dtype=torch.float32, device=device)

    def __repr__(self) -> str:
        return f"Region({self.name!r})"


@runtime_checkable
class KeepsOutputs(Protocol):
    """What a layer keeps of its forward for a loss to read later, such as router logits.

    Such a tensor leaves its regions without being returned. Its keeper passes it through ``outgoing`` in order.
    """

    outgoing: OrderedDict[int, Callable[[Tensor], Tensor]]


def attach(modules: Iterable[nn.Module], region: Region) -> list[RemovableHandle]:
    """Make calls of ``modules`` the boundary of ``region``.

    A region inside another is attached before it. Copies and pickles of a module keep hooks that do nothing, since
    nobody would divide the gradients of the copy. A second derivative through a boundary is refused by autograd.

    Under ``torch.compile`` a region that changes its input in place is refused while tracing; without it the input's
    history is mended, so that it is right to go on with it.

    Args:
        modules: their forwards are the boundary; each once.
        region: what the hooks read and write.

    Returns:
        Handles whose ``remove`` undoes this; call ``forget_compiled`` afterwards.
    """
    enter, leave = _Enter(region), _Leave(region)
    handles = []
    for module in modules:
        # the hooks of an outer region, attached later, run first and last
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
        for layer in module.modules():
            keeper = getattr(layer, "routing_record", None)
            if isinstance(keeper, KeepsOutputs):
                handle = RemovableHandle(keeper.outgoing)
                keeper.outgoing[handle.id] = leave.leave
                handles.append(handle)
    forget_compiled()
    return handles


def forget_compiled() -> None:
    """Drop what ``torch.compile`` made so far: graphs are not guarded on hooks and would ignore new ones in silence."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def is_boundary(node: object) -> bool:
    """Whether a node of an autograd graph is a boundary: its ``region`` and ``is_exit`` say which."""
    return type(node) in _BOUNDARIES


class _Boundary(torch.autograd.Function):
    """Identity; its cotangent is multiplied by the scale at an exit and divided by it at an entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, is_exit: bool) -> Tensor:
        # attributes and not saved tensors: backward changes events in place and reads the scale of its own time
        ctx.scale, ctx.events, ctx.is_exit = region.scale, region.events, is_exit
        ctx.set_materialize_grads(False)
        if torch.compiler.is_compiling():
            # of a view autograd refuses to change the input of a region in place, whose history nothing would mend
            return x.detach() if is_exit else x.view_as(x)
        ctx.region = region
        # a view would refuse every change in place; this shares memory and version counter with x
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, None, None]:
        if cotangent is None:
            return None, None, None
        # a product with a 0-d factor has the dtype of the cotangent, to which the factor may be cast first
        wide = cotangent.float() if cotangent.element_size() < 4 else cotangent
        if ctx.is_exit:
            ctx.events[NUM_CROSSINGS].add_(1.0)
            _mark(ctx.events, INCOMING, cotangent)
            return (wide * ctx.scale).to(cotangent.dtype), None, None
        outgoing = (wide / ctx.scale).to(cotangent.dtype)
        _mark(ctx.events, INSIDE, outgoing)
        return outgoing, None, None


class _Rejoin(torch.autograd.Function):
    """Gives a tensor outside the history of its alias that the region changed in place."""

    @staticmethod
    def forward(ctx: Any, outside: Tensor, changed: Tensor) -> Tensor:
        ctx.mark_dirty(outside)
        return outside

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        return None, cotangent


_BOUNDARIES = {_Boundary._backward_cls}  # type: ignore[attr-defined]


def _mark(events: Tensor, kind: int, cotangent: Tensor) -> None:
    """Set ``events[kind]`` if the cotangent has an element that is not finite, unless the other event came first."""
    if cotangent.numel() == 0:
        return
    # the largest magnitude is finite only if all are, and unlike a sum it cannot overflow; one pass, no copy
    largest = torch.linalg.vector_norm(cotangent, ord=math.inf)
    is_bad = (largest < math.inf).logical_not()  # also of NaN, and in fewer kernels than isfinite
    events[kind].masked_fill_(is_bad > events[1 - kind], 1.0)


class _Hook:
    """What both hooks share. Without region it does nothing."""

    def __init__(self, region: Region | None = None) -> None:
        self.region = region

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return type(self)()

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return type(self), ()


class _Enter(_Hook):
    """Forward pre-hook: every tensor that may get a gradient passes the entry."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.region is None or not torch.is_grad_enabled():
            return None
        entered = _map_tensors(self.enter, (*args, *kwargs.values()))
        return tuple(entered[: len(args)]), dict(zip(kwargs, entered[len(args) :], strict=True))

    def enter(self, tensor: Tensor) -> Tensor:
        entered = _Boundary.apply(tensor, self.region, False)
        if not torch.compiler.is_compiling():
            entered._outside_of_region = (tensor, entered.grad_fn)
        return entered


class _Leave(_Hook):
    """Forward hook: every output passes the exit, and so does an input that the module changed in place."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.region is None or not torch.is_grad_enabled():
            return output
        if not torch.compiler.is_compiling():
            _map_tensors(self.rejoin, (args, kwargs))
        return _map_tensors(self.leave, [output])[0]

    def leave(self, tensor: Tensor) -> Tensor:
        return _Boundary.apply(tensor, self.region, True) if tensor.requires_grad else tensor

    def rejoin(self, entered: Tensor) -> Tensor:
        # where a region inside has this module as its boundary too, its hook was first and has gone one tensor out
        while "_continued" in entered.__dict__:
            entered = entered.__dict__["_continued"]
        outside, grad_fn = entered.__dict__.pop("_outside_of_region", (None, None))
        if outside is None:
            return entered
        entered.__dict__["_continued"] = outside
        if entered.grad_fn is grad_fn:
            return entered
        assert self.region is not None
        if outside._is_view():
            raise ValueError(
                f"Region {self.region.name!r} changes its input in place, and that input is a view of another tensor, "
                "whose history would no longer be right. Use inplace=False in the first layers of the region, "
                "or pass it input.clone()."
            )
        # the memory has not changed since the region itself changed it
        with torch.autograd._unsafe_preserve_version_counter(outside):
            _Rejoin.apply(outside, self.leave(entered))
        return entered


def _map_tensors(fn: Callable[[Tensor], Tensor], values: Sequence[Any]) -> list[Any]:
    """``values`` with ``fn`` applied to every tensor in them that requires gradients.

    What was one object stays one: a tensor given twice (attention asks whether its query is its key), and a value
    without such tensors (a list that the module fills for its caller).
    """
    seen: list[tuple[Tensor, Tensor]] = []
    mapped = []
    for value in values:
        leaves, spec = tree_flatten(value)
        new_leaves = [_map_leaf(fn, leaf, seen) for leaf in leaves]
        is_same = all(new is old for new, old in zip(new_leaves, leaves, strict=True))
        mapped.append(value if is_same else tree_unflatten(new_leaves, spec))
    return mapped


def _map_leaf(fn: Callable[[Tensor], Tensor], leaf: Any, seen: list[tuple[Tensor, Tensor]]) -> Any:
    if not (isinstance(leaf, Tensor) and leaf.requires_grad):
        return leaf
    for old, new in seen:
        if old is leaf:
            return new
    new = fn(leaf)
    seen.append((leaf, new))
    return new
