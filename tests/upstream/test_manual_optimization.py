"""The user calls backward and step: the numbers and counts of Lightning's strategy for one device."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision
from lightning_moeclip.binding import LightningModule, LightningOptimizer
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


class TwoThree(ByHand):
    """One backward for the first optimizer, two for the second, in every batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()
        assert self.inner.weight.grad is None
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad()
        second.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        once = self.outer.weight.grad.clone()
        self.manual_backward(loss)
        assert torch.equal(self.outer.weight.grad, 2 * once)
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss


def test_backwards_and_steps_are_counted() -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = TwoThree(), make(limit_train_batches=2)
        with counted_backwards(trainer) as losses:
            trainer.fit(module)
        return len(losses), trainer.global_step, weights(module), losses

    assert under_both(script)[:2] == (2 * 3, 2 * 2)


def test_values_are_logged_at_steps_and_epochs() -> None:
    class Logs(TwoThree):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("a", super().training_step(batch, batch_idx), on_step=True, on_epoch=True, sync_dist=True)

    def script(make: MakeTrainer) -> Any:
        trainer = make()
        trainer.fit(Logs())
        return dict(trainer.callback_metrics), dict(trainer.logged_metrics)

    assert set(under_both(script)[1]) == {"a_step", "a_epoch"}


def test_a_parameter_in_two_optimizers_is_refused_here_and_not_by_lightning() -> None:
    class Shares(Damper):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    module = Shares()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"inner\.weight is in optimizer 0 and in optimizer 1\. Each would step it"):
        ours().fit(module)


class Returns(ByHand):
    """Returns its loss without asking for its gradient."""

    output: Any = "loss"

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss} if self.output == "dict" else loss


@pytest.mark.parametrize("output", ["loss", "dict"])
def test_a_returned_loss_is_not_sent_backward(output: str) -> None:
    module, trainer = Returns(), ours()
    module.output = output
    before = weights(module)
    with counted_backwards(trainer) as losses:
        trainer.fit(module)
    assert losses == []
    assert trainer.global_step == 0
    assert list(differences(weights(module), before)) == []
    assert all(p.grad is None for p in module.parameters())


class Fourth(ByHand):
    """Sums gradients of every second batch and steps with every fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch) * 0.1
        if batch_idx % 2 == 1:
            self.manual_backward(loss)
        if batch_idx % 4 == 3:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    def on_train_batch_end(self, *args: object) -> None:
        gradient = self.inner.weight.grad
        self.seen.append((None if gradient is None else gradient.clone(), weights(self)))

    def train_dataloader(self) -> Any:
        return rows(9)


def test_gradients_are_summed_over_batches_until_the_user_steps() -> None:
    def script(make: MakeTrainer) -> Any:
        module = Fourth()
        trainer = make()
        trainer.fit(module)
        return module.seen, trainer.global_step

    seen, steps = under_both(script)
    assert steps == 2 * 2
    assert [gradient is None for gradient, _ in seen] == [True, False, False, True, True, False, False, True, True]


class Store(Mapping):
    """A mapping that is no dict."""

    def __init__(self, **values: Any) -> None:
        self.values_ = values

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)

    def copy(self) -> "Store":
        return Store(**self.values_)

    __copy__ = copy


@pytest.mark.parametrize("kind", [dict, Store])
def test_any_mapping_may_be_returned(kind: type) -> None:
    class Maps(TwoThree):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return kind(one=super().training_step(batch, batch_idx).detach(), two=3)

        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            self.outputs = dict(outputs)

    module = Maps()
    ours().fit(module)
    assert module.outputs["two"] == 3


def test_another_output_is_refused_by_name() -> None:
    class Wrong(ByHand):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return "done"

    with pytest.raises(Misconfigured, match="training_step` must either return a Tensor or have no return"):
        ours().fit(Wrong())


class Scaled(ByHand):
    """Keeps gradients after backward and before the step, with the loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Tensor], float]] = []

    def note(self, place: str, parameters: Any) -> None:
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        self.seen.append((place, gradients, self.trainer.precision_plugin.scaler.get_scale()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()

    def on_after_backward(self) -> None:
        self.note("backward", self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("step", [p for group in optimizer.param_groups for p in group["params"]])


def test_gradients_are_scaled_after_backward_and_true_before_each_step() -> None:
    module = Scaled()
    trainer = ours(plugins=[MoEClipPrecision("16-mixed", device="cpu", init_scale=2.0**10)], limit_train_batches=2)
    with mock.patch.object(trainer.precision_plugin.scaler, "step", wraps=trainer.precision_plugin.scaler.step) as step:
        trainer.fit(module)
    assert step.call_count == 2 * 2
    assert [place for place, _, _ in module.seen] == ["backward", "step", "step"] * 2
    (_, scaled, scale), (_, inner, _), (_, outer, _) = module.seen[:3]
    assert scale == 2.0**10
    for gradient, true in zip(scaled, inner + outer, strict=True):
        assert torch.equal(gradient, true * scale)


class Closes(ByHand):
    """Steps through a closure that goes backward twice."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.how = how
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert self.inner.weight.grad is None
        optimizer, before = self.optimizers(), self.inner.weight.clone()
        loss = self.loss(batch)

        def closure() -> Tensor:
            for is_last in (False, True):
                part = loss if self.how == "one graph" else self.loss(nn.functional.dropout(batch, 0.1))
                self.manual_backward(part, retain_graph=not is_last)
                self.losses.append(part.detach())
            value = torch.stack(self.losses[-2:]).mean()
            self.log("error", value, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
            return value

        output = optimizer.step(closure=closure)
        optimizer.zero_grad()
        assert not torch.equal(before, self.inner.weight)
        self.outputs = output


@pytest.mark.parametrize("how", ["one graph", "two graphs"])
def test_a_closure_runs_once_in_its_step_and_its_values_are_logged(how: str) -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = Closes(how=how), make()
        torch.manual_seed(1)  # for dropout
        with counted_backwards(trainer) as losses:
            trainer.fit(module)
        return len(losses), trainer.global_step, dict(trainer.progress_bar_metrics), weights(module), module.losses

    count, steps, metrics, _, losses = under_both(script)
    assert (count, steps) == (6, 3)
    pairs = torch.stack(losses).view(3, 2).mean(dim=1)
    assert metrics["error_step"] == pairs[-1].item()
    assert metrics["error_epoch"] == pytest.approx(pairs.mean().item(), rel=1e-6)


class TakesTurns(ByHand):
    """Two optimizers of different frequencies, one of which is given an argument of the user's own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()

        def closure(name: str) -> Tensor:
            loss = self.loss(batch)
            self.log(name, loss, on_step=True, on_epoch=True, sync_dist=True)
            self.manual_backward(loss)
            return loss

        if batch_idx % 2 == 0:
            first.step(closure=lambda: closure("first"), hint="sgd")
            first.zero_grad()
        if batch_idx % 4 == 0:
            second.step(closure=lambda: closure("second"))
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [Hinted(self.inner.parameters(), lr=self.lr), torch.optim.Adam(self.outer.parameters(), lr=self.lr)]

    def train_dataloader(self) -> Any:
        return rows(8)


class Hinted(torch.optim.SGD):
    hints: tuple[str, ...] = ()

    def step(self, closure: Any = None, *, hint: str = "") -> Any:
        self.hints += (hint,)
        return super().step(closure)


def test_optimizers_may_take_turns_and_arguments_of_their_own() -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = TakesTurns(), make()
        trainer.fit(module)
        return trainer.optimizers[0].hints, trainer.global_step, weights(module), set(trainer.logged_metrics)

    hints, steps, _, names = under_both(script)
    assert hints == ("sgd",) * 4
    assert steps == 4 + 2
    assert names == {"first_step", "first_epoch", "second_step", "second_epoch"}


class Adversaries(LightningModule):
    """A generator and a critic with layers of their own, each toggled while it trains."""

    def __init__(self, *, how: str, every: int = 1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.how, self.every = how, every
        self.generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.critic = nn.Linear(4, 1)
        self.critic.bias.requires_grad_(False)  # the user's own choice, which must outlive a toggle
        self.seen: list[Any] = []

    def turn(self, optimizer: LightningOptimizer, own: nn.Module, other: nn.Module, loss: Any, batch_idx: int) -> None:
        steps = batch_idx % self.every == self.every - 1
        if self.how == "toggle_model":
            context = optimizer.toggle_model(sync_grad=steps)
        else:
            context = nullcontext()
            self.toggle_optimizer(optimizer)
        with context:
            assert all(not p.requires_grad for p in other.parameters())
            assert all(p.requires_grad for p in own.parameters() if p is not self.critic.bias)
            self.manual_backward(loss())
            if steps:
                self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        if self.how != "toggle_model":
            self.untoggle_optimizer(optimizer)
        assert [p.requires_grad for p in self.parameters()] == [True, True, True, False]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        score = lambda: (self.critic(self.generator(batch)) - 1).square().mean()  # noqa: E731
        self.turn(first, self.generator, self.critic, score, batch_idx)
        self.turn(second, self.critic, self.generator, lambda: self.critic(batch).square().mean() + score(), batch_idx)

    def configure_optimizers(self) -> Any:
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        return [torch.optim.Adam(self.generator.parameters(), lr=0.1), second]


@pytest.mark.parametrize("how", ["toggle_model", "toggle_optimizer"])
@pytest.mark.parametrize("every", [1, 2])
def test_toggled_optimizers_train_their_own_part_and_give_the_rest_back(how: str, every: int) -> None:
    def script(make: MakeTrainer) -> Any:
        module = Adversaries(how=how, every=every)
        trainer = make()
        trainer.fit(module, rows(4))
        return weights(module), module.seen, trainer.global_step

    assert under_both(script)[2] == 2 * 4 // every


@on_ranks(2)
def toggle_on_ranks(rank: Rank) -> Any:
    module = Adversaries(how="toggle_model", every=2)
    module.double()
    batches = torch.cat(list(rows(4))).double().view(4, 2, 4)
    ours(2).fit(module, torch.utils.data.DataLoader(list(batches[:, rank.index : rank.index + 1]), batch_size=None))
    return weights(module), module.seen


def test_toggled_parts_without_sync_are_reduced_when_the_user_steps() -> None:
    module = Adversaries(how="", every=2).double()
    generator, critic = module.configure_optimizers()
    gradients = []
    for i, batch in enumerate(torch.cat(list(rows(4))).double().view(4, 2, 4)):
        for optimizer, own in ((generator, module.generator), (critic, module.critic)):
            score = (module.critic(module.generator(batch)) - 1).square().mean()
            loss = score if optimizer is generator else module.critic(batch).square().mean() + score
            learns = [p for p in own.parameters() if p.requires_grad]
            for p, g in zip(learns, torch.autograd.grad(loss, learns), strict=True):
                p.grad = g if p.grad is None else p.grad + g
            if i % 2 == 1:
                gradients.append([None if p.grad is None else p.grad.clone() for p in own.parameters()])
                optimizer.step()
                optimizer.zero_grad()

    for found, seen in toggle_on_ranks.launch():
        for name, value in module.state_dict().items():
            assert (found[name] - value).abs().max() < 1e-12, name
        own = [seen[turn][:2] if turn % 2 == 0 else seen[turn][2:] for turn in range(4)]
        for one, wanted in zip(own, gradients, strict=True):
            for g, w in zip(one, wanted, strict=True):
                assert (g is None) == (w is None)
                assert g is None or (g - w).abs().max() < 1e-12


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
        # value: to the bit; norm: ours sums squares in float64, so the factor may differ by a rounding in each step
        assert (found[name] - value).abs().max() <= (3e-7 if algorithm == "norm" else 0.0), name


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
