"""Manual optimization beside schedulers, precisions, clipping, and what goes past Lightning."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import LightningOptimizer
from tests.upstream.by_hand import TwoThree
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    Misconfigured,
    counted_backwards,
    ours,
    stock,
    under_both,
    weights,
)


def test_schedulers_are_given_out_in_their_order_and_never_stepped_for_the_user() -> None:
    class Scheduled(TwoThree):
        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            self.made = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.1) for o in optimizers]
            return optimizers, self.made

        def on_train_epoch_end(self) -> None:
            assert self.lr_schedulers() == self.made

    def script(make: MakeTrainer) -> Any:
        module, trainer = Scheduled(), make(max_epochs=2)
        trainer.fit(module)
        return [[group["lr"] for group in o.param_groups] for o in trainer.optimizers]

    assert under_both(script) == [[0.1], [0.1]]


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_plateau_scheduler_is_the_users_to_step(as_dict: bool) -> None:
    class Plateau(TwoThree):
        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0)
            config = {"scheduler": scheduler, "monitor": "error", "interval": "step"}
            return optimizers, [config if as_dict else scheduler]

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step(torch.tensor(0.0))

    def script(make: MakeTrainer) -> Any:
        trainer = make(max_epochs=3)
        told = pytest.warns(RuntimeWarning, match=r"\['monitor'\], but the keys will be ignored")
        with told if as_dict else nullcontext():
            trainer.fit(Plateau())
        return trainer.optimizers[0].param_groups[0]["lr"], trainer.lr_scheduler_configs[0].interval

    lr, interval = under_both(script)
    assert lr == pytest.approx(0.001)
    assert interval == ("step" if as_dict else "epoch")


class Stateful:
    """A scheduler that follows nobody's interface but its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("is_automatic", [True, False])
def test_a_scheduler_of_another_interface_is_for_manual_optimization_alone(is_automatic: bool) -> None:
    class Other(Damper):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [Stateful(optimizer)]

    module = Other()
    module.automatic_optimization = is_automatic
    refuses = pytest.raises(Misconfigured, match="doesn't follow PyTorch's LRScheduler")
    with refuses if is_automatic else nullcontext():
        ours(max_epochs=0).fit(module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_two_optimizers_log_what_they_are_told_in_every_precision(precision: str) -> None:
    class Logs(ByHand):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            for optimizer, name in zip(self.optimizers(), ("loss_a", "loss_b"), strict=True):
                self.toggle_optimizer(optimizer)
                loss = self.loss(batch)
                self.log(name, loss, prog_bar=True)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    def script(make: MakeTrainer) -> Any:
        module, trainer = Logs(), make(precision=precision)
        trainer.fit(module)
        return weights(module), dict(trainer.logged_metrics), set(trainer.progress_bar_metrics)

    assert under_both(script)[2] == {"loss_a", "loss_b"}


def test_a_step_gives_back_what_the_optimizer_gave() -> None:
    class Gives(ByHand):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            assert isinstance(first, LightningOptimizer)
            self.manual_backward(self.loss(batch))
            self.given = (first.step(), second.step(closure=lambda: torch.tensor(7.0)))

    def script(make: MakeTrainer) -> Any:
        module = Gives()
        make(limit_train_batches=1).fit(module)
        return module.given

    assert under_both(script)[1] == 7.0


@pytest.mark.parametrize("how", ["loss.backward", "plain optimizer", "both"])
def test_a_user_may_go_past_lightning(how: str) -> None:
    class Past(ByHand):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            loss = self.loss(batch)
            if how == "plain optimizer":
                self.manual_backward(loss)
            else:
                loss.backward()
            for optimizer in self.optimizers(use_pl_optimizer=how == "loss.backward"):
                optimizer.step()
                optimizer.zero_grad()

    def script(make: MakeTrainer) -> Any:
        module, trainer = Past(), make()
        trainer.fit(module)
        return weights(module), trainer.global_step

    assert under_both(script)[1] == (6 if how == "loss.backward" else 0)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_the_users_to_call(algorithm: str) -> None:
    class Clips(ByHand):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
                optimizer.step()
                optimizer.zero_grad()

    def script(make: MakeTrainer) -> Any:
        module = Clips()
        make().fit(module)
        return weights(module)

    wanted, found = script(stock), script(ours)
    for name, value in wanted.items():
        # value: to the bit; norm: ours sums squares in float64, an ulp of a weight near 1 in each of 3 steps
        assert (found[name] - value).abs().max() <= (3 * 2**-23 if algorithm == "norm" else 0.0), name


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gradient_clip_val": 0.1}, "Automatic gradient clipping is not supported for manual optimization"),
        ({"accumulate_grad_batches": 2}, "Automatic gradient accumulation is not supported for manual optimization"),
    ],
)
def test_what_a_trainer_does_by_itself_is_refused_in_manual_optimization(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(Misconfigured, match=told):
        ours(**settings).fit(ByHand())


def test_lbfgs_calls_its_closure_as_often_as_it_wants() -> None:
    class Searches(ByHand):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    def script(make: MakeTrainer) -> Any:
        module, trainer = Searches(), make()
        with counted_backwards(trainer) as losses:
            trainer.fit(module)
        return weights(module), len(losses), trainer.global_step

    _, count, steps = under_both(script)
    assert count > steps == 3
