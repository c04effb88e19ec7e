"""Regions while a run changes: parameters that come, several losses of a step, steps that are left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import loader, quiet_trainer

DIM = 4


class Head(nn.Module):
    """Gets a second layer while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if self.second is None else self.first(x) + self.second(x)


class Net(LightningModule):
    """A layer and a head, whose factor is 8; keeps what the optimizer sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(DIM, DIM), Head()
        self.seen: list[dict[str, Tensor]] = []

    def on_train_start(self) -> None:
        scales = self.trainer.precision_plugin.scaler.scales
        state = scales.state_dict()
        scales.load_state_dict(state | {"factor": state["factor"] * 8.0})

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.head(self.layer(batch)).float().square().mean()

    def on_train_end(self) -> None:
        if self.head.second is not None:
            self.row = self.trainer.precision_plugin.scaler._row_of(self.head.second.weight)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def grow(self) -> None:
        torch.manual_seed(5)
        self.head.second = nn.Linear(DIM, DIM)
        self.optimizers().add_param_group({"params": list(self.head.second.parameters())})


class GrowsBetweenEpochs(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.grow()


class GrowsInAStep(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 1:
            self.grow()
        return super().training_step(batch, batch_idx)


class GoesAroundAfterGrowing(GrowsInAStep):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.head.second is None or batch_idx == 0:
            return loss
        return loss + nn.functional.linear(batch, self.head.second.weight).float().mean()


class Manual(Net):
    def __init__(self, step: Callable[["Manual", Tensor, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.step = step
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.step(self, batch, batch_idx)


def loss_of(module: Net, batch: Tensor) -> Tensor:
    return module.head(module.layer(batch)).float().square().mean()


def second_goes_around(module: Manual, batch: Tensor, batch_idx: int) -> None:
    module.manual_backward(loss_of(module, batch))
    module.manual_backward(nn.functional.linear(batch, module.head.first.weight).float().mean())
    module.optimizers().step()


def leaves_steps_out(module: Manual, batch: Tensor, batch_idx: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    loss = loss_of(module, batch)
    module.manual_backward(loss * torch.inf if batch_idx == 2 else loss)
    module.norms.append(float(module.trainer.strategy.clip_grad_norm_(1e9)))
    if batch_idx not in (0, 2):
        optimizer.step()


def leaves_every_overflow_out(module: Manual, batch: Tensor, batch_idx: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss_of(module, batch) * torch.inf)
    if module.trainer.strategy.clip_grad_norm_(1.0).isfinite():
        optimizer.step()


def zeroes_in_place(module: Manual, batch: Tensor, batch_idx: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad(set_to_none=False)
    module.manual_backward(loss_of(module, batch))
    module.norms.append(float(module.trainer.strategy.clip_grad_norm_(1e9)))
    if batch_idx % 2:
        optimizer.step()


def clips_every_micro_batch(module: Manual, batch: Tensor, batch_idx: int) -> None:
    optimizer = module.optimizers()
    if batch_idx % 2 == 0:
        optimizer.zero_grad()
    module.manual_backward(loss_of(module, batch) / 2)
    module.norms.append(float(module.trainer.strategy.clip_grad_norm_(1e9)))
    if batch_idx % 2:
        optimizer.step()


def third_goes_around(module: Manual, batch: Tensor, batch_idx: int) -> None:
    optimizer = module.optimizers()
    for index in range(3):
        optimizer.zero_grad()
        around = nn.functional.linear(batch, module.head.first.weight).float().mean()
        module.manual_backward(around if index == 2 else loss_of(module, batch))
        optimizer.step()


class Rests(Net):
    """No loss in the first and the third batch, and a norm that is read where gradients are clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float | None] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 2 == 0 else super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 1e9, "norm")
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(grads).norm()) if grads else None)


def fit(module: Net, rank: Rank, *, epochs: int = 1, is_local: bool = True, **arguments: Any) -> MoEClipPrecision:
    local = {"loss_scaling": "local", "regions": ["head"]} if is_local else {}
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=2.0**6, **local)
    data = list(torch.randn(4, 5, DIM, generator=torch.Generator().manual_seed(rank.index)))
    strategy = MoEClipStrategy(**arguments)
    trainer = quiet_trainer(rank.world_size, strategy=strategy, plugins=[precision], max_epochs=epochs)
    trainer.fit(module, loader(data))
    return precision


@on_ranks(2)
def test_parameters_that_come_into_a_region_have_its_scale_from_their_first_step(rank: Rank) -> None:
    for kind in (GrowsBetweenEpochs, GrowsInAStep):
        plain, own = kind(), kind()
        fit(plain, rank, epochs=2, is_local=False)
        precision = fit(own, rank, epochs=2)
        for wanted, found in zip(plain.seen, own.seen, strict=True):
            assert wanted.keys() == found.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), kind.__name__
        assert "head.second.weight" in own.seen[-1]
        # counted with the region, not with the rest of the model
        assert (plain.row, own.row) == (0, 1)
        # and after the run nothing is held of the module's parameters
        assert precision.scaler is not None
        assert precision.scaler._row_of(own.head.second.weight) == 0


FAULTS: dict[str, tuple[Callable[[], Net], dict[str, Any], str]] = {
    "second loss": (
        lambda: Manual(second_goes_around),
        {},
        "head.first.weight: used past the output of the region 'head'",
    ),
    "third loss": (lambda: Manual(third_goes_around), {}, "head.first.weight: used past the output of the region"),
    "after growing": (GoesAroundAfterGrowing, {"epochs": 2}, "head.second.weight: used past the output of the region"),
    "float16 between ranks": (
        Net,
        {"gradient_dtype": torch.float16},
        "gradient_dtype=torch.float16 with loss_scaling='local': .* Write gradient_dtype=torch.bfloat16",
    ),
}


@on_ranks(2)
def faulty_fit(rank: Rank, name: str) -> None:
    make, arguments, _ = FAULTS[name]
    fit(make(), rank, **arguments)


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_be_wrong_by_a_factor_is_refused_also_when_it_comes_later(name: str) -> None:
    with pytest.raises(RanksFailed, match=FAULTS[name][2]):
        faulty_fit.launch(name=name)


@on_ranks(2)
def test_a_step_that_is_clipped_and_left_out_leaves_the_next_ones_right(rank: Rank) -> None:
    module = Manual(leaves_steps_out)
    precision = fit(module, rank, is_local=False)
    alone = [fit_norm(module, rank, index) for index in range(4)]
    assert not torch.tensor(module.norms[2]).isfinite()
    for index in (0, 1, 3):
        assert module.norms[index] == pytest.approx(alone[index], rel=4e-3)  # eleven bits, in a few roundings
    # the overflow of the step that was left out has halved the scale all the same
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2.0**5


@on_ranks(2)
def test_the_scale_falls_also_where_every_step_with_an_overflow_is_left_out(rank: Rank) -> None:
    precision = fit(Manual(leaves_every_overflow_out), rank, is_local=False)
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2.0**3  # 2^6, and three backwards that follow such a step


@on_ranks(2)
def test_gradients_that_are_clipped_before_more_is_added_are_scaled_again(rank: Rank) -> None:
    for is_local in (False, True):
        zeroed, summed = Manual(zeroes_in_place), Manual(clips_every_micro_batch)
        fit(zeroed, rank, is_local=is_local)
        fit(summed, rank, is_local=is_local)
        for index in range(4):
            assert zeroed.norms[index] == pytest.approx(fit_norm(zeroed, rank, index), rel=4e-3)
        for first in (0, 2):
            assert summed.norms[first] == pytest.approx(fit_norm(summed, rank, first) / 2, rel=4e-3)
            assert summed.norms[first + 1] == pytest.approx(fit_norm(summed, rank, first, first + 1) / 2, rel=4e-3)


@on_ranks(1)
def test_a_batch_without_loss_leaves_the_next_one_right_where_gradients_are_clipped(rank: Rank) -> None:
    module = Rests()
    fit(module, rank, is_local=False)
    assert module.norms[0] is None
    for index in (1, 3):
        assert module.norms[index] == pytest.approx(fit_norm(module, rank, index), rel=4e-3)


def fit_norm(module: Net, rank: Rank, *indices: int) -> float:
    """Norm of the sum of gradients of batches of all ranks, in float32."""
    data = [torch.randn(4, 5, DIM, generator=torch.Generator().manual_seed(r)) for r in range(rank.world_size)]
    loss = sum(loss_of(module, torch.cat([rows[index] for rows in data])) for index in indices)
    grads = torch.autograd.grad(loss, list(module.parameters()))
    return float(torch.cat([g.flatten() for g in grads]).norm())
