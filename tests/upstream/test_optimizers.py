"""Optimizers and schedulers that Lightning steps: configurations, counts, closures, wrappers, clipping."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn, optim

from lightning_moeclip.binding import LightningOptimizer, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    Misconfigured,
    counted_backwards,
    differences,
    ours,
    rows,
    stock,
    under_both,
    weights,
)


def configured(make_configuration: Any, **attributes: Any) -> Damper:
    """A module whose ``configure_optimizers`` gives what the function makes of its parameters."""
    kind = type("Configured", (Damper,), {"configure_optimizers": lambda self: make_configuration(self), **attributes})
    return kind()


def sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.1)


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

    assert under_both(script) >= 21 // frequency - 2


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


# counts


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_one_backward_a_step_and_none_in_a_test(num_steps: int) -> None:
    module, trainer = Damper(), ours(max_steps=num_steps, max_epochs=-1)
    with mock.patch.object(Tensor, "backward", autospec=True, side_effect=Tensor.backward) as backward:
        trainer.fit(module)
        assert backward.call_count == num_steps
        trainer.test(module, verbose=False)
        assert backward.call_count == num_steps


@pytest.mark.parametrize(
    ("limits", "count"), [({"max_epochs": 1}, 6), ({"max_steps": 6, "max_epochs": -1}, 12)], ids=["epoch", "steps"]
)
def test_one_backward_for_each_micro_batch(limits: dict[str, int], count: int) -> None:
    class Six(Damper):
        def train_dataloader(self) -> Any:
            return rows(6)

    def script(make: MakeTrainer) -> Any:
        module, trainer = Six(), make(accumulate_grad_batches=2, **limits)
        with counted_backwards(trainer) as losses:
            trainer.fit(module)
        return len(losses), weights(module), trainer.global_step

    assert under_both(script)[0] == count


@pytest.mark.parametrize("accumulate", [1, 3])
def test_lbfgs_goes_backward_and_clears_as_often_as_on_one_device(accumulate: int) -> None:
    def script(make: MakeTrainer) -> Any:
        module = configured(lambda m: optim.LBFGS(m.parameters(), lr=0.1, max_iter=5))
        trainer = make(accumulate_grad_batches=accumulate)
        clears = mock.patch.object(optim.LBFGS, "zero_grad", autospec=True, side_effect=optim.LBFGS.zero_grad)
        with counted_backwards(trainer) as losses, clears as zero_grad:
            trainer.fit(module)
        return weights(module), len(losses), zero_grad.call_count, trainer.global_step

    _, count, clears, steps = under_both(script)
    assert steps == 3 // accumulate
    assert count > steps
    assert 0 < clears <= count


@pytest.mark.parametrize(
    "optimizer",
    [optim.Adagrad, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Rprop, optim.ASGD, optim.Adadelta],
)
def test_every_optimizer_of_torch_steps_as_on_one_device(optimizer: type) -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = configured(lambda m: optimizer(m.parameters(), lr=0.1)), make(max_epochs=2)
        trainer.fit(module)
        return weights(module), trainer.optimizers[0].state_dict()

    under_both(script)


# LightningOptimizer


def test_the_wrapper_stands_for_its_optimizer() -> None:
    class Looks(Damper):
        def on_train_start(self) -> None:
            assert not isinstance(self.trainer.optimizers[0], LightningOptimizer)
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.025

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            assert isinstance(optimizer, LightningOptimizer)
            assert isinstance(optimizer, optim.SGD)
            assert str(optimizer) == "Lightning" + str(optimizer.optimizer)
            assert optimizer.state is optimizer.optimizer.state
            assert optimizer.defaults is optimizer.optimizer.defaults
            assert optimizer.param_groups[0]["lr"] == 0.025
            self.given = optimizer.step(closure=optimizer_closure)

    def script(make: MakeTrainer) -> Any:
        module = Looks()
        make().fit(module)
        return weights(module), module.given

    under_both(script)


def test_wrappers_are_made_anew_with_the_optimizers_of_each_fit(tmp_path: Path) -> None:
    module = Damper()
    trainer = ours(default_root_dir=tmp_path)
    for _ in range(3):
        trainer.fit(module)
        assert module.optimizers().optimizer is trainer.optimizers[0]
        assert trainer.strategy._lightning_optimizers[0].optimizer is trainer.optimizers[0]
        trainer.fit_loop.max_epochs += 1


def test_optimizer_zero_grad_is_the_users_to_override() -> None:
    class Seldom(Damper):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

        def train_dataloader(self) -> Any:
            return rows(6)

    def script(make: MakeTrainer) -> Any:
        module = Seldom()
        with mock.patch.object(optim.SGD, "zero_grad", autospec=True, side_effect=optim.SGD.zero_grad) as clears:
            make().fit(module)
        return weights(module), clears.call_count

    assert under_both(script)[1] == 3


@pytest.mark.parametrize("gives", ["closure first", "in step", "closure and no step"])
def test_optimizer_step_is_the_users_to_override(gives: str) -> None:
    class Chooses(Damper):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if gives == "in step":
                optimizer.step(closure=optimizer_closure)
                return
            optimizer_closure()
            if batch_idx % 2 == 0 and gives == "closure first":
                optimizer.step()

    def script(make: MakeTrainer) -> Any:
        module, trainer = Chooses(), make(limit_val_batches=0)
        skips_all = gives == "closure and no step"
        told = pytest.warns(UserWarning, match="`lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`")
        with counted_backwards(trainer) as losses, told if skips_all else nullcontext():
            trainer.fit(module)
        return weights(module), trainer.global_step, len(losses)

    under_both(script)


class Curious(optim.Optimizer):
    """Hooks into the modules whose parameters it steps."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: list[str] = []
        self.handles = [
            m.register_forward_pre_hook(lambda *_: self.seen.append("forward")) for m in module.modules() if m.training
        ]
        super().__init__(module.parameters(), {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad
        return loss


def test_hooks_of_an_optimizer_stay_while_its_wrapper_comes_and_goes() -> None:
    def script(make: MakeTrainer) -> Any:
        module = configured(Curious)
        trainer = make(limit_val_batches=0)
        trainer.fit(module)
        (optimizer,) = trainer.optimizers
        return weights(module), len(optimizer.handles), len(optimizer.seen)

    assert under_both(script)[1] == 3


# toggles in automatic optimization, clipping, missing losses


def test_toggling_one_optimizer_keeps_what_the_user_froze() -> None:
    class Frozen(ByHand):
        def __init__(self) -> None:
            super().__init__()
            self.outer.weight.requires_grad_(False)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            own = [p.requires_grad for p in self.parameters()]
            for index, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                wanted = [True, True, False, False] if index == 0 else [False, False, False, True]
                assert [p.requires_grad for p in self.parameters()] == wanted
                self.manual_backward(self.loss(batch))
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                assert [p.requires_grad for p in self.parameters()] == own

    def script(make: MakeTrainer) -> Any:
        module = Frozen()
        make().fit(module)
        return weights(module)

    under_both(script)


@pytest.mark.parametrize("how", ["norm", "value", "hook", "hook calls clip_gradients"])
def test_gradients_are_clipped_as_on_one_device(how: str) -> None:
    class Clips(Damper):
        def configure_gradient_clipping(self, optimizer: Any, **asked: Any) -> None:
            assert asked == {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
            if how == "hook":
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad.clamp_(min=0.0, max=0.01)
            else:
                self.clip_gradients(optimizer, **asked)

    def script(make: MakeTrainer) -> Any:
        module = Clips() if "hook" in how else Damper()
        trainer = make(gradient_clip_val=0.05, gradient_clip_algorithm="norm" if how == "norm" else "value")
        trainer.fit(module)
        return weights(module)

    if how != "norm":
        under_both(script)
        return
    wanted, found = script(stock), script(ours)
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() < 3e-7, name  # our sum of squares is of float64


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"gradient_clip_val": 0.01},
            r"gradient_clip_val=0.0001\)` and have passed `clip_gradients\(gradient_clip_val",
        ),
        ({"gradient_clip_algorithm": "foo"}, r"gradient_clip_algorithm='norm'\)` and have passed"),
    ],
)
def test_clipping_in_a_hook_by_another_bound_than_the_trainers_is_refused(asked: dict[str, Any], told: str) -> None:
    class Clips(Damper):
        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, **asked)

    settings = {"gradient_clip_val": 1e-4} if "gradient_clip_val" in asked else {"gradient_clip_algorithm": "norm"}
    with pytest.raises(Misconfigured, match=told):
        ours(**settings).fit(Clips())


@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_without_a_loss_are_left_out_as_on_one_device(missing: tuple[int, ...], accumulate: int) -> None:
    class Skips(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx in missing else self.loss(batch)

        def configure_optimizers(self) -> Any:
            return sgd(self)

    def script(make: MakeTrainer) -> Any:
        module, trainer = Skips(), make(max_epochs=2, accumulate_grad_batches=accumulate, limit_val_batches=0)
        closures = pl.loops.optimization.automatic.Closure
        again = mock.patch.object(closures, "warning_cache", type(closures.warning_cache)())  # it warns once a process
        with again, pytest.warns(UserWarning, match="`training_step` returned `None`"):
            trainer.fit(module)
        return weights(module), trainer.global_step

    under_both(script)


def test_outputs_of_a_step_are_a_loss_a_dict_with_one_or_nothing() -> None:
    class Wrong(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return {"error": self.loss(batch)}

    with pytest.raises(Misconfigured, match="the 'loss' key needs to be present"):
        ours().fit(Wrong())
