"""Which snapshots a run goes back to, and what it does where they are of no use."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_moeclip.binding import Callback, Trainer, pl
from lightning_moeclip.callbacks.cosine_rollback import CosineRollback
from lightning_moeclip.callbacks.residual_resync import ResidualResync
from lightning_moeclip.callbacks.rollback_ledger import RollbackLedger
from lightning_moeclip.callbacks.rollback_record import RollbackRecord
from lightning_moeclip.callbacks.rollback_settings import RollbackSettings
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.testing import Rank, inject, on_ranks
from tests.callbacks.rolled_back import Faulty, Spy
from tests.models import batches, loader, quiet_trainer, share

ROWS = {1: (6,), 2: (4, 2)}


def watch(**arguments: Any) -> CosineRollback:
    """One for which every cosine of a tiny model is good enough."""
    return CosineRollback(**{"good": -0.9, "low": -0.95, "snapshot_every_n_steps": 4, **arguments})


def train(rank: Rank, module: pl.LightningModule, num: int, *callbacks: Callback, **arguments: Any) -> list[str]:
    """Train on that many batches; what was warned of."""
    trainer = quiet_trainer(rank.world_size, callbacks=list(callbacks), **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(share(batches(num, num_rows=6), ROWS[rank.world_size], rank.index)))
    return [str(w.message) for w in caught]


def told(rollback: CosineRollback) -> list[tuple[int, str, int | None]]:
    return [(record.step, record.action, record.restored_step) for record in rollback.history]


def count(messages: list[str], part: str) -> int:
    return sum(part in message for message in messages)


class Poisoned(Faulty):
    """The first optimizer step to a ``global_step`` leaves a state with which every loss is NaN."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.was_poisoned = step, False
        self.register_buffer("poison", torch.tensor(False))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * torch.where(self.poison, torch.nan, 1.0)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.global_step == self.step - 1 and not self.was_poisoned:
            self.was_poisoned = True
            self.poison.fill_(True)


@on_ranks(2)
def test_snapshot_of_a_state_that_is_bad_is_dropped_for_the_one_before(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    train(rank, Poisoned(8), 11, rollback, spy)
    assert told(rollback) == [(8, "rolled back", 4)]
    assert (spy.snapshots[8], spy.snapshots[9]) == ((4, 8), (4,))


@on_ranks(1)
def test_fault_after_the_first_snapshot_is_skipped_and_another_is_taken_at_once(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    train(rank, Faulty(nan_loss=(4,)), 7, rollback, spy)
    assert told(rollback) == [(4, "skipped", None)]
    assert [spy.snapshots[step] for step in (4, 5, 6)] == [(4,), (), (6,)]


class BadBuffer(Faulty):
    """A buffer of one rank, which nothing reads, is NaN after a step."""

    def __init__(self, step: int, *, nan_loss: tuple[int, ...] = ()) -> None:
        super().__init__(rank=1, nan_loss=nan_loss)
        self.step = step
        self.register_buffer("unread", torch.zeros(3))

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.is_at((self.step - 1,)):
            self.unread.fill_(torch.nan)


class Bytes(Callback):
    """How much the snapshots of a run take."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        (rollback,) = (c for c in trainer.callbacks if isinstance(c, CosineRollback))
        self.num = rollback._snapshots.num_bytes


@on_ranks(2)
def test_rank_that_refuses_alone_costs_no_rank_the_only_snapshot_there_is_room_for(rank: Rank) -> None:
    size = Bytes()
    train(rank, BadBuffer(100), 5, watch(), size)
    rollback, spy = watch(max_snapshot_bytes=size.num), Spy()
    messages = train(rank, BadBuffer(8, nan_loss=(9,)), 11, rollback, spy)
    assert spy.snapshots[8] == (4,)
    assert told(rollback) == [(9, "rolled back", 4)]
    assert count(messages, "buffers/unread not finite") == (rank.index == 0)
    messages = train(rank, BadBuffer(100), 13, watch(max_snapshot_bytes=size.num), spy := Spy())
    assert spy.snapshots[12] == (12,)
    assert count(messages, "room for one snapshot only") == (rank.index == 0)


class Splits(Callback):
    """Gives one parameter a group of its own before a step, as callbacks that unfreeze do."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            (optimizer,) = trainer.optimizers
            optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})


class NoScheduler(Faulty):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@on_ranks(2)
def test_snapshots_of_another_layout_are_dropped_and_the_next_step_is_kept(rank: Rank) -> None:
    rollback = watch(snapshot_every_n_steps=5)
    messages = train(rank, NoScheduler(nan_loss=(7, 10), rank=1), 12, Splits(), rollback)
    assert told(rollback) == [(7, "skipped", None), (10, "rolled back", 9)]
    assert count(messages, "are not those of the snapshots any more: the last was taken w") == (rank.index == 0)
    with pytest.raises(RuntimeError, match="no snapshot to go back to at step 7"):
        train(rank, NoScheduler(nan_loss=(7,), rank=1), 9, Splits(), watch(on_no_snapshot="raise"))


@on_ranks(2)
def test_no_snapshot_while_replicas_differ(rank: Rank) -> None:
    spy = Spy()
    desync = inject("desync", step=3, rank=1)
    messages = train(rank, NoScheduler(), 9, ResidualResync(every_n_steps=6), desync, watch(), spy)
    assert [spy.snapshots[step] for step in (4, 5, 6, 7)] == [(), (), (), (7,)]
    assert count(messages, "no snapshot while parameters or optimizer state differ") == (rank.index == 0)


@on_ranks(1, timeout_s=200)
def test_rollbacks_with_64_healthy_steps_and_a_new_snapshot_between_do_not_add_up(rank: Rank) -> None:
    rollback = watch()
    train(rank, Faulty(nan_loss=(5, 6, 7, 74, 75, 76)), 78, rollback)
    assert [action for _, action, _ in told(rollback)] == ["rolled back"] * 6
    assert (rollback.num_rollbacks, rollback.total_rollbacks) == (3, 6)


@pytest.mark.parametrize(("num_healthy", "has_new"), [(63, True), (64, False), (64, True)])
def test_count_goes_back_only_with_both_64_healthy_steps_and_a_new_snapshot(num_healthy: int, has_new: bool) -> None:
    ledger = RollbackLedger(RollbackSettings())
    record = RollbackRecord(5, 0, 5, "loss nan", "skipped")
    for _ in range(3):
        ledger.count(record, has_snapshot=False)
        ledger.note_batch(is_healthy=False)
    if has_new:
        ledger.note_confirmed()
    for _ in range(num_healthy):
        ledger.note_batch(is_healthy=True)
        ledger.note_batch(is_healthy=None)
    assert ledger.total == 3
    if num_healthy == 64 and has_new:
        assert ledger.in_a_row == 0
    else:
        with pytest.raises(RuntimeError, match=r"64 healthy steps and a new snapshot .*\n.*\n(.*\n)*.*on purpose"):
            ledger.count(record, has_snapshot=True)


@on_ranks(1)
def test_a_second_fit_counts_from_zero(rank: Rank) -> None:
    rollback = watch()
    for _ in range(2):
        train(rank, Faulty(nan_loss=(1, 2)), 4, rollback)
        assert (len(rollback.history), rollback.num_rollbacks, rollback.total_rollbacks) == (2, 2, 2)


class Raised(Faulty):
    """The loss is multiplied from a step on."""

    factor, begin = 1.0, 100

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (self.factor if self.global_step >= self.begin else 1.0)


@on_ranks(1, timeout_s=200)
def test_a_loss_of_8_times_from_now_on_is_a_new_level(rank: Rank) -> None:
    rollback, spy, module = watch(), Spy(), Raised()
    module.factor = 8.0
    messages = train(rank, module, 136, rollback, spy)
    assert count(messages, "which is the level from now on") == 1
    assert len(rollback.history) == 31
    assert rollback.total_rollbacks == 2
    assert spy.snapshots[132][-1] == 132  # at once


@on_ranks(1)
def test_an_exception_releases_snapshots_and_losses(rank: Rank) -> None:
    rollback, module = watch(), Faulty(nan_loss=(5, 6, 7, 8))
    with pytest.raises(RuntimeError, match="gives up"):
        train(rank, module, 9, rollback)
    assert rollback._snapshots is None
    assert not module.loss.wants_directions


class HandsInTwice(Faulty):
    """Hands in directions before each of two optimizers, of which the first is held."""

    def __init__(self, rollback: CosineRollback) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rollback = [rollback]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.manual_backward(self.compute_loss(batch) * torch.nan)
        for optimizer in self.optimizers():
            self.rollback[0].hand_in(torch.ones(2), torch.ones(2))
            optimizer.step()

    @override
    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        rest = [*self.text.parameters(), *self.loss.parameters()]
        return [torch.optim.SGD(p, lr=0.1) for p in (list(self.image.parameters()), rest)]


@on_ranks(1)
def test_directions_of_a_step_that_is_held_are_not_left_for_the_next(rank: Rank) -> None:
    rollback = watch()
    train(rank, HandsInTwice(rollback), 1, rollback)
    assert len(rollback.history) == 1
    assert rollback._sums.pop([]) is None


@on_ranks(1)
def test_overflow_without_end_is_told_of_once(rank: Rank) -> None:
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
    rollback = watch()
    messages = train(rank, Faulty(nan_gradient=range(22)), 24, rollback, plugins=[precision])
    assert rollback.history == []
    assert count(messages, "overflowed in 20 steps in a row") == 1
