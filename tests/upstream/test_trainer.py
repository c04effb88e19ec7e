"""Flags of the Trainer and Lightning's own callbacks: the course of a run is that under one device."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_moeclip.binding import Callback, LightningModule, Trainer, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    Misconfigured,
    differences,
    ours,
    rows,
    under_both,
    weights,
)
from tests.upstream.test_logging import Keeps

callbacks = pl.callbacks


class Course(Damper):
    """Writes down which batch of which stage it saw at which step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.course: list[Any] = []

    def note(self, stage: str, batch: Tensor, *where: int) -> Tensor:
        self.course.append((stage, self.current_epoch, self.global_step, *where, batch.sum().item()))
        return self.loss(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.note("train", batch, batch_idx)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.note("val", batch, batch_idx), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.note("test", batch, batch_idx), sync_dist=True)

    def train_dataloader(self) -> Any:
        return rows(5)


def course_of(kind: type = Course, *, callbacks_: Any = list, **settings: Any) -> tuple[list[Any], Any]:
    """Course, and what else a run left behind; the same under both strategies."""

    def script(make: MakeTrainer) -> Any:
        module, trainer = kind(), make(callbacks=callbacks_(), **settings)
        trainer.fit(module)
        left = (trainer.global_step, trainer.current_epoch, trainer.should_stop, weights(module))
        return module.course, left, dict(trainer.callback_metrics)

    course, left, _ = under_both(script)
    return course, left


FLAGS = {
    "limits as numbers": ({"limit_train_batches": 3, "limit_val_batches": 1}, 3),
    "limits as parts": ({"limit_train_batches": 0.4, "limit_val_batches": 0.5}, 2),
    "no validation": ({"limit_val_batches": 0}, 5),
    "no training": ({"limit_train_batches": 0}, 0),
    "max_steps": ({"max_steps": 7, "max_epochs": -1}, 7),
    "max_steps and max_epochs": ({"max_steps": 7, "max_epochs": 1}, 5),
    "no steps": ({"max_steps": 0, "max_epochs": -1}, 0),
    "no epochs": ({"max_epochs": 0}, 0),
    "accumulation": ({"accumulate_grad_batches": 2, "max_epochs": 2}, 6),
    "accumulation and max_steps": ({"accumulate_grad_batches": 3, "max_epochs": -1, "max_steps": 3}, 3),
    "fast_dev_run": ({"fast_dev_run": True}, 1),
    "fast_dev_run of 3": ({"fast_dev_run": 3}, 3),
    "validation by the step": ({"val_check_interval": 2, "max_epochs": 2}, 10),
    "validation by the half": ({"val_check_interval": 0.5, "max_epochs": 2}, 10),
    "validation over epochs": ({"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2}, 10),
    "validation every second epoch": ({"check_val_every_n_epoch": 2, "max_epochs": 3}, 15),
    "no sanity check": ({"num_sanity_val_steps": 0}, 5),
    "whole sanity check": ({"num_sanity_val_steps": -1}, 5),
    "loaders anew": ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}, 15),
    "no inference mode": ({"inference_mode": False}, 5),
    "anomalies": ({"detect_anomaly": True}, 5),
    "deterministic": ({"deterministic": "warn"}, 5),
    "profiler": ({"profiler": "simple", "max_epochs": 2}, 10),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_gives_a_run_the_course_that_it_has_on_one_device(flag: str) -> None:
    settings, steps = FLAGS[flag]
    course, left = course_of(**settings)
    assert left[0] == steps
    assert sum(entry[0] == "train" for entry in course) >= steps


def test_barebones_runs_without_anything_else() -> None:
    def script(make: MakeTrainer) -> Any:
        module = Damper()
        none = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "log_every_n_steps")
        trainer = make(barebones=True, **dict.fromkeys(none))
        trainer.fit(module)
        return weights(module), trainer.global_step

    assert under_both(script)[1] == 3


def test_overfitting_sees_the_same_batches_in_training_and_validation() -> None:
    course, _ = course_of(overfit_batches=2, max_epochs=2, num_sanity_val_steps=0)
    trained = [entry[-1] for entry in course if entry[0] == "train"]
    assert trained == [batch.sum().item() for batch in list(rows(5))[:2]] * 2


def test_a_run_ends_when_its_time_is_over() -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = Course(), make(max_time=timedelta(seconds=0), max_epochs=5)
        trainer.fit(module)
        return module.course, trainer.global_step

    course, steps = under_both(script)
    assert steps == sum(entry[0] == "train" for entry in course) <= 1
    timer = callbacks.Timer(duration={"minutes": 10})
    ours(callbacks=[timer]).fit(Course())
    assert 0 < timer.time_elapsed("train") < 600


class Stops(Course):
    """Asks for the end in the first epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("minimum", "steps"),
    [({}, 2), ({"min_epochs": 2}, 10), ({"min_steps": 4}, 5), ({"min_epochs": 2, "min_steps": 12}, 12)],
    ids=str,
)
def test_a_run_that_is_asked_to_stop_makes_its_minimum_first(minimum: dict[str, int], steps: int) -> None:
    assert course_of(Stops, max_epochs=5, **minimum)[1][0] == steps


def test_minus_one_from_a_batch_start_skips_the_rest_of_the_epoch() -> None:
    class Skips(Course):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    course, left = course_of(Skips, max_epochs=2)
    assert left[0] == 4
    assert sum(entry[0] == "train" for entry in course) == 4


def test_a_keyboard_interrupt_ends_the_run_and_is_told_to_callbacks() -> None:
    class Interrupts(Course):
        def on_train_batch_end(self, *args: object) -> None:
            raise KeyboardInterrupt

    class Hears(Callback):
        heard: tuple[str, ...] = ()

        def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
            self.heard += (type(exception).__name__,)

    def script(make: MakeTrainer) -> Any:
        hears = Hears()
        trainer = make(callbacks=[hears])
        with pytest.raises(SystemExit):
            trainer.fit(Interrupts())
        return hears.heard, str(trainer.state.status), trainer.global_step

    assert under_both(script)[0] == ("KeyboardInterrupt",)


# callbacks of Lightning


@pytest.mark.parametrize("every_step", [False, True])
def test_gradient_accumulation_is_scheduled_by_epoch(every_step: bool) -> None:
    scheduling = {0: 1, 1: 3, 2: 2} if every_step else {1: 2}
    course, left = course_of(
        callbacks_=lambda: [callbacks.GradientAccumulationScheduler(scheduling=scheduling)], max_epochs=4
    )
    assert left[0] == (5 + 2 + 3 + 3 if every_step else 5 + 3 + 3 + 3)
    assert sum(entry[0] == "train" for entry in course) == 20


class Worse(Course):
    def on_validation_epoch_end(self) -> None:
        self.log("score", float(self.current_epoch), sync_dist=True)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"patience": 2}, 3),
        ({"patience": 1, "mode": "max"}, 6),
        ({"patience": 9, "divergence_threshold": 2.5}, 4),
        ({"patience": 9, "stopping_threshold": 0.5}, 1),
        ({"patience": 1, "check_on_train_epoch_end": False}, 2),
    ],
    ids=str,
)
def test_early_stopping_ends_after_the_epoch_that_it_ends_after_on_one_device(settings: Any, epochs: int) -> None:
    _, left = course_of(
        Worse,
        callbacks_=lambda: [callbacks.EarlyStopping(monitor="score", **settings)],
        max_epochs=6,
        num_sanity_val_steps=0,
    )
    assert left[0] == 5 * epochs


def test_early_stopping_names_what_it_misses() -> None:
    with pytest.raises(RuntimeError, match="Early stopping conditioned on metric `giraffe` which is not available"):
        ours(callbacks=[callbacks.EarlyStopping(monitor="giraffe")]).fit(Course())


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_learning_rates_are_logged_at_their_interval(interval: str) -> None:
    def script(make: MakeTrainer) -> Any:
        logger, monitor = Keeps(), callbacks.LearningRateMonitor(logging_interval=interval, log_momentum=True)
        make(logger=logger, callbacks=[monitor], max_epochs=2).fit(Damper())
        return monitor.lrs, [m for m, _ in logger.written if "lr-SGD" in m]

    rates, written = under_both(script)
    assert rates["lr-SGD"] == ([0.1] * 3 + [0.05] * 3 if interval == "step" else [0.1, 0.05])
    assert written[0]["lr-SGD-momentum"] == 0.9


def test_averaging_of_the_last_epochs_is_that_of_one_device() -> None:
    with_swa = course_of(
        Plain, callbacks_=lambda: [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)], max_epochs=4
    )
    assert list(differences(with_swa[1][3], course_of(Plain, max_epochs=4)[1][3])) != []


class Plain(Course):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Unfreezes(callbacks.BaseFinetuning):
    """Freezes the first layer until the second epoch."""

    def freeze_before_training(self, pl_module: Damper) -> None:
        self.freeze(pl_module.inner)

    def finetune_function(self, pl_module: Damper, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.inner, optimizer, lr=0.01)


class Outer(Course):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def test_a_layer_that_is_unfrozen_later_trains_from_then_on() -> None:
    found = course_of(Outer, callbacks_=lambda: [Unfreezes()], max_epochs=3)[1][3]
    assert not torch.equal(found["inner.weight"], Damper().inner.weight)
    found = course_of(Outer, callbacks_=lambda: [Unfreezes()], max_epochs=1)[1][3]
    assert torch.equal(found["inner.weight"], Damper().inner.weight)


def test_lambda_callbacks_are_called_beside_it() -> None:
    def script(make: MakeTrainer) -> Any:
        seen: list[str] = []
        names = ("on_train_start", "on_after_backward", "on_before_optimizer_step", "on_train_end", "teardown")
        hooks = {name: lambda *_, name=name, **__: seen.append(name) for name in names}
        make(callbacks=[callbacks.LambdaCallback(**hooks)]).fit(Damper())
        return seen

    seen = under_both(script)
    assert seen[0] == "on_train_start"
    assert seen[-2:] == ["on_train_end", "teardown"]


@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_predictions_are_returned_or_written_as_on_one_device(interval: str, tmp_path: Path) -> None:
    class Writes(callbacks.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__(write_interval=interval)
            self.written: list[Any] = []

        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            self.written.append((prediction, batch_indices, batch_idx, dataloader_idx))

        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            self.written.append((predictions, batch_indices))

    def script(make: MakeTrainer) -> Any:
        module, writes = Damper(), Writes()
        returned = make(callbacks=[writes]).predict(module, return_predictions=True)
        nothing = make(callbacks=[Writes()]).predict(module, return_predictions=False)
        return returned, writes.written, nothing

    returned, written, nothing = under_both(script)
    assert nothing is None
    assert len(written) == (2 if interval == "batch" else 1)
    assert list(differences(returned, [Damper()(batch) for batch in rows(2, seed=3)])) == []


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed", 16, "16-true"])
def test_every_precision_takes_the_course_that_it_takes_on_one_device(precision: Any) -> None:
    if precision in (16, "16-true"):  # what Lightning makes of them on a CPU
        precision = {16: "16-mixed", "16-true": "16-true"}[precision]
    if precision == "16-mixed":
        with pytest.warns(UserWarning, match="You passed `Trainer\\(accelerator='cpu', precision='16-mixed'\\)`"):
            trainer = ours(precision=precision)
        assert trainer.precision == "bf16-mixed"
        trainer.fit(Damper())
        return

    def script(make: MakeTrainer) -> Any:
        module, trainer = Damper(), make(precision=precision)
        trainer.fit(module)
        return weights(module), trainer.test(module, verbose=False), trainer.predict(module)

    under_both(script)


# loaders


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from torch.cat(list(rows(4)))


class TakesAny(Course):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = {dict: lambda: list(batch.values()), list: lambda: batch}.get(type(batch), lambda: [batch])()
        return sum(self.note("train", part, batch_idx) for part in parts if part is not None)


@pytest.mark.parametrize("form", ["iterable", "dict", "list", "sequential", "tensors", "datamodule"])
def test_loaders_of_every_form_are_taken(form: str) -> None:
    def loaders() -> Any:
        combined = pl.utilities.CombinedLoader
        return {
            "iterable": lambda: DataLoader(Endless(), batch_size=2),
            "dict": lambda: {"a": rows(3), "b": rows(2, seed=4)},
            "list": lambda: [rows(3), rows(2, seed=4)],
            "sequential": lambda: combined({"a": rows(3), "b": rows(2, seed=4)}, mode="max_size"),
            "tensors": lambda: list(rows(3)),
            "datamodule": lambda: pl.LightningDataModule.from_datasets(rows(3).dataset, rows(2).dataset, batch_size=2),
        }[form]()

    def script(make: MakeTrainer) -> Any:
        module, trainer = TakesAny(), make(max_epochs=2, limit_val_batches=0)
        data = loaders()
        if form == "datamodule":
            torch.manual_seed(4)  # its loader shuffles
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data)
        return module.course, weights(module), trainer.global_step

    under_both(script)


def test_dataloader_iter_is_handed_through() -> None:
    class Takes(Course):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            return self.note("train", batch, batch_idx)

    def script(make: MakeTrainer) -> Any:
        module, trainer = Takes(), make(limit_val_batches=0)
        found = pytest.warns(UserWarning, match="Found `dataloader_iter` argument in the `training_step`")
        with found, pytest.warns(UserWarning, match="You are using the `dataloader_iter` step flavor"):
            trainer.fit(module)
        return module.course, weights(module)

    assert len(under_both(script)[0]) == 5


def test_the_estimate_of_steps_is_that_of_one_device() -> None:
    class Asks(Course):
        def configure_optimizers(self) -> Any:
            self.course.append(("estimate", self.trainer.estimated_stepping_batches))
            return super().configure_optimizers()

    assert course_of(Asks, max_epochs=3, accumulate_grad_batches=2)[0][0] == ("estimate", 9)


@on_ranks(2)
def estimate_on_ranks(rank: Rank) -> tuple[float, int]:
    class Asks(Damper):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

        def train_dataloader(self) -> Any:
            return rows(8)

    module, trainer = Asks(), ours(2, use_distributed_sampler=True, max_epochs=3)
    trainer.fit(module)
    return module.estimate, trainer.global_step


def test_the_estimate_of_steps_counts_ranks() -> None:
    assert estimate_on_ranks.launch() == [(12, 12), (12, 12)]


# what cannot work


MISSING = {
    "training_step": ("fit", "No `training_step\\(\\)` method defined"),
    "configure_optimizers": ("fit", "No `configure_optimizers\\(\\)` method defined"),
    "validation_step": ("validate", "No `validation_step\\(\\)` method defined"),
    "test_step": ("test", "No `test_step\\(\\)` method defined"),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_module_without_the_method_of_a_stage_is_refused(what: str) -> None:
    verb, told = MISSING[what]
    kind = type("Lacks", (Damper,), {what: getattr(LightningModule, what)})
    with pytest.raises(Misconfigured, match=told):
        getattr(ours(), verb)(kind())


def test_another_object_than_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match="`model` must be a `LightningModule`"):
        ours().fit(nn.Linear(2, 2))


def test_the_state_of_a_trainer_tells_stage_and_end() -> None:
    class Asks(Course):
        def note(self, stage: str, batch: Tensor, *where: int) -> Tensor:
            trainer = self.trainer
            flags = (trainer.training, trainer.validating, trainer.testing, trainer.predicting, trainer.sanity_checking)
            self.course.append((*flags, str(trainer.state.fn), str(trainer.state.stage), str(trainer.state.status)))
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        module, trainer = Asks(), make(limit_train_batches=1)
        states = []
        for verb in (trainer.fit, trainer.validate, trainer.test):
            verb(module)
            states.append((trainer.state.finished, str(trainer.state.fn), str(trainer.state.stage)))
        return module.course, states

    assert all(state[0] for state in under_both(script)[1])


def test_lr_find_restores_the_module_that_it_tried(tmp_path: Path) -> None:
    class Longer(Damper):
        def train_dataloader(self) -> Any:
            return rows(8)

    def script(make: MakeTrainer) -> Any:
        module = Longer()
        before = weights(module)
        trainer = make(default_root_dir=tmp_path, limit_val_batches=0)
        finder = pl.tuner.Tuner(trainer).lr_find(module, num_training=5, early_stop_threshold=None)
        assert list(differences(weights(module), before)) == []
        trainer.fit(module)
        return finder.results, module.lr, weights(module)

    under_both(script)


def test_the_search_for_a_batch_size_is_refused_as_with_every_strategy_of_ranks() -> None:
    tuner = pl.tuner.Tuner(ours())
    with pytest.raises(ValueError, match="Tuning the batch size is currently not supported with distributed"):
        tuner.scale_batch_size(Damper())
