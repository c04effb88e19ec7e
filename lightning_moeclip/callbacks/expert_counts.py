"""Tokens by expert since the last time, for a picture."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["ExpertCounts"]

_TAG, _ALL = "expert_load/", "all"  # as ExpertLoadMonitor writes them


class ExpertCounts:
    """Reads layers with ``training_load``, a growing count of this rank's tokens by expert for each tower."""

    def __init__(self) -> None:
        self._layers: dict[str, Any] = {}
        self._before: dict[str, list[float]] = {}

    def restart(self, module: nn.Module) -> None:
        """Look for the layers of ``module``, and count from now on."""
        self._layers = {name: layer for name, layer in module.named_modules() if hasattr(layer, "training_load")}
        self._before = self._read()

    def take(self, metrics: Mapping[str, Tensor]) -> tuple[dict[str, list[float]], str]:
        """Tokens, or shares of them, by name of layer and tower, and whose they are.

        Args:
            metrics: ``trainer.callback_metrics``; what ``ExpertLoadMonitor`` put there of all ranks goes first.
        """
        published = _published(metrics)
        if published:
            return published, "all ranks"
        now = self._read()
        new = {
            name: [count - old for count, old in zip(counts, self._before.get(name, [0.0] * len(counts)), strict=True)]
            for name, counts in now.items()
        }
        self._before = now
        return new, "rank 0"

    def _read(self) -> dict[str, list[float]]:
        return {
            name if tower is None else f"{name} {tower}": counts.tolist()
            for name, layer in self._layers.items()
            for tower, counts in layer.training_load.items()
        }


def _published(metrics: Mapping[str, Tensor]) -> dict[str, list[float]]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for tag, value in metrics.items():
        name, _, expert = tag.removeprefix(_TAG).rpartition("/")
        layer, _, tower = name.rpartition("/")
        if tag.startswith(_TAG) and expert.isdigit():
            found.setdefault((layer, tower), {})[int(expert)] = float(value)
    with_towers = {layer for layer, tower in found if tower != _ALL}
    return {
        layer if tower == _ALL else f"{layer} {tower}": [shares[expert] for expert in sorted(shares)]
        for (layer, tower), shares in found.items()
        if tower != _ALL or layer not in with_towers
    }
