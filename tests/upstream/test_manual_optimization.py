"""The user calls backward and step: numbers and counts are those of one device."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision
from tests.upstream.by_hand import TwoThree
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    Misconfigured,
    counted_backwards,
    differences,
    ours,
    rows,
    under_both,
    weights,
)


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
