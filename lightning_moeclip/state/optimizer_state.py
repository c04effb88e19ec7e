"""State of an optimizer split into its tensors, which are copied in place, and what is around them.

Optimizers make their state in the first step and keep references to it, so a state of before that step has to go again,
and one that somebody has cleared has to come back.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Frame", "OptimizerFrame"]


@dataclass(frozen=True)
class _Blank:
    """Stands for a tensor whose values are kept elsewhere."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fits(self, value: object) -> bool:
        return isinstance(value, Tensor) and (value.shape, value.dtype, value.device) == (
            self.shape,
            self.dtype,
            self.device,
        )

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Frame:
    """What is around the tensors of an optimizer; never changed, so that its copies may be itself.

    Attributes:
        groups: hyper-parameters of each parameter group.
        state: by parameter.
    """

    groups: list[dict[str, Any]]
    state: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frame":
        return self


class OptimizerFrame:
    """Everything of an optimizer but its parameters: hyper-parameters and state, seen in place.

    Args:
        optimizer: whose frame it is; groups and parameters are looked up anew in each call.
        names: of the parameters that it steps, by id; others go by their place.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names

    def parameter_names(self) -> list[list[str]]:
        """Names of the parameters of each group."""
        return [
            [self._names.get(id(p), f"group {j}, parameter {k}") for k, p in enumerate(group["params"])]
            for j, group in enumerate(self._optimizer.param_groups)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of state and hyper-parameters as they are, by parameter and key."""
        found: dict[str, Tensor] = {}
        for j, group in enumerate(self._optimizer.param_groups):
            found |= dict(_tensors(_without_parameters(group), f"group{j}"))
        for label, key in self._keys():
            found |= dict(_tensors(self._optimizer.state[key], label))
        return found

    def read(self) -> Frame:
        """What is around the tensors, as copies."""
        return Frame(
            [_strip(_without_parameters(group)) for group in self._optimizer.param_groups],
            {label: _strip(self._optimizer.state[key]) for label, key in self._keys()},
        )

    def write(self, frame: Frame) -> None:
        """Put back what ``read`` returned; tensors that are there stay, with their values, and missing ones are made.

        Args:
            frame: of the same parameter groups.
        """
        for group, kept in zip(self._optimizer.param_groups, frame.groups, strict=True):
            value = _fill(kept, group)
            for name in _without_parameters(group).keys() - value.keys():
                del group[name]
            group.update(value)
        state: dict[Any, Any] = self._optimizer.state
        for label, key in list(self._all_keys()):
            if label not in frame.state:
                state.pop(key, None)
                continue
            value = _fill(frame.state[label], state.get(key))
            state[key].clear()
            state[key].update(value)

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """Label and key of each entry of the state that belongs to a parameter, or to none."""
        return ((label, key) for label, key in self._all_keys() if key in self._optimizer.state)

    def _all_keys(self) -> Iterator[tuple[str, Any]]:
        for names, group in zip(self.parameter_names(), self._optimizer.param_groups, strict=True):
            yield from zip(names, group["params"], strict=True)
        yield from ((repr(key), key) for key in list(self._optimizer.state) if not isinstance(key, Tensor))


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) is dict:
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")


def _strip(value: Any) -> Any:
    """A copy with blanks in the place of tensors."""
    if isinstance(value, Tensor):
        return _Blank(value.shape, value.stride(), value.dtype, value.device)
    if type(value) is dict:
        return {key: _strip(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_strip, value))
    return copy.deepcopy(value)


def _fill(kept: Any, live: Any) -> Any:
    """A copy of ``kept`` with the tensors of ``live`` in the place of blanks, and new ones where none fits."""
    if isinstance(kept, _Blank):
        return live if kept.fits(live) else kept.make()
    if type(kept) is dict:
        known = live if isinstance(live, Mapping) else {}
        return {key: _fill(item, known.get(key)) for key, item in kept.items()}
    if type(kept) in (list, tuple):
        beside = live if isinstance(live, (list, tuple)) and len(live) == len(kept) else [None] * len(kept)
        return type(kept)(_fill(item, other) for item, other in zip(kept, beside, strict=True))
    return copy.deepcopy(kept)
