"""The user's own model and batches, made by a function that every process can import and call."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from lightning_moeclip.binding import LightningModule

__all__ = ["Factory", "TrainingCase", "load_factory", "make_case", "make_module", "rows_of", "take_rows"]

Factory = Callable[[], Any]


@dataclass(frozen=True)
class TrainingCase:
    """What a factory made.

    Attributes:
        module: the user's.
        batches: global ones, each a tree (tuples, lists, dicts, dataclasses known to pytree) of tensors whose dim 0
            counts rows. A list or tuple without tensors that has as many entries as there are rows, such as captions,
            is shared out like them, and so is an array; whatever else is no tensor is given to every rank as it is.
    """

    module: LightningModule
    batches: tuple[Any, ...]


def load_factory(address: str) -> Factory:
    """The function behind ``package.module:factory``; the current folder is looked into as Python does for scripts.

    Raises:
        ValueError: the address has another form, or there is no such module or function.
    """
    path, colon, name = address.partition(":")
    if not (path and colon and name):
        raise ValueError(
            f"{address!r} is no address of a factory. Write package.module:function, such as my_project.model:make."
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = import_module(path)
    except Exception as error:
        raise ValueError(
            f"{address!r}: importing {path} failed with {type(error).__name__}: {error}. Write a module that "
            f"`python -c 'import {path}'` imports from this folder."
        ) from error
    for segment in name.split("."):
        if not hasattr(found, segment):
            raise ValueError(f"{address!r}: {path} has no {name!r}. Write the name of a function in it.")
        found = getattr(found, segment)
    if not callable(found):
        raise ValueError(f"{address!r} is a {type(found).__name__}. Write the name of a function without arguments.")
    return found


def make_module(factory: Factory) -> nn.Module:
    """The module that a factory makes; one that makes batches too is welcome.

    Raises:
        ValueError: the factory failed, as it does for a model that needs a GPU; a lazy layer has no shape yet.
        TypeError: it made something else.
    """
    made = _call(factory)
    module = made[0] if isinstance(made, (tuple, list)) and made else made
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{_name(factory)} returned {_told(made)}. It must return an nn.Module, or a tuple of a LightningModule "
            "and a list of batches."
        )
    _check_shapes(factory, module)
    return module


def make_case(factory: Factory) -> TrainingCase:
    """Module and global batches that a factory makes.

    Raises:
        ValueError: the factory failed, a lazy layer has no shape yet, or batches have no rows, no tensors or unequal
            structure.
        TypeError: it made something else.
    """
    made = _call(factory)
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], LightningModule)):
        raise TypeError(
            f"{_name(factory)} returned {_told(made)}. It must return (module, batches): a LightningModule of "
            f"{LightningModule.__module__.rpartition('.core')[0]} and a list of global batches, of which each rank "
            "takes its share of the rows."
        )
    module, batches = made
    if isinstance(batches, Tensor) or not isinstance(batches, Sequence) or not batches:
        raise TypeError(
            f"{_name(factory)} returned {_told(batches)} as batches. It must be a list with at least one batch: "
            "write [batch, batch]."
        )
    _check_shapes(factory, module)
    shapes = [_layout(factory, index, batch) for index, batch in enumerate(batches)]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{_name(factory)} returned batches of unequal structure: batch 0 has {_described(shapes[0])}, batch "
                f"{index} has {_described(shape)}. Each batch must have the same fields with the same dims behind the "
                "first, which counts rows."
            )
    return TrainingCase(module, tuple(batches))


def _call(factory: Factory) -> Any:
    try:
        return factory()
    except Exception as error:
        needs_gpu = "cuda" in str(error).lower() or "nvidia" in str(error).lower()
        raise ValueError(
            f"{_name(factory)}() failed with {type(error).__name__}: {error}. "
            + (
                "It must make its model on the CPU: leave out .cuda() and device='cuda', since Lightning moves it."
                if needs_gpu
                else "It is called without arguments and must return (module, batches)."
            )
        ) from error


def _check_shapes(factory: Factory, module: nn.Module) -> None:
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(
            f"{_name(factory)} returned a module whose lazy parameters have no shape yet: {', '.join(lazy[:6])}. Run "
            "one forward in the factory, which gives them one."
        )


def _layout(factory: Factory, index: int, batch: Any) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Path, shape behind the rows, and dtype of each tensor of a batch."""
    leaves = [(path, leaf) for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)]
    named = [("".join(map(str, path)) or "the tensor", leaf) for path, leaf in leaves]
    told = ", ".join(f"{name}: {list(leaf.shape)}" for name, leaf in named)
    rows = {leaf.shape[0] if leaf.ndim else None for _, leaf in named}
    if len(rows) != 1 or None in rows:
        raise ValueError(
            f"{_name(factory)}: batch {index} has {told or 'no tensors'}. Every tensor of a batch must have the same "
            "number of rows in dim 0, so that each rank can take its share."
        )
    return tuple((name, tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in named)


def _described(layout: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> str:
    return ", ".join(f"{name}: [rows{''.join(f', {n}' for n in shape)}] {dtype}" for name, shape, dtype in layout)


def _name(factory: Factory) -> str:
    return getattr(factory, "__qualname__", None) or repr(factory)


def _told(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"a {type(made).__name__} of ({', '.join(type(part).__name__ for part in made)})"
    return f"a {type(made).__name__}"


def rows_of(batch: Any) -> int:
    """Rows of a batch of a ``TrainingCase``."""
    return next(leaf.shape[0] for _, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor))


def take_rows(batch: Any, first: int, end: int) -> Any:
    """The rows [first, end) of every tensor of a batch, and of lists that have an entry for each row."""
    rows = rows_of(batch)

    def is_by_row(part: Any) -> bool:
        if isinstance(part, (list, tuple)):
            return len(part) == rows and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(part))
        return tuple(getattr(part, "shape", ()))[:1] == (rows,)

    return tree_map(lambda part: part[first:end] if is_by_row(part) else part, batch, is_leaf=is_by_row)
