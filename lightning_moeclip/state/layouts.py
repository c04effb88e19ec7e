"""Layouts of values that are not one tensor: what of them can be told in a message, and made anew from it.

An optimizer keeps tensors, numbers, and lists of either. A value is taken apart into its layout, which is small and
can be sent as an object, and its tensors, which travel as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout", "Opaque", "TensorLayout", "build", "leaf_layouts", "plain_values", "take_apart"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


@dataclass(frozen=True)
class TensorLayout:
    """Shape and dtype of a tensor, and whether it stays on the host."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool


@dataclass(frozen=True)
class Plain:
    """A number, a name or None, by its type; its value is told apart from the layout."""

    kind: str


@dataclass(frozen=True)
class Opaque:
    """A value of a class that nobody knows: it is neither compared nor made anew."""

    kind: str


@dataclass(frozen=True)
class Container:
    """A list, tuple or dict of values."""

    kind: str
    keys: tuple[Any, ...]
    values: tuple["Layout", ...]


Layout = TensorLayout | Plain | Opaque | Container


def take_apart(value: object) -> tuple[Layout, list[object]]:
    """Layout of a value, and its leaves, tensors and plain values, in order."""
    leaves: list[object] = []
    return _layout_of(value, leaves), leaves


def _layout_of(value: object, leaves: list[object]) -> Layout:
    if isinstance(value, Tensor):
        leaves.append(value)
        return TensorLayout(tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, _PLAIN):
        leaves.append(value)
        return Plain(type(value).__name__)
    if isinstance(value, Mapping):
        keys = tuple(sorted(value, key=repr))
        return Container("dict", keys, tuple(_layout_of(value[key], leaves) for key in keys))
    if type(value) in (list, tuple):
        items: Sequence[object] = value  # type: ignore[assignment]
        return Container(type(value).__name__, (), tuple(_layout_of(item, leaves) for item in items))
    return Opaque(type(value).__qualname__)


def build(layout: Layout, leaves: Iterator[object]) -> object:
    """The value with this layout and these leaves.

    Raises:
        TypeError: there is an opaque value in it.
    """
    if isinstance(layout, Opaque):
        raise TypeError(f"a {layout.kind} cannot be sent to another rank")
    if not isinstance(layout, Container):
        return next(leaves)
    values = [build(part, leaves) for part in layout.values]
    if layout.kind == "dict":
        return dict(zip(layout.keys, values, strict=True))
    return tuple(values) if layout.kind == "tuple" else values


def leaf_layouts(layout: Layout) -> Iterator[Layout]:
    """Layouts of the leaves in order, opaque values among them."""
    if not isinstance(layout, Container):
        yield layout
        return
    for part in layout.values:
        yield from leaf_layouts(part)


def plain_values(leaves: Sequence[object]) -> tuple[object, ...]:
    """The leaves that are no tensors."""
    return tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
