"""Flags of the Trainer, loaders and states: the course of a run is that under one device."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_moeclip.binding import Callback, LightningModule, Trainer, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.course import Course, course_of
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
    timer = pl.callbacks.Timer(duration={"minutes": 10})
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
