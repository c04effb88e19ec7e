"""Tells the loggers which experts get the tokens of training, under any strategy."""

import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks.world import World, check_given_once
from lightning_moeclip.monitor.bounds import check_steps
from lightning_moeclip.monitor.expert_load import (
    ALL_TOWERS,
    CountingLayer,
    Counts,
    ExpertLoad,
    LoadKey,
    TowerLoad,
    counting_layers,
)
from lightning_moeclip.scalars import last_step, log_scalars

__all__ = ["ExpertLoadMonitor", "PublishedLoad"]


@dataclass(frozen=True)
class PublishedLoad:
    """The load of all ranks between two publications.

    Attributes:
        step: optimizer steps taken when it was published.
        loads: by layer and tower; a tower, and a layer, without any token since the last publication is not there.
    """

    step: int
    loads: Mapping[LoadKey, TowerLoad]


class ExpertLoadMonitor(Callback):
    """Logs which experts get the tokens of training, per layer and tower: ``MoE`` layers and any others that count.

    Tags, where the tower "all" stands for all tokens of the layer:

    * ``expert_load/<layer>/<tower>/<expert>``: part of the choices.
    * ``expert_load_variation/<layer>/<tower>``: standard deviation over the experts divided by their mean.
    * ``expert_load_dead/<layer>/<tower>``: number of experts that no token chose.
    * ``expert_load_dropped/<layer>/<tower>``: part of the choices that ``capacity_factor`` dropped.

    All tokens of training since the last publication count, once each, on whichever rank they are: neither evaluation
    nor recomputation in backward. Works under any strategy, with the same numbers. One all-reduce per publication, to
    which strategies other than ``MoEClipStrategy`` add a barrier; when a tower comes up for the first time on any rank,
    the ranks exchange names and sum once more. What is left when training ends is published then.

    A layer of your own takes part when it has ``num_experts`` and ``training_load``, a mapping from the tower (or None)
    to the choices per expert so far, and for drops ``training_drops``.

    Args:
        every_n_steps: optimizer steps between publications; None: the Trainer's ``log_every_n_steps``.

    Attributes:
        last: what was published last; None before.

    Raises:
        ValueError: ``every_n_steps`` is no integer from 1, the callback is given twice, or a tower is called "all".
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None:
            advice = "Use 1 for every step, or None for the Trainer's log_every_n_steps."
            check_steps("every_n_steps", every_n_steps, advice=advice, owner="ExpertLoadMonitor")
        self.every_n_steps = every_n_steps
        self.last: PublishedLoad | None = None
        self._layers: dict[str, CountingLayer] = {}
        self._towers: tuple[str, ...] = ()
        self._read: dict[str, tuple[Counts, Counts]] = {}
        self._published_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_given_once(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the layers that count; what they have counted before is left out."""
        # not in setup: configure_model, which may build the layers, comes after it
        self._layers, self._towers, self.last = counting_layers(pl_module), (), None
        self._read = {name: _counts_of(layer) for name, layer in self._layers.items()}
        self._published_step = trainer.global_step
        if not self._layers and trainer.is_global_zero:
            warnings.warn(
                f"ExpertLoadMonitor found no layer that counts in {type(pl_module).__name__} and logs nothing. Use "
                "lightning_moeclip.modules.MoE, give a layer of yours num_experts and training_load, or leave it out.",
                stacklevel=2,
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self._every(trainer)
        # crossed rather than met: with several optimizers a batch takes several steps
        if every and trainer.global_step // every > self._published_step // every:
            self._publish(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._every(trainer) and trainer.global_step > self._published_step:
            self._publish(trainer, step=last_step(trainer))

    def _every(self, trainer: Trainer) -> int:
        """Optimizer steps between publications; 0: there are none."""
        if not self._layers:
            return 0
        return trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps

    def _publish(self, trainer: Trainer, *, step: int | None = None) -> None:
        """Sum over ranks and log; all ranks come here at the same step, whatever they have counted."""
        self._published_step = trainer.global_step
        new = self._take()
        load = _sum_over_ranks(trainer, self._layers, self._towers, new)
        counts = load.compute()
        if load.lacks_a_tower(counts):
            self._towers = _all_towers(trainer, _towers_in(new))
            load = _sum_over_ranks(trainer, self._layers, self._towers, new)
            counts = load.compute()
        self.last = PublishedLoad(trainer.global_step, load.loads(counts))
        scalars = {tag: value for key, row in self.last.loads.items() for tag, value in row.scalars(key)}
        log_scalars(trainer, scalars, step=step)

    def _take(self) -> dict[str, tuple[Counts, Counts]]:
        """Choices and drops of this rank since the last time, by layer."""
        new = {}
        for name, layer in self._layers.items():
            before, now = self._read[name], _counts_of(layer)
            self._read[name] = now
            new[name] = (_difference(before[0], now[0]), _difference(before[1], now[1]))
        return new


def _counts_of(layer: CountingLayer) -> tuple[Counts, Counts]:
    """Choices and drops so far, in tensors that stay as they are whatever the layer does with its own."""
    drops: Counts = getattr(layer, "training_drops", {})
    return (
        {tower: counts.detach().clone() for tower, counts in layer.training_load.items()},
        {tower: counts.detach().clone() for tower, counts in drops.items()},
    )


def _difference(before: Counts, now: Counts) -> Counts:
    return {
        tower: counts - before[tower].to(counts.device) if tower in before else counts for tower, counts in now.items()
    }


def _towers_in(counts: Mapping[str, tuple[Counts, Counts]]) -> set[str]:
    return {tower for choices, _ in counts.values() for tower in choices if tower is not None}


def _sum_over_ranks(
    trainer: Trainer,
    layers: Mapping[str, CountingLayer],
    towers: tuple[str, ...],
    counts: Mapping[str, tuple[Counts, Counts]],
) -> ExpertLoad:
    """The metric that ``compute`` sums over ranks, through the strategy, which may be any."""
    strategy = trainer.strategy

    def reduce(tensor: Tensor, group: Any = None) -> list[Tensor]:
        if isinstance(strategy, World):
            # float64 is exact up to 2^53 tokens
            return [strategy.reduce_sums(tensor.double().flatten()).to(tensor.dtype).view_as(tensor)]
        return [strategy.reduce(tensor.clone(), reduce_op="sum")]

    load = ExpertLoad({name: layer.num_experts for name, layer in layers.items()}, towers=towers, dist_sync_fn=reduce)
    load.to(strategy.root_device)
    for name, (choices, drops) in counts.items():
        load.update(name, choices, drops)
    return load


def _all_towers(trainer: Trainer, towers: Collection[str]) -> tuple[str, ...]:
    """Names that any rank has, in one order on all ranks; a collective.

    Raises:
        ValueError: one of them stands for all towers.
    """
    strategy, own = trainer.strategy, sorted(towers)
    by_rank = strategy.gather(own) if isinstance(strategy, World) else _gather(trainer, own)
    names = sorted({name for row in by_rank for name in row})
    if ALL_TOWERS in names:
        raise ValueError(
            f"A layer counts tokens of a tower {ALL_TOWERS!r}, which ExpertLoadMonitor writes for all towers together. "
            "Call the layer with another name of the tower."
        )
    return tuple(names)


def _gather(trainer: Trainer, names: list[str]) -> list[list[str]]:
    """Names of all ranks, by rank, through what every strategy of Lightning has."""
    strategy = trainer.strategy
    text = json.dumps(names).encode()
    longest = int(strategy.reduce(torch.tensor(len(text), device=strategy.root_device), reduce_op="max"))
    # every rank fills its own row, so that the sum is a gather: all_gather of Lightning warns in torch 2.13
    table = torch.zeros(trainer.world_size, longest, dtype=torch.uint8)
    table[trainer.global_rank] = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8)
    rows = strategy.reduce(table.to(strategy.root_device), reduce_op="sum").tolist()
    return [json.loads(bytes(row)) for row in rows]
