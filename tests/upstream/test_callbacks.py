"""Lightning's own callbacks: the course of a run with them is that under one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moeclip.binding import pl
from tests.upstream.course import Course, course_of
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    differences,
    ours,
    rows,
    under_both,
    weights,
)
from tests.upstream.test_logging import Keeps

callbacks = pl.callbacks


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
