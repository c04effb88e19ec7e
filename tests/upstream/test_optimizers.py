"""Configurations of optimizers and schedulers: taken, refused and warned of as on one device."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn, optim

from lightning_moeclip.binding import pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.configured import configured, sgd
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


def scheduled(module: nn.Module, scheduler: Any = None, **keys: Any) -> Any:
    optimizer = sgd(module)
    made = optim.lr_scheduler.StepLR(optimizer, 1) if scheduler is None else scheduler(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, **keys}}


FORMS = {
    "one": sgd,
    "dict": lambda m: {"optimizer": sgd(m)},
    "list": lambda m: [sgd(m)],
    "tuple": lambda m: (sgd(m),),
    "two lists": lambda m: ([o := sgd(m)], [optim.lr_scheduler.StepLR(o, 1)]),
    "list and scheduler": lambda m: ([o := sgd(m)], optim.lr_scheduler.StepLR(o, 1)),
    "dict with scheduler": lambda m: {"optimizer": (o := sgd(m)), "lr_scheduler": optim.lr_scheduler.StepLR(o, 1)},
    "dict of dicts": scheduled,
    "every step": lambda m: scheduled(m, interval="step", frequency=2),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_configuration_trains_as_on_one_device(form: str) -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = configured(FORMS[form]), make(max_epochs=2)
        trainer.fit(module)
        return weights(module), [group["lr"] for group in trainer.optimizers[0].param_groups]

    (lr,) = under_both(script)[1]
    decays = 0 if form in ("one", "dict", "list", "tuple") else 2
    assert lr == pytest.approx(0.1 ** (1 + decays))


plateau = optim.lr_scheduler.ReduceLROnPlateau
REFUSED = {
    "a number": (lambda m: 1, "Unknown configuration for model optimizers"),
    "a dict and an optimizer": (lambda m: [{"optimizer": sgd(m)}, sgd(m)], "Unknown configuration"),
    "two optimizers": (lambda m: [sgd(m), sgd(m)], "multiple optimizers is only supported with manual optimization"),
    "plateau": (lambda m: ([o := sgd(m)], [plateau(o)]), "must include a monitor when a `ReduceLROnPlateau`"),
    "plateau in a dict": (lambda m: scheduled(m, plateau), "must include a monitor when a `ReduceLROnPlateau`"),
    "no scheduler": (lambda m: {"optimizer": sgd(m), "lr_scheduler": {}}, 'must have the key "scheduler"'),
    "interval": (lambda m: scheduled(m, interval="minute"), 'The "interval" key in lr scheduler dict must be'),
    "foreign": (
        lambda m: ([sgd(m)], [optim.lr_scheduler.StepLR(sgd(m), 1)]),
        "attached with an optimizer that wasn't returned",
    ),
    "monitor": (lambda m: scheduled(m, plateau, monitor="giraffe"), "conditioned on metric giraffe which is not"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_configuration_that_lightning_refuses_is_refused_with_its_words(what: str) -> None:
    configuration, told = REFUSED[what]
    with pytest.raises((Misconfigured, RuntimeError), match=told):
        ours().fit(configured(configuration))


WARNED = {
    "keys of the optimizer": (
        lambda m: {**scheduled(m), "foo": 1},
        r"unsupported keys in the optimizer configuration: \{'foo'\}",
    ),
    "keys of the scheduler": (lambda m: scheduled(m, foo=1), r"unsupported keys in the lr scheduler dict: \{'foo'\}"),
    "one cycle": (
        lambda m: scheduled(m, lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=9)),
        "Are you sure you didn't mean 'interval': 'step'",
    ),
    "not strict": (
        lambda m: scheduled(m, plateau, monitor="giraffe", strict=False),
        "not available but strict is set to `False`. Skipping learning rate update",
    ),
    "none": (lambda m: None, "will run with no optimizer"),
}


@pytest.mark.parametrize("what", WARNED)
def test_a_configuration_that_lightning_warns_of_is_warned_of_and_runs(what: str) -> None:
    configuration, told = WARNED[what]

    def script(make: MakeTrainer) -> Any:
        module, trainer = configured(configuration), make()
        with pytest.warns((RuntimeWarning, UserWarning), match=told):
            trainer.fit(module)
        return weights(module), trainer.global_step

    assert under_both(script)[1] == 3


def test_without_an_optimizer_losses_go_backward_on_two_ranks_and_nothing_moves() -> None:
    for moved, steps in no_optimizer.launch():
        assert moved == []
        assert steps == 3


@on_ranks(2)
def no_optimizer(rank: Rank) -> Any:
    module = configured(lambda m: None)
    before = weights(module)
    trainer = ours(2)
    if rank.index == 0:
        with pytest.warns(UserWarning, match="will run with no optimizer"):
            trainer.fit(module)
    else:
        trainer.fit(module)
    return list(differences(weights(module), before)), trainer.global_step


def test_a_step_that_takes_optimizer_idx_is_refused_with_lightnings_words() -> None:
    class Old(Damper):
        def training_step(self, batch: Tensor, batch_idx: int, optimizer_idx: int) -> Any:
            return self.loss(batch)

    with pytest.raises(RuntimeError, match="Remove the `optimizer_idx` argument from `training_step`"):
        ours().fit(Old())


def test_a_plateau_scheduler_follows_what_is_logged() -> None:
    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("error", float(self.current_epoch), on_step=False, on_epoch=True, sync_dist=True)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return {"optimizer": (o := sgd(self)), "lr_scheduler": plateau(o, patience=0), "monitor": "error"}

    def script(make: MakeTrainer) -> Any:
        module, trainer = Logs(), make(max_epochs=3)
        trainer.fit(module)
        (config,) = trainer.lr_scheduler_configs
        asked = (config.monitor, config.interval, config.frequency, config.reduce_on_plateau, config.strict)
        return weights(module), trainer.optimizers[0].param_groups[0]["lr"], asked

    _, lr, asked = under_both(script)
    assert lr == pytest.approx(0.001)
    assert asked == ("error", "epoch", 1, True, True)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_makes_no_optimizer(verb: str) -> None:
    trainer = ours()
    getattr(trainer, verb)(Damper())
    assert trainer.optimizers == []
    assert trainer.lr_scheduler_configs == []


@pytest.mark.parametrize("every", [1, 2])
def test_schedulers_step_once_an_epoch_however_often_is_validated(every: int) -> None:
    trainer = ours(max_epochs=4, check_val_every_n_epoch=every)
    with mock.patch.object(optim.lr_scheduler.StepLR, "step") as steps:
        trainer.fit(Damper())
    assert steps.call_count == 4 + 1  # torch's own first step


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_has_stepped_before_a_checkpoint_is_saved(interval: str, tmp_path: Path) -> None:
    class Saved(Damper):
        def configure_optimizers(self) -> Any:
            return scheduled(self, interval=interval)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.saved = checkpoint["lr_schedulers"]

    def script(make: MakeTrainer) -> Any:
        module = Saved()
        keeps = pl.callbacks.ModelCheckpoint(tmp_path / make.__name__)
        make(callbacks=[keeps], enable_checkpointing=True).fit(module)
        return module.saved

    (state,) = under_both(script)
    assert state["_step_count"] - 1 == (1 if interval == "epoch" else 3)


@pytest.mark.parametrize("at_epoch_end", [False, True])
def test_two_schedulers_of_one_optimizer_step_at_each_batch_before_a_checkpoint(
    at_epoch_end: bool, tmp_path: Path
) -> None:
    class Saved(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("number", float(batch_idx))
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = sgd(self)
            configs = [
                {"scheduler": plateau(optimizer, patience=0), "interval": "step", "monitor": "number"},
                {"scheduler": optim.lr_scheduler.StepLR(optimizer, step_size=1), "interval": "step"},
            ]
            return [optimizer], configs

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.saved = [dict(state) for state in checkpoint["lr_schedulers"]]

    def script(make: MakeTrainer) -> Any:
        module = Saved()
        keeps = pl.callbacks.ModelCheckpoint(tmp_path / make.__name__, save_on_train_epoch_end=at_epoch_end)
        make(callbacks=[keeps], enable_checkpointing=True).fit(module)
        return module.saved, weights(module)

    first, second = under_both(script)[0]
    assert first["last_epoch"] == 3 - (not at_epoch_end)
    assert second["_step_count"] - 1 == 3


@pytest.mark.parametrize("frequency", [1, 2, 5])
def test_a_scheduler_that_counts_steps_counts_them_over_epochs_as_on_one_device(frequency: int) -> None:
    class Seven(Damper):
        def train_dataloader(self) -> Any:
            return rows(7)

        def configure_optimizers(self) -> Any:
            return scheduled(self, interval="step", frequency=frequency)

    def script(make: MakeTrainer) -> Any:
        trainer = make(max_epochs=3)
        with mock.patch.object(optim.lr_scheduler.StepLR, "step") as steps:
            trainer.fit(Seven())
        return steps.call_count - 1

    count = under_both(script)
    assert (count == 21) is (frequency == 1)


class OwnScheduler:
    """Not torch's; wants the epoch when it steps."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer, self.epochs = optimizer, []

    def step(self, epoch: int) -> None:
        self.epochs.append(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("has_hook", [True, False])
def test_a_scheduler_of_the_users_own_is_stepped_in_the_users_hook(has_hook: bool) -> None:
    hook = {"lr_scheduler_step": lambda self, scheduler, metric: scheduler.step(epoch=self.current_epoch)}
    module = configured(lambda m: scheduled(m, OwnScheduler), **(hook if has_hook else {}))
    trainer = ours(max_epochs=3)
    with nullcontext() if has_hook else pytest.raises(Misconfigured, match="`OwnScheduler` doesn't follow"):
        trainer.fit(module)
    if has_hook:
        assert trainer.lr_scheduler_configs[0].scheduler.epochs == [0, 1, 2]


def test_a_scheduler_without_a_state_is_refused() -> None:
    class Stateless:
        def __init__(self, optimizer: optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            pass

    with pytest.raises(TypeError, match="provided lr scheduler `Stateless` is invalid"):
        ours().fit(configured(lambda m: scheduled(m, Stateless)))
