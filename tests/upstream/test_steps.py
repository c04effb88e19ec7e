"""Steps that Lightning takes: counts, closures, wrappers, toggles, clipping, missing losses."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_moeclip.binding import LightningOptimizer, MixedPrecision, pl
from tests.upstream.configured import configured, sgd
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    Misconfigured,
    counted_backwards,
    ours,
    rows,
    stock,
    under_both,
    weights,
)


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
        # our sum of squares is of float64: an ulp of a weight near 1 in each of 3 steps
        assert (found[name] - value).abs().max() <= 3 * 2**-23, name


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


class Overflows(Damper):
    """Its second loss is infinite."""

    def __init__(self, *, is_automatic: bool, fused: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.fused = is_automatic, fused
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch) * (float("inf") if batch_idx == 1 else 1.0)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_after_backward(self) -> None:
        self.seen.append([p.grad.clone() for p in self.parameters()])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.fused:  # Lightning shows those of a fused optimizer scaled, and ours shows them true
            self.on_after_backward()

    def configure_optimizers(self) -> Any:
        return optim.Adam(self.parameters(), lr=self.lr, fused=self.fused)

    def train_dataloader(self) -> Any:
        return rows(7)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_automatic", [True, False], ids=["automatic", "by hand"])
def test_a_scaler_of_torch_scales_skips_and_grows_as_on_one_device(is_automatic: bool, fused: bool) -> None:
    def script(make: MakeTrainer) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        module = Overflows(is_automatic=is_automatic, fused=fused)
        trainer = make(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], limit_val_batches=0)
        trainer.fit(module)
        return weights(module), module.seen, trainer.precision_plugin.scaler.get_scale(), trainer.global_step

    assert under_both(script)[2:] == (2.0**10, 7)  # halved once, doubled once after three good steps of five
