"""What ``self.log`` keeps, averages and refuses while a module trains."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_moeclip.binding import Callback, Trainer
from tests.upstream.logged import NEVER, PLACES, Keeps, fitted, kept
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    Misconfigured,
    ours,
    rows,
    under_both,
)


class EveryLevel(Damper):
    """Logs its loss at every level, for loggers and for the bar."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("plain", loss)
        for name, on_step, on_epoch in (("s", True, False), ("e", False, True), ("se", True, True)):
            for place in ("l", "b"):
                self.log(
                    f"{place}_{name}",
                    loss,
                    on_step=on_step,
                    on_epoch=on_epoch,
                    prog_bar=place == "b",
                    logger=place == "l",
                    sync_dist=on_epoch,
                )
        return loss


def test_a_training_step_logs_at_the_levels_that_it_asks_for() -> None:
    found = fitted(EveryLevel, max_epochs=2, logger=Keeps())
    assert set(found["logged"]) == {"plain", "l_s", "l_e", "l_se_step", "l_se_epoch"}
    assert set(found["bar"]) == {"b_s", "b_e", "b_se_step", "b_se_epoch"}
    assert set(found["callback"]) == {*found["logged"], *found["bar"], "l_se", "b_se"}
    assert found["callback"]["l_se_epoch"] == found["callback"]["l_se"]


class AtTheEnd(Damper):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("a", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"a1": loss, "a2": 2 * loss})
        self.log_dict({"step": -1, "shared": 100}, logger=False, prog_bar=True)
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        self.log("b", torch.tensor(2.0), on_epoch=True, prog_bar=True, sync_dist=True)
        self.log_dict(
            {f"epoch {self.current_epoch}": torch.tensor(self.current_epoch * 1.0), "shared": 111.0},
            logger=False,
            prog_bar=True,
            sync_dist=True,
        )


def test_the_end_of_an_epoch_logs_and_overwrites_what_steps_logged() -> None:
    found = fitted(AtTheEnd, max_epochs=3)
    assert set(found["logged"]) == {"a_step", "a_epoch", "a1", "a2", "b"}
    assert found["bar"] == {"step": -1, "shared": 111, "b": 2, "epoch 0": 0, "epoch 1": 1, "epoch 2": 2}


@pytest.mark.parametrize(
    ("num_batches", "reduce", "wanted"),
    [(3, min, 0), (3, torch.max, 2), (11, max, 10), (5, "avg", 2), (5, "SUM", 10), (4, "mean", 1.5)],
)
def test_reductions_over_an_epoch(num_batches: int, reduce: Any, wanted: float) -> None:
    class Numbers(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            number = torch.tensor(float(batch_idx))
            self.log("a", number, on_step=False, on_epoch=True, reduce_fx=reduce, sync_dist=True)
            return self.loss(batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("b", float(batch_idx), reduce_fx=reduce, sync_dist=True)

        def train_dataloader(self) -> Any:
            return rows(num_batches)

        val_dataloader = train_dataloader

    found = fitted(Numbers, max_epochs=2)["logged"]
    assert (found["a"], found["b"]) == (wanted, wanted)


def test_means_are_weighted_by_the_size_of_batches_of_any_form() -> None:
    class Uneven(Damper):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            self.log("a", float(batch_idx), on_step=False, on_epoch=True, sync_dist=True)
            self.log("b", float(batch_idx), on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
            return self.loss(batch["x"])

        def train_dataloader(self) -> Any:
            return DataLoader([{"x": row} for row in rows().dataset], batch_size=4)

    found = fitted(Uneven, limit_val_batches=0)["logged"]
    assert found["a"] == pytest.approx((0 * 4 + 1 * 2) / 6)
    assert found["b"] == 0.5


CHOICES = list(product([False, True], repeat=3))


class LogsEverywhere(Callback):
    """Logs under every choice of levels wherever it is called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.values: dict[str, list[float]] = {}
        self.asked: dict[str, tuple[bool, bool, bool]] = {}

    def write(self, module: Damper, place: str, *, at_steps: bool) -> None:
        self.calls[place] += 1
        for on_step, on_epoch, in_bar in CHOICES:
            name = f"{place} {on_step:d}{on_epoch:d}{in_bar:d}"
            levels = {"on_step": on_step, "on_epoch": on_epoch}
            if on_step and not at_steps:
                continue
            if not on_step and not on_epoch:
                with pytest.raises(Misconfigured, match=r"is not useful|must be one of"):
                    module.log(name, 0.0, **levels)
                continue
            value = float(sum(map(len, self.values.values())))
            module.log(name, value, prog_bar=in_bar, sync_dist=on_epoch, batch_size=1, **levels)
            self.values.setdefault(name, []).append(value)
            self.asked[name] = (on_step, on_epoch, in_bar)


def logs_in(places: dict[str, bool]) -> type:
    def hook(place: str, at_steps: bool) -> Any:
        return lambda self, trainer, module, *_: self.write(module, place, at_steps=at_steps)

    return type("LogsIn", (LogsEverywhere,), {place: hook(place, at) for place, at in places.items()})


# hook -> whether it belongs to a batch
IN_EVALUATION = {"start": False, "epoch_start": False, "batch_end": True, "epoch_end": False}


@pytest.mark.parametrize("verb", PLACES)
def test_callbacks_log_wherever_lightning_lets_them(verb: str) -> None:
    def script(make: MakeTrainer) -> Any:
        callback = logs_in(PLACES[verb])()
        trainer = make(callbacks=[callback], limit_val_batches=2 if verb == "validate" else 0)
        getattr(trainer, verb)(Damper())
        return callback.calls, callback.values, callback.asked, kept(trainer)

    calls, values, asked, found = under_both(script)
    ends = next(place for place in PLACES[verb] if place.endswith("batch_end"))
    assert calls[ends] == (3 if verb == "fit" else 2)
    for name, (on_step, on_epoch, in_bar) in asked.items():
        if on_epoch:
            assert found["callback"][name] == pytest.approx(sum(values[name]) / len(values[name]))
        elif verb == "fit":
            assert found["callback"][name] == values[name][-1]
        assert (name in found["bar"]) == (in_bar and on_step != on_epoch)


@pytest.mark.parametrize("place", NEVER)
def test_logging_where_it_means_nothing_is_refused(place: str) -> None:
    class Logs(Callback):
        def on_sanity_check_start(self, trainer: Trainer, module: Damper) -> None:
            if place == "on_sanity_check_start":
                module.log("a", 1.0)

    def logs(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log("a", 1.0)

    kind = type("LogsThere", (Damper,), {} if place == "on_sanity_check_start" else {place: logs})
    with pytest.raises(Misconfigured, match=r"You can't `self\.log\("):
        ours(callbacks=[Logs()]).fit(kind())


def test_nothing_is_logged_in_predict() -> None:
    class Logs(Damper):
        def predict_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("a", 1.0)

    with pytest.raises(Misconfigured, match="result collection is not registered yet"):
        ours().predict(Logs())


@pytest.mark.parametrize("value", [None, {"a": None}, {"a": {"b": 1}}, "foo", [1, 2, 3], (1, 2), [[1, 2], 3]], ids=str)
def test_a_value_that_is_no_number_is_refused(value: Any) -> None:
    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("foo", value)

    with pytest.raises(ValueError, match=r"self\.log\(foo, .*\)` was called, but"):
        ours().fit(Logs())


def test_a_tensor_of_one_element_is_logged_without_its_dimension_and_one_of_two_is_refused() -> None:
    class Logs(Damper):
        def on_train_start(self) -> None:
            self.log("one", torch.tensor([1.5]), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log("two", torch.tensor([1.0, 2.0]), sync_dist=True)

    trainer = ours()
    with pytest.raises(ValueError, match="tensor must have a single element"):
        trainer.fit(Logs())
    trainer = ours()
    kind = type("One", (Logs,), {"on_train_epoch_end": Damper.on_train_epoch_end})
    trainer.fit(kind())
    assert trainer.callback_metrics["one"].ndim == 0


class Twice(Damper):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("foo", 1.0, prog_bar=False)
        self.log("foo", 1.0, prog_bar=True)


class Suffixed(Damper):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("foo/dataloader_idx_0", 1.0)


class Reduced(Damper):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("foo", 1.0, reduce_fx=torch.argmax)


class Unowned(Damper):
    def __init__(self) -> None:
        super().__init__()
        self.bar = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("foo", MeanMetric())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Twice, r"self.log\(foo, ...\)` twice in `training_step`"),
        (Suffixed, "with the key `foo/dataloader_idx_0`"),
        (Reduced, r"reduce_fx={min,max,mean,sum}\)` are supported"),
        (Unowned, r"`self.log\(foo, ..., metric_attribute=name\)` where `name` is one of \['bar'\]"),
    ],
)
def test_a_use_of_log_that_cannot_be_right_is_refused(kind: type, told: str) -> None:
    with pytest.raises(Misconfigured, match=told):
        ours().fit(kind())


def test_what_the_sanity_check_logs_is_forgotten() -> None:
    class Logs(Damper):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if self.trainer.sanity_checking:
                self.log("val", self.loss(batch), prog_bar=True, sync_dist=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 0:
                assert kept(self.trainer) == {"callback": {}, "logged": {}, "bar": {}}
            self.log("train", 1.0)
            return self.loss(batch)

    assert "val" not in fitted(Logs)["callback"]


def test_sums_of_an_epoch_count_each_call_of_each_hook() -> None:
    class Counts(Damper):
        def count(self, name: str) -> None:
            self.log(name, 1.0, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)

        def on_train_batch_start(self, *args: object) -> None:
            self.count("train start")

        def on_train_batch_end(self, *args: object) -> None:
            self.count("train end")

        def on_validation_batch_start(self, *args: object) -> None:
            self.count("val start")

        def on_validation_batch_end(self, *args: object) -> None:
            self.count("val end")

    found = fitted(Counts, max_epochs=2)["callback"]
    assert found == {"train start": 3, "train end": 3, "val start": 2, "val end": 2}
