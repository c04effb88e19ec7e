"""What callbacks know of their averages goes back with the weights; numbers of other callbacks go forward."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_moeclip.binding import Callback, Trainer, pl
from lightning_moeclip.callbacks.averages import counters_of_averages
from lightning_moeclip.callbacks.snapshots import AgreedSnapshots
from lightning_moeclip.state.snapshot import LiveState, SnapshotRing, live_state
from tests.models import TwoTowers, batches, loader, quiet_trainer


class Scheduled(TwoTowers):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, 1)]


class ThereAndBack(Callback):
    """A snapshot in one epoch, gone back to in another."""

    def __init__(self, look: Callable[[], Any], *, take: int, restore: int) -> None:
        self.look, self.take, self.restore = look, take, restore
        self.ring = SnapshotRing(max_bytes=2**20)
        self.taken = self.before = self.after = None

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.current_epoch == self.take:
            self.ring.take(live_of(trainer, pl_module), step=trainer.global_step)
            self.taken = self.look()
        if trainer.current_epoch == self.restore:
            self.before = self.look()
            self.ring.restore(live_of(trainer, pl_module))
            self.after = self.look()


def live_of(trainer: Trainer, module: pl.LightningModule) -> LiveState:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    averages = {
        f"{type(callback).__name__}.{name}": value
        for callback in trainer.callbacks
        for name, value in vars(callback).items()
        if isinstance(value, nn.Module)
    }
    live = live_state(module, trainer.optimizers, schedulers=schedulers, averages=averages)
    return replace(live, objects={**counters_of_averages(trainer.callbacks), **live.objects})


def fit(*callbacks: Callback, num_epochs: int) -> None:
    trainer = quiet_trainer(1, callbacks=list(callbacks), max_epochs=num_epochs)
    trainer.fit(Scheduled(), loader(batches(1)))


def test_swa_counts_its_models_anew_after_it_went_back() -> None:
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)

    def look() -> tuple[int, int, bool]:
        assert average.n_averaged is not None
        return average.n_averaged.data_ptr(), int(average.n_averaged), average._initialized

    there_and_back = ThereAndBack(look, take=0, restore=2)
    fit(average, there_and_back, num_epochs=5)
    place = there_and_back.taken[0]
    assert there_and_back.taken == (place, 1, True)
    assert there_and_back.before == (place, 3, True)
    assert there_and_back.after == there_and_back.taken
    assert look() == (place, 3, True)  # with the models of epochs 3 and 4


def test_a_snapshot_from_before_swa_put_in_its_scheduler_is_refused() -> None:
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    swapped = r"without scheduler 0 of torch\..*\.SWALR and with scheduler 0 of torch\.optim\.lr_scheduler\.StepLR"
    with pytest.raises(RuntimeError, match=swapped):
        fit(average, ThereAndBack(lambda: None, take=0, restore=1), num_epochs=3)


class RolledBack(Callback):
    """The snapshots of ``CosineRollback``: one of epoch 0, gone back to in epoch 2."""

    def __init__(self, average: pl.callbacks.StochasticWeightAveraging) -> None:
        self.average = average
        self.snapshots: AgreedSnapshots | None = None

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.current_epoch == 0:
            watched = (lambda: None, lambda _: None)
            self.snapshots = AgreedSnapshots(trainer.strategy, max_bytes=2**20, ranks_per_node=1, watched=watched)
            self.snapshots.take(trainer, pl_module, step=1)
        if trainer.current_epoch == 2:
            assert int(self.average.n_averaged) == 3
            self.snapshots.restore(trainer, pl_module)
            assert int(self.average.n_averaged) == 1


def test_snapshots_of_a_rollback_hold_the_number_of_averaged_models() -> None:
    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    fit(average, RolledBack(average), num_epochs=4)
    assert int(average.n_averaged) == 2


class Counting(pl.callbacks.EMAWeightAveraging):
    """An average of Lightning's with a number of its own."""

    num_updates = 0

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        is_due = super().should_update(step_idx, epoch_idx)
        self.num_updates += is_due
        return is_due


def test_numbers_of_weight_averaging_go_back_but_the_step_of_its_last_update_which_is_of_the_run() -> None:
    average = Counting(decay=0.5)
    there_and_back = ThereAndBack(lambda: (average.num_updates, average._latest_update_step), take=0, restore=2)
    fit(average, there_and_back, num_epochs=3)
    assert (there_and_back.taken, there_and_back.before, there_and_back.after) == ((1, 1), (3, 3), (1, 3))


class Own(Callback):
    """A user's average with numbers of every kind."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weight, self.count, self.is_on, self.best = 0.5, 1, True, None
        self.total: Tensor | None = torch.ones(2, requires_grad=True)
        self.later: Tensor | None = None
        self.names = ["a"]


def change(callback: Own) -> None:
    callback.weight, callback.count, callback.is_on, callback.best = 0.25, 2, False, 3.0
    callback.later = torch.zeros(1)
    callback.names.append("b")
    with torch.no_grad():
        callback.total.fill_(7.0)


def there_and_back(callback: Own) -> None:
    ring, live = SnapshotRing(max_bytes=2**20), LiveState({}, counters_of_averages([callback]))
    ring.take(live, step=0)
    change(callback)
    for _ in range(2):
        ring.restore(live)
        if live.objects:
            with torch.no_grad():
                assert callback.total.tolist() == [1.0, 1.0]
                callback.total.add_(1)
    if live.objects:
        ring.restore(live)


def test_tensors_and_plain_numbers_of_an_own_average_go_back_and_nothing_else() -> None:
    callback = Own(AveragedModel(nn.Linear(2, 2)))
    total = callback.total
    there_and_back(callback)
    assert (callback.weight, callback.count, callback.is_on, callback.best) == (0.5, 1, True, None)
    assert callback.later is None
    assert callback.total is total
    assert total.tolist() == [1.0, 1.0]
    assert callback.names == ["a", "b"]


def test_a_tensor_that_has_gone_or_changed_its_shape_comes_back() -> None:
    callback = Own(AveragedModel(nn.Linear(2, 2)))
    ring, live = SnapshotRing(max_bytes=2**20), LiveState({}, counters_of_averages([callback]))
    ring.take(live, step=0)
    for other in (None, torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
        callback.total = other
        ring.restore(live)
        assert callback.total.tolist() == [1.0, 1.0]
        assert callback.total.dtype is torch.float32


def test_numbers_of_a_callback_that_averages_nothing_go_forward() -> None:
    callback = Own(nn.Linear(2, 2))
    there_and_back(callback)
    assert (callback.weight, callback.count, callback.is_on, callback.best) == (0.25, 2, False, 3.0)
    assert callback.total.tolist() == [7.0, 7.0]
