"""Metrics of torchmetrics, and values that are synced over ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Accuracy, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_moeclip.binding import Callback
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.logged import NEVER, PLACES, Keeps, fitted, kept
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    hooks_of,
    ours,
    under_both,
    weights,
)


class Adds(Metric):
    """A metric of one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        self.total += value

    def compute(self) -> Tensor:
        return self.total


class Measured(Damper):
    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.nn.ModuleDict({"a": Adds(), "b": Adds()})
        self.nested = torch.nn.ModuleList([torch.nn.ModuleDict({"c": Adds()})])
        self.accuracy = Accuracy(task="multiclass", num_classes=2)
        self.collected = MetricCollection(
            [MulticlassAccuracy(num_classes=2, average="micro"), MulticlassPrecision(num_classes=2, average="micro")]
        )
        self.resets: Counter[str] = Counter()
        for name, metric in self.sums.items():
            metric.reset = lambda name=name, reset=metric.reset: (self.resets.update([name]), reset())[1]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.sums["a"](batch_idx)
        self.sums["b"].update(batch_idx)
        self.nested[0]["c"](batch_idx)
        self.collected(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([batch_idx % 2, 1]))
        self.log("a", self.sums["a"], on_step=True, on_epoch=True)
        self.log("b", self.sums["b"], on_step=False, on_epoch=True)
        self.log("c", self.nested[0]["c"], on_step=True, on_epoch=False)
        self.log_dict(self.collected, on_step=True, on_epoch=True)
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.attributes = {name: r.meta.metric_attribute for name, r in self.trainer.fit_loop._results.items()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.accuracy(torch.tensor([[0.9, 0.1]]), torch.tensor([batch_idx]))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)


def test_metrics_are_computed_at_steps_and_epochs_and_reset_after_each() -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = Measured(), make(max_epochs=2)
        trainer.fit(module)
        return kept(trainer), dict(module.resets), module.attributes, {n: m.total for n, m in module.sums.items()}

    found, _, attributes, left = under_both(script)
    assert (found["logged"]["a_step"], found["logged"]["a_epoch"], found["logged"]["b"]) == (2, 3, 3)
    assert (found["logged"]["c"], found["logged"]["accuracy_epoch"]) == (2, 0.5)
    assert found["logged"]["MulticlassAccuracy_epoch"] == pytest.approx(5 / 6)
    assert attributes["training_step.c"] == "nested.0.c"
    assert left == {"a": 0, "b": 0}


def test_a_metric_that_computes_two_numbers_is_refused() -> None:
    class Two(Adds):
        def compute(self) -> Any:
            return self.total, self.total

    class Logs(Damper):
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def on_train_start(self) -> None:
            self.two.update(1.0)
            self.log("foo", self.two)

    with pytest.raises(ValueError, match=r"compute\(\)` return of.*foo' must be a tensor"):
        ours(limit_val_batches=0).fit(Logs())


class Synced(Damper):
    """Numbers that tell a mean over ranks from one over batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        rank = float(self.trainer.global_rank)
        for op in ("sum", "mean", "max", "min"):
            self.log(f"step {op}", batch_idx + 10 * rank, on_step=True, on_epoch=False, sync_dist=True, reduce_fx=op)
            self.log(f"epoch {op}", batch_idx + 10 * rank, on_step=False, on_epoch=True, sync_dist=True, reduce_fx=op)
        self.log("both", batch_idx + 10 * rank, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", rank, on_step=True, on_epoch=False)
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        rank = float(self.trainer.global_rank)
        self.log("val mean", batch_idx + 10 * rank, sync_dist=True)
        self.log("val sum", batch_idx + 10 * rank, sync_dist=True, reduce_fx="sum")
        self.log("val first", rank, sync_dist=True, rank_zero_only=False)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("first rank", 5.0, rank_zero_only=True)


@on_ranks(2)
def sync_on_ranks(rank: Rank) -> Any:
    logger = Keeps()
    trainer = ours(2, logger=logger, limit_val_batches=2)
    trainer.fit(Synced())
    return {k: v.item() for k, v in trainer.callback_metrics.items()}, [m for m, _ in logger.written]


def synced(num_ranks: int) -> dict[str, float]:
    """By hand: batches 0, 1, 2 in training and 0, 1 in validation; the second rank adds 10."""
    last, every = [2.0 + 10 * r for r in range(num_ranks)], [b + 10.0 * r for r in range(num_ranks) for b in range(3)]
    val = [b + 10.0 * r for r in range(num_ranks) for b in range(2)]
    mean = lambda numbers: sum(numbers) / len(numbers)  # noqa: E731
    ops = {"sum": sum, "mean": mean, "max": max, "min": min}
    return {
        **{f"step {op}": f(last) for op, f in ops.items()},
        **{f"epoch {op}": f(every) for op, f in ops.items()},
        "both_step": mean(last),
        "both": mean(every),
        "both_epoch": mean(every),
        "val mean": mean(val),
        "val sum": sum(val),
        "val first": mean([float(r) for r in range(num_ranks)]),
    }


def test_synced_values_of_one_rank_are_its_own() -> None:
    found = fitted(type("Alone", (Synced,), {"on_train_epoch_end": Damper.on_train_epoch_end}), limit_val_batches=2)
    wanted = synced(1) | {"own": 0.0}
    assert {k: v.item() for k, v in found["callback"].items()} == pytest.approx(wanted)


def test_synced_values_of_two_ranks_are_reduced_over_both_and_others_are_each_ranks_own() -> None:
    for rank, (found, written) in enumerate(sync_on_ranks.launch()):
        wanted = synced(2) | {"own": float(rank)} | ({"first rank": 5.0} if rank == 0 else {})
        assert found == pytest.approx(wanted)
        steps = [m for m in written if "own" in m]  # every rank writes to its own logger
        assert [m["own"] for m in steps] == [float(rank)] * 3


@on_ranks(2)
def measure_on_ranks(rank: Rank) -> Any:
    class Logs(Measured):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx + 10 * rank.index)

    module, trainer = Logs(), ours(2)
    trainer.fit(module)
    return {k: v.item() for k, v in trainer.callback_metrics.items()}, weights(module)


def test_metrics_are_synced_over_ranks_at_epochs_and_not_at_steps() -> None:
    for rank, (found, _) in enumerate(measure_on_ranks.launch()):
        assert found["a_epoch"] == found["b"] == 0 + 1 + 2 + 10 + 11 + 12
        assert found["accuracy_epoch"] == 0.5
        assert (found["a_step"], found["c"]) in ((24, 24), (2 + 10 * rank, 2 + 10 * rank))


@pytest.mark.parametrize("kind", ["number", "metric"])
def test_a_number_of_an_epoch_without_sync_is_warned_of_where_ranks_are(kind: str) -> None:
    class Logs(Measured):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if kind == "metric":
                self.sums["a"](1.0)
            self.log("foo", 1.0 if kind == "number" else self.sums["a"], on_step=False, on_epoch=True)
            return self.loss(batch)

    trainer = ours(limit_val_batches=0)
    if kind == "number":
        with pytest.warns(UserWarning, match=r"recommended to use `self.log\('foo', ..., sync_dist=True\)`"):
            trainer.fit(Logs())
    else:
        trainer.fit(Logs())  # metrics sync by themselves
    assert trainer.callback_metrics["foo"] == (1.0 if kind == "number" else 3.0)


def test_every_hook_that_may_log_is_known_here() -> None:
    """What Lightning may call and this file says nothing about would be a gap of this file."""
    hooks = set(hooks_of(Callback))
    told = set(NEVER) | {place for places in PLACES.values() for place in places}
    silent = {h for h in hooks if "predict" in h or "exception" in h or "checkpoint" in h or h.endswith("state_dict")}
    silent |= {"on_sanity_check_end", "on_test_end", "on_before_backward"}
    silent |= {f"on_{s}_batch_start" for s in ("validation", "test")}
    assert hooks - told == silent
    assert isinstance(ours().callbacks, list)
