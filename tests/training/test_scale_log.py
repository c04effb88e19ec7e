"""``loss_scale``, ``overflow_rate`` and ``underflow_rate`` where Lightning logs, with the numbers counted by hand."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision
from lightning_moeclip.binding import LightningModule, pl
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

CSVLogger, Logger = pl.loggers.CSVLogger, pl.loggers.Logger

NAMES = ("loss_scale/model", "overflow_rate/model", "underflow_rate/model")
NUM_STEPS = 12
OVERFLOWS = {1: 1, 4: 0}  # rank by step
# what stands after each step that is logged: steps 1, 3, ..., 11; growth_interval is 3
LOGGED = {
    1: (128.0, 1 / 2, 5 / 16),
    3: (128.0, 1 / 4, 5 / 16),
    5: (64.0, 2 / 6, 5 / 16),
    7: (128.0, 2 / 8, 5 / 16),
    9: (128.0, 2 / 10, 5 / 16),
    # zeros are counted in every tenth step
    11: (256.0, 2 / 12, 1 / 16),
}


class Net(LightningModule):
    """A weight [8] whose gradients are the batch, one [8] without zeros, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.full, self.idle = (nn.Parameter(torch.ones(8)) for _ in range(3))
        self.callback_metrics: list[tuple[float, ...] | None] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.weight * batch).sum() + self.full.sum()
        self.log("train_loss", loss)
        return loss

    def on_after_backward(self) -> None:
        if OVERFLOWS.get(self.trainer.fit_loop.batch_idx) == self.global_rank:
            self.full.grad[0] = torch.nan

    def on_train_batch_end(self, *_: Any) -> None:
        found = self.trainer.callback_metrics
        self.callback_metrics.append(tuple(map(float, map(found.get, NAMES))) if NAMES[0] in found else None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class TwoOptimizers(Net):
    """Manual optimization, in which a scale is decided upon before the next backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([p], lr=1e-2) for p in (self.weight, self.full)]


class Memory(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.told.append((step, dict(metrics)))


def rows(rank: int) -> Any:
    """Not zero at two of eight places, of which the ranks share one, and from the tenth step on at seven."""
    few, many = torch.zeros(8), torch.ones(8)
    few[rank : rank + 2] = 1.0
    many[0] = 0.0
    return loader([few] * 10 + [many] * (NUM_STEPS - 10))


def fit(rank: Rank, module: Net, precision: str = "16-mixed", **arguments: Any) -> dict[str, float]:
    scaling = {"init_scale": 256.0, "growth_interval": 3} if precision == "16-mixed" else {}
    plugin = MoEClipPrecision(precision, device="cpu", **scaling)
    trainer = quiet_trainer(rank.world_size, plugins=[plugin], log_every_n_steps=2, **arguments)
    trainer.fit(module, rows(rank.index))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def of_scales(told: list[tuple[int | None, dict[str, float]]]) -> dict[int | None, tuple[float, ...]]:
    found = {step: tuple(metrics[name] for name in NAMES) for step, metrics in told if NAMES[0] in metrics}
    assert len(found) == sum(NAMES[0] in metrics for _, metrics in told), "once per step"
    return found


def assert_numbers(found: Mapping[int | None, tuple[float, ...]], wanted: Mapping[int, tuple[float, ...]]) -> None:
    assert found.keys() == wanted.keys()
    for step, numbers in wanted.items():
        assert found[step] == pytest.approx(numbers, rel=1e-6), step


@on_ranks(2)
def test_two_loggers_on_rank_0_and_callback_metrics_on_all_get_the_numbers_of_the_steps_that_are_logged(
    rank: Rank, tmp_path: Path
) -> None:
    module, memory = Net(), Memory()
    folder = tmp_path / str(rank.index)
    final = fit(rank, module, logger=[memory, CSVLogger(folder)])
    told = gather_objects(memory.told)
    assert_numbers(of_scales(told[0]), LOGGED)
    assert of_scales(told[1]) == {}
    # the user's own metrics are logged as ever
    assert [step for step, metrics in told[0] if "train_loss" in metrics] == list(LOGGED)
    assert tuple(final[name] for name in NAMES) == pytest.approx(LOGGED[11], rel=1e-6)
    for step, found in enumerate(module.callback_metrics):
        last = max((s for s in LOGGED if s <= step), default=None)
        assert found == (None if last is None else pytest.approx(LOGGED[last], rel=1e-6))
    files = list(folder.rglob("metrics.csv"))
    assert len(files) == (rank.index == 0)
    if files:
        with files[0].open() as file:
            lines = [line for line in csv.DictReader(file) if line[NAMES[0]]]
        assert_numbers({int(line["step"]): tuple(float(line[name]) for name in NAMES) for line in lines}, LOGGED)


@on_ranks(2)
def test_without_logger_with_fast_dev_run_and_with_nothing_to_scale_a_run_is_as_ever(rank: Rank) -> None:
    assert tuple(fit(rank, Net(), logger=False)[name] for name in NAMES) == pytest.approx(LOGGED[11], rel=1e-6)
    once = fit(rank, Net(), logger=False, fast_dev_run=1)
    assert tuple(once[name] for name in NAMES) == (256.0, 0.0, 5 / 16)
    for precision in ("32-true", "bf16-mixed"):
        memory = Memory()
        assert NAMES[0] not in fit(rank, Net(), precision, logger=memory)
        assert of_scales(memory.told) == {}


@on_ranks(2)
def test_two_optimizers_in_manual_optimization_log_the_decision_before_their_step(rank: Rank) -> None:
    module, memory = TwoOptimizers(), Memory()
    fit(rank, module, logger=memory)
    told = gather_objects(memory.told)
    assert of_scales(told[1]) == {}
    # the one of step n - 1: steps 0, 2, ..., 10, of which steps 1 and 4 overflowed
    wanted = {
        1: (256.0, 0.0, 5 / 16),
        3: (128.0, 1 / 3, 5 / 16),
        5: (64.0, 2 / 5, 5 / 16),
        7: (64.0, 2 / 7, 5 / 16),
        9: (128.0, 2 / 9, 5 / 16),
        11: (256.0, 2 / 11, 1 / 16),
    }
    assert_numbers(of_scales(told[0]), wanted)
