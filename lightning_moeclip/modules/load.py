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
        zeros_E = torch.zeros_like(choices_E)
        self._choices[tower] = _sum(self._choices.get(tower, zeros_E), choices_E)
        if served_E is not None:
            self._drops[tower] = _sum(self._drops.get(tower, zeros_E), choices_E - served_E)
        else:
            self._drops.setdefault(tower, zeros_E)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainingLoad":
        return TrainingLoad()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return TrainingLoad, ()


def _sum(before_E: Tensor, more_E: Tensor) -> Tensor:
    """The sum, in a tensor of its own, on the device where the layer is now."""
    return before_E.to(more_E.device) + more_E
