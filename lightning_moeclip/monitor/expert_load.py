"""Which experts get the tokens: counts summed over all ranks first, and only then made into shares.

A mean over ranks of what each rank makes of its own counts would be another number: two ranks that each starve the
other's experts look unbalanced one by one, and are balanced together.

Shapes: L layers, S towers with a row, R = L (1 + S) + 1 rows, E experts (of the layer with the most, in the table).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

__all__ = ["ALL_TOWERS", "CountingLayer", "Counts", "ExpertLoad", "LoadKey", "TowerLoad", "counting_layers"]

ALL_TOWERS = "all"
Counts = Mapping[str | None, Tensor]


class CountingLayer(Protocol):
    """Any layer that counts: ``MoE``, or a user's own; counts only grow."""

    num_experts: int

    @property
    def training_load(self) -> Counts:
        """This rank's choices per expert so far, [E], by tower (None for tokens of no tower)."""


def counting_layers(module: nn.Module) -> dict[str, CountingLayer]:
    """The layers that count, by path; a layer that is used in several places once, with its first path."""
    return {
        ".".join(part for part in path.split(".") if part != "_orig_mod"): cast(CountingLayer, layer)
        for path, layer in module.named_modules()
        # wrappers pass the attributes of what they wrap on, which would count twice
        if inspect.getattr_static(layer, "training_load", None) is not None
    }


class LoadKey(NamedTuple):
    """A row of the load.

    Attributes:
        layer: path of the layer in the module.
        tower: whose tokens are counted; "all" for all of them, also those of no tower.
    """

    layer: str
    tower: str


@dataclass(frozen=True)
class TowerLoad:
    """What the experts of a layer got of one tower's tokens, over all ranks.

    Attributes:
        choices: how often each expert was chosen, [E], int64, on the CPU.
        drops: how many of these a capacity dropped, [E], int64, on the CPU.
    """

    choices: Tensor
    drops: Tensor

    @property
    def share(self) -> Tensor:
        """Part of the choices that each expert has, [E], float64; NaN without any token."""
        return self.choices.double() / self.choices.sum()

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation over the experts divided by their mean; 0 is balance."""
        counts = self.choices.double()
        return (counts.std(correction=0) / counts.mean()).item()

    @property
    def num_dead(self) -> int:
        """Experts that no token chose."""
        return int((self.choices == 0).sum())

    @property
    def dropped(self) -> float:
        """Part of the choices that a capacity dropped."""
        return (self.drops.sum().double() / self.choices.sum()).item()

    def scalars(self, key: LoadKey) -> Iterator[tuple[str, float]]:
        """Tags and values for a logger."""
        path = f"{key.layer}/{key.tower}"
        for expert, share in enumerate(self.share.tolist()):
            yield f"expert_load/{path}/{expert}", share
        yield f"expert_load_variation/{path}", self.variation
        yield f"expert_load_dead/{path}", float(self.num_dead)
        yield f"expert_load_dropped/{path}", self.dropped


class ExpertLoad(Metric):
    """Choices and drops per layer, tower and expert, summed over ranks: one tensor for all layers, one collective.

    Its shape follows from the arguments alone, which must be the same on all ranks, never from what a rank has seen. A
    tower that has no row counts in the total of its layer and in one last row, by which all ranks learn of it.

    Args:
        num_experts: E of each layer, by its name.
        towers: those with a row of their own.
        dist_sync_fn: as in any ``Metric``: a tensor of this rank to those of all ranks, or to one that is their sum.
    """

    counts: Tensor

    def __init__(
        self,
        num_experts: Mapping[str, int],
        *,
        towers: Sequence[str] = (),
        dist_sync_fn: Callable[..., list[Tensor]] | None = None,
    ) -> None:
        super().__init__(dist_sync_fn=dist_sync_fn)
        self.num_experts, self.towers = dict(num_experts), tuple(towers)
        self.rows = tuple(LoadKey(layer, tower) for layer in num_experts for tower in (ALL_TOWERS, *self.towers))
        empty = torch.zeros(2, len(self.rows) + 1, max(num_experts.values()), dtype=torch.int64)
        self.add_state("counts", empty, dist_reduce_fx="sum")

    @override
    def update(
        self, layer: str, choices: Mapping[str | None, Tensor], drops: Mapping[str | None, Tensor] | None = None
    ) -> None:
        """Add counts of this rank.

        Args:
            layer: its name.
            choices: how often each expert was chosen, by tower (None for tokens of no tower), [E], integers.
            drops: how many of these a capacity dropped; None for none.
        """
        for kind, counts_by_tower in enumerate((choices, drops or {})):
            for tower, counts_E in counts_by_tower.items():
                rows = [self.rows.index(LoadKey(layer, ALL_TOWERS))]
                if tower is not None:
                    rows.append(self.rows.index(LoadKey(layer, tower)) if tower in self.towers else -1)
                for row in rows:
                    self.counts[kind, row, : len(counts_E)] += counts_E.to(self.counts.device)

    @override
    def compute(self) -> Tensor:
        """[2, R, E], int64: choices and drops of all ranks; waits for no host."""
        return self.counts

    def lacks_a_tower(self, counts: Tensor) -> bool:
        """Whether some rank counted a tower without a row; the same answer on all ranks.

        Args:
            counts: what ``compute`` returned.
        """
        return bool(counts[0, -1].any())

    def loads(self, counts: Tensor) -> dict[LoadKey, TowerLoad]:
        """Counts by layer and tower; without the rows that got no token at all.

        Args:
            counts: what ``compute`` returned.
        """
        found = {}
        for key, choices_E, drops_E in zip(self.rows, *counts.cpu()[:, :-1], strict=True):
            size = self.num_experts[key.layer]
            if choices_E.any():
                found[key] = TowerLoad(choices_E[:size].clone(), drops_E[:size].clone())
        return found
