"""What belongs to a step: losses, cosines and numbers of micro-batches, also where gradients were dropped."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import Callback, LightningModule
from lightning_moeclip.callbacks import CosineRollback
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.pair import Notes, Pair, Steady, noise, pairs, run
from tests.gradients.tiny_experts import TinyExperts
from tests.models import loader, quiet_trainer

# what accumulates here is a contrastive loss, on purpose
pytestmark = pytest.mark.filterwarnings(r"ignore:.*\[MOE404:")

ALONE = r"watches loss and gradient norm alone: no loss tells of its directions. Use ContrastiveLoss or SigmoidLoss"


class DropsOne(Pair):
    """Leaves out the step of one batch, by hand or, in automatic optimization, by running the closure alone."""

    def __init__(self, dropped: int, *, automatic: bool, factor: float) -> None:
        super().__init__(lr=0.0, automatic=automatic)
        self.dropped, self.factor = dropped, factor
        self.rollback: CosineRollback | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if self.rollback is not None:
            first = torch.ones(2, 2) if batch_idx == self.dropped else torch.eye(2)
            self.rollback.hand_in(first, torch.ones(2, 2))
        loss = self.loss_of(batch) * (self.factor if batch_idx == self.dropped else 1.0)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx == self.dropped:
            optimizer.zero_grad()
        else:
            optimizer.step()
        return None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == self.dropped:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("factor", [1e3, math.nan])
def test_what_went_backward_and_was_dropped_is_no_part_of_the_next_step(automatic: bool, factor: float) -> None:
    data = pairs(1) * 90
    rollback, notes = CosineRollback(), Notes()
    module = DropsOne(85, automatic=automatic, factor=factor)
    run(module, data, rollback, notes)
    assert not rollback.history
    assert len(notes.losses) == 89
    assert set(notes.losses) == {notes.losses[0]}


@pytest.mark.parametrize("automatic", [True, False])
def test_cosines_of_dropped_gradients_are_no_part_of_the_next_step(automatic: bool) -> None:
    seen = {}
    for dropped in (1, -1):
        module, rollback = DropsOne(dropped, automatic=automatic, factor=1.0), CosineRollback()
        module.rollback = rollback
        seen[dropped] = cosines_of(module, pairs(3), rollback)
    assert seen[1] == [seen[-1][0], seen[-1][2]]
    assert seen[-1][0] != seen[-1][2]  # it would be seen


class HandsInBehind(Pair):
    """Tells of its directions behind the backward; one batch has no step, and a cosine of its own."""

    def __init__(self, rollback: CosineRollback) -> None:
        super().__init__(lr=0.0)
        self.rollback, self.batch_idx = rollback, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        return (self.image(batch[0]) - self.text(batch[1])).square().mean()

    def on_after_backward(self) -> None:
        first = torch.tensor([-1e6 if self.batch_idx == 1 else 1.0, 0.0])
        self.rollback.hand_in(first, torch.ones(2))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


def cosines_of(module: LightningModule, data: list, rollback: CosineRollback, **arguments: Any) -> list[float | None]:
    cosines = []

    class Watch(Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            assert rollback.observation is not None
            cosines.append(rollback.observation.cosine)

    run(module, data, rollback, Watch(), **arguments)
    return cosines


def test_cosines_handed_in_behind_a_backward_that_was_dropped_are_no_part_of_the_next_step() -> None:
    rollback = CosineRollback()
    assert cosines_of(HandsInBehind(rollback), pairs(4), rollback) == pytest.approx([math.sqrt(0.5)] * 3)


class Cached(Pair):
    """Cotangents of the features first, then a backward that takes them on: the loss runs backward by itself."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            features = self.image(batch[0]), self.text(batch[1])
        leaves = [x.requires_grad_() for x in features]
        cotangents = torch.autograd.grad(self.loss(*leaves), leaves)
        again = self.image(batch[0]), self.text(batch[1])
        return sum((x * cotangent).sum() for x, cotangent in zip(again, cotangents, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_differentiated_within_the_step_tells_of_its_directions(accumulate: int) -> None:
    data = pairs(4)
    arguments = {"accumulate_grad_batches": accumulate}
    wanted = cosines_of(Pair(lr=0.0), data, CosineRollback(), **arguments)
    assert len(wanted) == 4 // accumulate
    assert cosines_of(Cached(lr=0.0), data, CosineRollback(), **arguments) == pytest.approx(wanted)


@pytest.mark.parametrize(("num_batches", "nones"), [(321, ()), (323, (170,))], ids=["remainder", "none"])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned `None`", "ignore:.*watches loss and gradient norm alone")
def test_a_step_of_fewer_micro_batches_is_judged_by_their_mean(num_batches: int, nones: tuple[int, ...]) -> None:
    rollback, notes = CosineRollback(), Notes()
    run(Steady(nones=nones), noise(num_batches), rollback, notes, accumulate_grad_batches=4)
    assert not rollback.history
    assert rollback.observation is not None
    assert rollback.observation.is_judged
    assert [n.loss for n in notes.numbers] == pytest.approx([-1.0] * 81, rel=0.01)
    assert [n.grad_norm for n in notes.numbers] == pytest.approx([2.0] * 81, rel=0.01)


@on_ranks(2)
def test_ranks_with_different_numbers_of_losses_are_no_measure(rank: Rank) -> None:
    notes = Notes()
    trainer = quiet_trainer(2, callbacks=[notes], accumulate_grad_batches=2)
    trainer.fit(Steady(nones=(2,) if rank.index else ()), loader(noise(6)))
    assert [n.is_whole for n in notes.numbers] == [True, False, True]
    assert [n.loss for n in notes.numbers] == pytest.approx([-1.0] * 3, rel=1e-3)


class OnlyExperts(LightningModule):
    """The optimizer holds experts alone; those of rank 1 get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.experts = nn.Linear(4, 4).double(), TinyExperts(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.experts.are_resting = self.global_rank == 1
        return self.experts(self.dense(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.experts.parameters(), 0.1)


@on_ranks(2)
def test_a_rank_without_gradients_counts_its_losses_like_any_other(rank: Rank) -> None:
    notes = Notes()
    strategy = MoEClipStrategy(expert_parallel_size=2)
    trainer = quiet_trainer(2, strategy=strategy, callbacks=[notes], accumulate_grad_batches=2)
    generator = torch.Generator().manual_seed(0)
    trainer.fit(OnlyExperts(), loader([torch.randn(6, 4, generator=generator, dtype=torch.float64)] * 4))
    assert [n.is_whole for n in notes.numbers] == [True, True]


class Adversary(Pair):
    """A discriminator steps first, and says nothing of directions."""

    def __init__(self) -> None:
        super().__init__(automatic=False)
        self.other = nn.Linear(3, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        losses = (self.other(self.image(batch[0]).detach()).square().mean(), self.loss_of(batch))
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        towers = [p for layer in (self.image, self.text, self.loss) for p in layer.parameters()]
        return torch.optim.SGD(self.other.parameters(), 0.1), torch.optim.SGD(towers, 0.1)


class NoneFirst(Pair):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss_of(batch) if batch_idx else None


@pytest.mark.parametrize("module", [Adversary, NoneFirst])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned `None`")
def test_directions_that_come_later_are_no_reason_to_warn(module: type[Pair]) -> None:
    rollback = CosineRollback()
    run(module(), pairs(3), rollback)  # warnings are errors here
    assert rollback.observation is not None
    assert rollback.observation.cosine is not None


def test_a_loss_without_directions_is_told_of_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(Steady(), noise(3), CosineRollback())
    assert len([w for w in told if "loss and gradient norm alone" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match=ALONE):
        run(Steady(), noise(1), CosineRollback())
