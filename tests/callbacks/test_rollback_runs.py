"""What a rollback leaves as it is: the order of data, counts of the run, ranks that agree when memory runs out."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moeclip.binding import Callback, Trainer, pl
from lightning_moeclip.callbacks import snapshots
from lightning_moeclip.callbacks.cosine_rollback import CosineRollback
from lightning_moeclip.callbacks.rollback_ledger import RollbackLedger
from lightning_moeclip.callbacks.rollback_record import RollbackRecord
from lightning_moeclip.callbacks.rollback_settings import RollbackSettings
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.state import host_copy
from lightning_moeclip.state.random_numbers import random_states, set_random_states
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.rolled_back import Faulty, Spy, differing
from tests.models import batches, loader, quiet_trainer, share

ROWS = {1: (6,), 2: (4, 2)}


def watch(**arguments: Any) -> CosineRollback:
    """One for which every cosine of a tiny model is good enough."""
    return CosineRollback(**{"good": -0.9, "low": -0.95, "snapshot_every_n_steps": 4, **arguments})


def rows(rank: Rank, num: int) -> DataLoader:
    return loader(share(batches(num, num_rows=6), ROWS[rank.world_size], rank.index))


def told(rollback: CosineRollback) -> list[tuple[int, str, int | None]]:
    return [(record.step, record.action, record.restored_step) for record in rollback.history]


class Ordered(Faulty):
    """Keeps the order of its batches by epoch; its random numbers are those of dropout, or none."""

    def __init__(self, *, has_dropout: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.dropout = nn.Dropout(0.2 if has_dropout else 0.0)
        self.data = share(batches(6, num_rows=6), ROWS[1], 0)
        self.orders: dict[int, list[int]] = {}

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.orders.setdefault(self.current_epoch, []).append(int(batch))
        return super().training_step(self.data[int(batch)], batch_idx)


def orders(nan_loss: tuple[int, ...], spy: Spy, *, has_dropout: bool) -> tuple[list[list[int]], CosineRollback]:
    torch.manual_seed(0)
    module, rollback = Ordered(has_dropout=has_dropout, nan_loss=nan_loss), watch()
    trainer = quiet_trainer(1, callbacks=[rollback, spy], max_epochs=5)
    trainer.fit(module, DataLoader(range(6), batch_size=None, shuffle=True))
    return list(module.orders.values()), rollback


@on_ranks(1)
def test_epochs_after_a_rollback_over_their_border_have_orders_of_their_own(rank: Rank) -> None:
    warnings.simplefilter("ignore", UserWarning)
    healthy, _ = orders((), Spy(), has_dropout=False)
    # from the second epoch into the first, two times, and from the fourth into the third
    found, rollback = orders((7, 8, 19), spy := Spy(), has_dropout=False)
    assert told(rollback) == [(7, "rolled back", 4), (8, "rolled back", 4), (19, "rolled back", 16)]
    assert found[:2] == healthy[:2]
    assert len({tuple(order) for order in found}) == len({tuple(order) for order in healthy}) == 5
    assert not differing(spy.after[4], spy.after[9])
    assert not differing(spy.after[16], spy.after[20])


@on_ranks(1)
def test_dropout_goes_back_with_the_step_though_the_next_order_does_not(rank: Rank) -> None:
    warnings.simplefilter("ignore", UserWarning)
    found, rollback = orders((7,), spy := Spy(), has_dropout=True)
    assert told(rollback) == [(7, "rolled back", 4)]
    assert not differing(spy.after[4], spy.after[8])
    assert "torch" in differing(spy.after[4], spy.after[5])
    assert len({tuple(order) for order in found}) == 5


class Draws(Callback):
    """What each generator of the host draws when an epoch begins; given after the callback that it looks at."""

    def __init__(self) -> None:
        self.drawn: list[list[float]] = []

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        state = random_states()
        self.drawn.append([random.random(), float(np.random.rand()), torch.rand(1).item()])
        set_random_states(state)


@on_ranks(2)
def test_every_generator_of_the_host_goes_another_way_alike_on_ranks_that_were_alike(rank: Rank) -> None:
    warnings.simplefilter("ignore", UserWarning)
    draws, module = Draws(), Faulty(nan_loss=(6,), rank=1)
    module.dropout = nn.Dropout(0.0)
    pl.seed_everything(0, verbose=False)
    quiet_trainer(2, callbacks=[watch(), draws], max_epochs=4).fit(module, rows(rank, 5))
    assert draws.drawn[0] == draws.drawn[1]  # nothing draws within the first epoch
    assert all(a != b for a, b in zip(draws.drawn[1], draws.drawn[2], strict=True))
    assert draws.drawn[2][:2] == draws.drawn[3][:2]  # once; of torch's, the loader draws one when an epoch begins
    assert gather_objects(draws.drawn) == [draws.drawn] * 2


@on_ranks(2)
def test_a_second_fit_of_one_trainer_goes_on_counting_and_another_trainer_begins_anew(rank: Rank) -> None:
    warnings.simplefilter("ignore", UserWarning)
    rollback, module = watch(), Faulty(nan_loss=(5, 9, 10, 11), rank=1)
    trainer = quiet_trainer(2, callbacks=[rollback])
    trainer.fit(module, rows(rank, 7))
    assert told(rollback) == [(5, "rolled back", 4)]
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(RuntimeError, match=r"gives up after 3 rollbacks.*step 11 .*\n.*step 5 \(epoch 0, batch 5\)"):
        trainer.fit(module, rows(rank, 7))
    assert [record.step for record in rollback.history] == [5, 9, 10]
    assert rollback.total_rollbacks == 4
    quiet_trainer(2, callbacks=[rollback]).fit(Faulty(nan_loss=(5,), rank=1), rows(rank, 7))
    assert told(rollback) == [(5, "rolled back", 4)]
    assert (rollback.num_rollbacks, rollback.total_rollbacks) == (1, 1)


def test_a_count_from_a_checkpoint_knows_of_no_random_numbers_that_came_back() -> None:
    ledger = RollbackLedger(RollbackSettings())
    ledger.count(RollbackRecord(5, 0, 5, "loss nan", "rolled back", 4), has_snapshot=True)
    ledger.note_restored()
    kept = ledger.state_dict()
    assert (ledger.pop_restored(), ledger.pop_restored()) == (1, 0)
    ledger.note_restored()
    ledger.load_state_dict(kept)
    assert (ledger.total, ledger.pop_restored()) == (1, 0)


@on_ranks(2)
def test_memory_that_runs_out_on_one_rank_is_told_and_no_rank_keeps_that_snapshot(rank: Rank) -> None:
    allocate = host_copy._allocate

    def refuse(size: int, tensors: Any) -> Tensor:
        if rank.index == 1 and trainer.global_step in (8, 12):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: ...")
        return allocate(size, tensors)

    spy, module = Spy(), Faulty(nan_loss=(10,), rank=1)
    rollback = watch()
    trainer = quiet_trainer(2, callbacks=[rollback, spy])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr(host_copy, "_allocate", refuse)
        warnings.simplefilter("always")
        trainer.fit(module, rows(rank, 18))
    messages = [str(w.message) for w in caught if "no host memory" in str(w.message)]
    assert len(messages) == (rank.index == 0)
    assert all(m.startswith("CosineRollback, step 8: There is no host memory for the") for m in messages)
    assert told(rollback) == [(10, "rolled back", 4)]
    assert [spy.snapshots[step] for step in (8, 12, 16)] == [(4,), (4,), (4, 16)]


@on_ranks(2)
def test_memory_that_runs_out_while_a_rank_looks_for_nan_is_told_and_no_rank_keeps_that_snapshot(rank: Rank) -> None:
    def refuse(*_: Any) -> list[str]:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: ...")

    spy, rollback = Spy(), watch()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank.index == 1:
            patch.setattr(snapshots, "not_finite", refuse)
        quiet_trainer(2, callbacks=[rollback, spy]).fit(Faulty(), rows(rank, 6))
    assert sum("no host memory" in str(w.message) for w in caught) == (rank.index == 0)
    assert spy.snapshots[4] == ()


@on_ranks(2)
def test_snapshots_damaged_on_one_rank_or_another_end_the_run_on_all(rank: Rank) -> None:
    class Damages(Callback):
        @override
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 9:
                kept = rollback._snapshots._ring._snapshots
                kept[rank.index].values.buffer[9] ^= 4

    rollback = watch()
    trainer = quiet_trainer(2, callbacks=[rollback, Damages()])
    message = r"no snapshot that is whole on every rank.*damaged in memory\. Resume from a checkpoint"
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(Faulty(nan_loss=(9,), rank=1), rows(rank, 11))


class Graph(Faulty):
    """A sparse buffer of each kind, and a complex parameter, which all move."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sparse tensors are young
            self.register_buffer("coo", torch.eye(3).to_sparse())
            self.register_buffer("csr", torch.eye(3).to_sparse_csr())
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 2 + 0j], dtype=torch.complex128))

    @property
    def inside(self) -> dict[str, Tensor]:
        return {"coo": self.coo.to_dense(), "csr": self.csr.to_dense(), "phase": self.phase.detach().clone()}

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + self.phase.abs().square().sum()
        self.coo._values().add_(1.0)
        self.csr.values().add_(1.0)
        return loss


class Inside(Callback):
    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.after[trainer.global_step] = pl_module.inside


@on_ranks(2)
def test_sparse_buffers_and_complex_parameters_go_back_on_all_ranks(rank: Rank) -> None:
    warnings.simplefilter("ignore", UserWarning)
    rollback, inside = watch(), Inside()
    quiet_trainer(2, callbacks=[rollback, inside]).fit(Graph(nan_loss=(6,), rank=1), rows(rank, 8))
    assert told(rollback) == [(6, "rolled back", 4)]
    for name, value in inside.after[4].items():
        assert torch.equal(value, inside.after[7][name]), name
        assert not torch.equal(value, inside.after[6][name]), name


@on_ranks(1)
def test_buffer_that_no_snapshot_can_hold_is_refused_before_the_first_step(rank: Rank) -> None:
    module = Faulty()
    module.text.register_buffer("odd", torch.ones(3).to_mkldnn())
    trainer = quiet_trainer(1, callbacks=[watch()])
    with pytest.raises(TypeError, match=r"buffers/text\.odd is a tensor of torch\._mkldnn"):
        trainer.fit(module, rows(rank, 2))
    assert trainer.global_step == 0


class Thins(Faulty):
    """Has a sparse buffer whose number of elements is another in each step."""

    def __init__(self) -> None:
        super().__init__(nan_loss=(6,))
        self.register_buffer("adjacency", torch.eye(2).to_sparse())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.adjacency = torch.eye(batch_idx + 2).to_sparse()


def test_a_buffer_that_no_snapshot_fits_any_more_is_named() -> None:
    rollback = watch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(1, callbacks=[rollback]).fit(Thins(), loader(batches(8, num_rows=6)))
    messages = [str(w.message) for w in caught]
    assert sum("the last was taken without buffers/adjacency (sparse_coo [8, 8]" in m for m in messages) == 1
    assert told(rollback) == [(6, "skipped", None)]
