"""Tokens by expert since the last time, for a picture."""

from torch import nn

from lightning_moeclip.callbacks.expert_load_monitor import PublishedLoad
from lightning_moeclip.monitor.expert_load import ALL_TOWERS, CountingLayer, counting_layers

__all__ = ["ExpertCounts"]


class ExpertCounts:
    """Reads layers with ``training_load``, a growing count of this rank's tokens by expert for each tower."""

    def __init__(self) -> None:
        self._layers: dict[str, CountingLayer] = {}
        self._before: dict[str, list[int]] = {}

    def restart(self, module: nn.Module) -> None:
        """Look for the layers of ``module``, and count from now on."""
        self._layers = counting_layers(module)
        self._before = self._read()

    def take(self, published: PublishedLoad | None) -> tuple[dict[str, list[int]], str]:
        """Tokens by name of layer and tower, and whose they are, since when.

        Args:
            published: of all ranks, by ``ExpertLoadMonitor``; it goes before what this rank has counted.
        """
        now = self._read()
        before, self._before = self._before, now
        if published is not None:
            return _by_name(published), f"all ranks, as published after {published.step} optimizer steps"
        new = {
            name: [count - old for count, old in zip(counts, before.get(name, [0] * len(counts)), strict=True)]
            for name, counts in now.items()
        }
        return new, "rank 0 since the picture before"

    def _read(self) -> dict[str, list[int]]:
        return {
            _name(layer, tower): counts.tolist()
            for layer, counting in self._layers.items()
            for tower, counts in counting.training_load.items()
        }


def _by_name(published: PublishedLoad) -> dict[str, list[int]]:
    """Choices of the towers; of all tokens where a layer knows no towers."""
    with_towers = {key.layer for key in published.loads if key.tower != ALL_TOWERS}
    return {
        _name(key.layer, None if key.tower == ALL_TOWERS else key.tower): load.choices.tolist()
        for key, load in published.loads.items()
        if key.tower != ALL_TOWERS or key.layer not in with_towers
    }


def _name(layer: str, tower: str | None) -> str:
    return layer if tower is None else f"{layer} {tower}"
