"""What ``self.log`` keeps, averages, syncs and refuses, in every stage and on two ranks."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_moeclip.binding import Callback, Trainer, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    Misconfigured,
    Planned,
    hooks_of,
    ours,
    rows,
    under_both,
    weights,
)


def kept(trainer: Trainer) -> dict[str, Any]:
    """What callbacks, loggers and the progress bar can read."""
    found = {
        "callback": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "bar": dict(trainer.progress_bar_metrics),
    }
    assert all(isinstance(v, Tensor) for kind in ("callback", "logged") for v in found[kind].values())
    assert all(isinstance(v, float) for v in found["bar"].values())
    return found


def fitted(kind: type, **settings: Any) -> Any:
    """What one run keeps, the same under both strategies."""

    def script(make: MakeTrainer) -> Any:
        trainer = make(**settings)
        trainer.fit(kind())
        return kept(trainer)

    return under_both(script)


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
PLACES = {
    "fit": {
        "on_train_start": False,
        "on_train_epoch_start": False,
        "on_train_batch_start": True,
        "on_before_zero_grad": True,
        "on_after_backward": True,
        "on_before_optimizer_step": True,
        "on_train_batch_end": True,
        "on_train_epoch_end": False,
    },
    "validate": {
        f"on_validation_{p}": p.startswith("batch") for p in ("start", "epoch_start", "batch_end", "epoch_end")
    },
    "test": {f"on_test_{p}": p.startswith("batch") for p in ("start", "epoch_start", "batch_end", "epoch_end")},
}


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


NEVER = [
    "setup",
    "prepare_data",
    "configure_optimizers",
    "on_fit_start",
    "train_dataloader",
    "val_dataloader",
    "on_after_batch_transfer",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "lr_scheduler_step",
    "on_sanity_check_start",
]


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


# evaluation


class Evaluated(Damper):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("a", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("a2", 2)
        return {"loss": loss}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("b", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("c", loss, sync_dist=True)
        self.log("d", loss, on_step=True, on_epoch=False, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("g/h/i", torch.tensor(2.0), on_epoch=True, prog_bar=True, sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("t", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)

    def on_test_epoch_end(self) -> None:
        self.log("u", 3.0, sync_dist=True)


def test_validation_logs_steps_for_loggers_and_epochs_for_callbacks() -> None:
    found = fitted(Evaluated, max_epochs=2)
    assert set(found["logged"]) == {"a_step", "a_epoch", "a2", "b_step", "b_epoch", "c", "d", "g/h/i"}
    assert set(found["callback"]) == {"a", "a_step", "a_epoch", "a2", "b", "b_epoch", "c", "g/h/i"}
    assert found["bar"] == {"g/h/i": 2.0}
    losses = [Damper().loss(batch) for batch in rows(2, seed=1)]
    assert found["callback"]["b"] == found["callback"]["b_epoch"] == found["callback"]["c"]
    assert found["callback"]["b"] != torch.stack(losses).mean()  # it has learned


def test_a_test_returns_what_its_epochs_logged() -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = Evaluated(), make()
        tested = trainer.test(module, verbose=False)
        validated = trainer.validate(module, verbose=False)
        return tested, validated, kept(trainer)

    (tested,), (validated,), _ = under_both(script)
    assert set(tested) == {"t_epoch", "u"}
    assert set(validated) == {"b_epoch", "c", "g/h/i"}
    losses = [Damper().loss(batch).item() for batch in rows(2, seed=2)]
    assert tested["t_epoch"] == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_values_of_several_loaders_are_kept_apart(num_loaders: int) -> None:
    class Several(Damper):
        def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("error", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)
            self.log("same", 7.0, sync_dist=True)
            self.log(f"own {dataloader_idx}", dataloader_idx + 1.0, add_dataloader_idx=False, sync_dist=True)

        def on_test_epoch_end(self) -> None:
            self.log("all", 9.0, sync_dist=True)

        def test_dataloader(self) -> Any:
            return [rows(2, seed=i) for i in range(num_loaders)]

    def script(make: MakeTrainer) -> Any:
        return make().test(Several(), verbose=False)

    results = under_both(script)
    assert len(results) == num_loaders
    for i, result in enumerate(results):
        suffix = f"/dataloader_idx_{i}" if num_loaders > 1 else ""
        assert set(result) == {f"error_epoch{suffix}", f"same{suffix}", f"own {i}", "all"}
        assert result[f"own {i}"] == i + 1


@pytest.mark.parametrize("interval", [0.5, 1.0])
def test_each_validation_starts_its_means_anew(interval: float) -> None:
    class Numbers(Damper):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("train", (1.0 + batch_idx) * 10**self.current_epoch, on_epoch=True, on_step=True, sync_dist=True)
            return self.loss(batch)

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val", (1.0 + batch_idx) * (1 + dataloader_idx) * 10**self.current_epoch, sync_dist=True)

        def on_validation_end(self) -> None:
            self.seen.append({k: v.item() for k, v in self.trainer.callback_metrics.items() if "val" in k})

        def train_dataloader(self) -> Any:
            return rows(4)

        def val_dataloader(self) -> Any:
            return [rows(3), rows(3)]

    def script(make: MakeTrainer) -> Any:
        module = Numbers()
        trainer = make(max_epochs=2, val_check_interval=interval, num_sanity_val_steps=0)
        trainer.fit(module)
        return module.seen, kept(trainer)

    seen, found = under_both(script)
    assert seen[-1] == {"val/dataloader_idx_0": 20.0, "val/dataloader_idx_1": 40.0}
    assert len(seen) == 2 / interval
    assert found["callback"]["train_epoch"] == 25.0


# loggers


class Keeps(pl.loggers.logger.Logger):
    """Keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.states: list[str] = []

    name, version, experiment = "keeps", 1, None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.written.append(("hyperparameters", args))

    def finalize(self, status: str) -> None:
        self.states.append(status)


def test_loggers_get_steps_and_epochs_at_the_right_step() -> None:
    class Logs(Damper):
        def on_train_start(self) -> None:
            self.log("start", 123.0, sync_dist=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("foo", 0.0, on_step=True, on_epoch=True, sync_dist=True)
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        logger = Keeps()
        make(logger=logger, max_epochs=2, limit_train_batches=2, limit_val_batches=0).fit(Logs())
        return logger.written, logger.states

    written, states = under_both(script)
    numbers = [entry for entry in written if entry[0] != "hyperparameters"]
    assert numbers == [
        ({"foo_step": 0.0, "epoch": 0}, 0),
        ({"foo_step": 0.0, "epoch": 0}, 1),
        ({"start": 123.0, "foo_epoch": 0.0, "epoch": 0}, 1),
        ({"foo_step": 0.0, "epoch": 1}, 2),
        ({"foo_step": 0.0, "epoch": 1}, 3),
        ({"foo_epoch": 0.0, "epoch": 1}, 3),
    ]
    assert states == ["success"]


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_steps_of_evaluation_are_counted_through_all_epochs(num_loaders: int) -> None:
    class Logs(Damper):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            name = f"val {self.trainer.state.fn.value}"
            self.log(name, float(batch_idx), on_step=True, on_epoch=False, sync_dist=True)

        def val_dataloader(self) -> Any:
            return [rows(3) for _ in range(num_loaders)]

    def script(make: MakeTrainer) -> Any:
        logger, module = Keeps(), Logs()
        trainer = make(logger=logger, max_epochs=2, limit_train_batches=1)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        return [entry for entry in logger.written if entry[0] != "hyperparameters"]

    written = under_both(script)
    assert [step for _, step in written][: 3 * num_loaders] == [*range(3)] * num_loaders


@pytest.mark.parametrize("num_loggers", [0, 1, 2])
def test_a_module_finds_its_loggers_and_places_through_the_trainer(num_loggers: int) -> None:
    class Looks(Damper):
        def on_train_start(self) -> None:
            self.seen = (self.loggers, self.logger, self.global_rank, self.local_rank, self.current_epoch)

    module, loggers = Looks(), [Keeps() for _ in range(num_loggers)]
    assert module.loggers == []
    ours(logger=loggers).fit(module)
    assert module.seen == (loggers, loggers[0] if loggers else None, 0, 0, 0)


@pytest.mark.parametrize("error", [None, Planned])
def test_loggers_are_finalized_after_every_stage_and_told_of_a_failure(error: type | None) -> None:
    class Fails(Damper):
        def on_train_end(self) -> None:
            if error:
                raise error

    def script(make: MakeTrainer) -> Any:
        logger, module = Keeps(), Fails()
        trainer = make(logger=logger)
        if error:
            with pytest.raises(error):
                trainer.fit(module)
        else:
            for verb in (trainer.fit, trainer.test, trainer.validate, trainer.predict):
                verb(module)
        return logger.states

    assert under_both(script) == (["failed"] if error else ["success"] * 4)


def test_a_logger_is_not_written_to_before_the_ranks_are_known() -> None:
    class Asks(Callback):
        def setup(self, trainer: Trainer, module: Damper, stage: str) -> None:
            assert trainer.logger.written == []
            assert torch.distributed.is_initialized()

        def on_train_start(self, trainer: Trainer, module: Damper) -> None:
            assert trainer.logger.written[0][0] == "hyperparameters"

    class Hyper(Damper):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr=lr)
            self.save_hyperparameters()

    ours(logger=Keeps(), callbacks=[Asks()]).fit(Hyper())


def test_epoch_is_the_users_name_when_the_user_logs_it() -> None:
    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("epoch", -1.0 * batch_idx)
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        trainer = make(logger=Keeps(), limit_val_batches=0)
        trainer.fit(Logs())
        return kept(trainer)["logged"]

    assert under_both(script) == {"epoch": -2.0}


def test_metrics_of_a_reserved_name_in_the_bar_are_warned_of() -> None:
    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("v_num", loss, prog_bar=True)
            return loss

    trainer = ours(enable_progress_bar=True, logger=Keeps())
    with pytest.warns(UserWarning, match="The progress bar already tracks a metric with the .* 'v_num'"):
        trainer.fit(Logs())


def test_the_bar_holds_what_epochs_logged_when_training_ends() -> None:
    class Reads(pl.callbacks.TQDMProgressBar):
        def on_train_end(self, trainer: Trainer, module: Damper) -> None:
            super().on_train_end(trainer, module)
            self.read = dict(self.get_metrics(trainer, module))

    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("foo", float(self.current_epoch), on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.log("bar", float(self.current_epoch), prog_bar=True, reduce_fx="sum", sync_dist=True)

    bar = Reads()
    ours(callbacks=[bar], enable_progress_bar=True, max_epochs=2, limit_val_batches=0).fit(Logs())
    assert bar.read == {"foo": 1.0, "bar": 1.0}


# torchmetrics


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


# one and two ranks


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
