"""How often the experts of a layer were chosen in training, counted where tokens are sent to them.

Shapes: E experts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["TrainingLoad"]


class TrainingLoad:
    """Counts that only grow, so that any number of readers can take differences without taking from one another.

    A tensor that was read never changes afterwards. Nothing here waits for the device. Copies and pickles of a layer
    start from zero, so that no token is counted twice.
    """

    def __init__(self) -> None:
        self._choices: dict[str | None, Tensor] = {}
        self._drops: dict[str | None, Tensor] = {}

    @property
    def choices(self) -> Mapping[str | None, Tensor]:
        """Choices per expert by tower, [E], int64, before a capacity drops any."""
        return MappingProxyType(self._choices)

    @property
    def drops(self) -> Mapping[str | None, Tensor]:
        """Those of them that a capacity dropped, by tower, [E], int64."""
        return MappingProxyType(self._drops)

    def add(self, tower: str | None, choices_E: Tensor, served_E: Tensor | None) -> None:
        """Count one call.

        Args:
            tower: whose tokens they were.
            choices_E: choices per expert, int64.
            served_E: those that were not dropped; None for all of them.
        """
        _add(self._choices, tower, choices_E)
        if served_E is not None:
            _add(self._drops, tower, choices_E - served_E)
        elif tower not in self._drops:
            self._drops[tower] = torch.zeros_like(choices_E)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainingLoad":
        return TrainingLoad()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return TrainingLoad, ()


def _add(counts: dict[str | None, Tensor], tower: str | None, more_E: Tensor) -> None:
    """Count more, in a tensor of its own, on the device where the layer is now."""
    before_E = counts.get(tower)
    counts[tower] = more_E.clone() if before_E is None else before_E.to(more_E.device) + more_E
