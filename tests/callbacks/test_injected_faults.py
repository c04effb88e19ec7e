"""All callbacks together, and one injected fault: it is found, mended or ended, and the run is what it should be."""

import warnings
from typing import Any

import pytest
import torch

from lightning_moeclip.binding import Callback
from lightning_moeclip.callbacks import CosineRollback, ExpertLoadMonitor, ResidualResync, VarianceHeatmap
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, inject, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

CHECK_EVERY = 2
ROWS = {2: [5, 3], 4: [4, 2, 1, 1]}


class Keep(Callback):
    """Parameters of this rank after every batch, and which steps were held."""

    def __init__(self) -> None:
        self.parameters: list[dict[str, torch.Tensor]] = []
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.parameters.append({n: p.detach().clone() for n, p in module.named_parameters()})
        if trainer.strategy.report.verdict.holds_step:
            self.held.append(trainer.global_step - 1)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.last = {n: p.detach().clone() for n, p in module.named_parameters()}
        self.metrics = {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("grad_residual/")}


def run(rank: Rank, *faults: Callback, folder: Any, num_batches: int = 6, ep: int = 1) -> tuple[Keep, CosineRollback]:
    warnings.simplefilter("ignore", UserWarning)
    rollback = CosineRollback(good=-0.9, low=-0.95, snapshot_every_n_steps=20)
    keep = Keep()
    quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        callbacks=[
            *faults, VarianceHeatmap(), ResidualResync(every_n_steps=CHECK_EVERY), rollback, ExpertLoadMonitor(), keep,
        ],
        default_root_dir=folder,
    ).fit(TwoTowers(), loader(share(batches(num_batches), ROWS[rank.world_size], rank.index)))  # fmt: skip
    return keep, rollback


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@on_ranks(2, timeout_s=100)
def test_desync_on_either_rank_of_2_is_mended_at_the_next_check(rank: Rank, tmp_path: Any) -> None:
    clean, _ = run(rank, folder=tmp_path)
    # before step 2 and before step 4 replicas are compared: the step before is the last of its window
    moved, _ = run(rank, inject("desync", step=1, rank=1), folder=tmp_path)
    assert_equal(moved.last, clean.last)
    assert moved.metrics["grad_residual/resyncs"] == 1.0
    assert clean.metrics["grad_residual/resyncs"] == 0.0
    # of two replicas nobody knows which is right: rank 0 wins, and both are the same again
    first, _ = run(rank, inject("desync", step=1, rank=0), folder=tmp_path)
    assert first.metrics["grad_residual/resyncs"] == 1.0
    for told in gather_objects(first.last):
        assert_equal(first.last, told)


@on_ranks(4, timeout_s=150)
def test_desync_of_a_dense_and_an_expert_parameter_on_4_ranks_is_mended(rank: Rank, tmp_path: Any) -> None:
    clean, _ = run(rank, folder=tmp_path, num_batches=3, ep=2)
    for faulty in range(4):
        moved, _ = run(rank, inject("desync", step=1, rank=faulty), folder=tmp_path, num_batches=3, ep=2)
        assert_equal(moved.last, clean.last)  # three of four are the majority
    for faulty in (2, 3):  # an expert has two replicas, of which the lower rank wins
        fault = inject("desync", step=1, rank=faulty, parameter="image.moe.w_in")
        moved, _ = run(rank, fault, folder=tmp_path, num_batches=3, ep=2)
        assert_equal(moved.last, clean.last)
        assert moved.metrics["grad_residual/resyncs"] == 1.0


@on_ranks(2, timeout_s=100)
def test_sign_flip_and_dropped_reduction_hold_the_step_within_one_interval(rank: Rank, tmp_path: Any) -> None:
    for fault in ("sign_flip", "drop_reduce"):
        # each in every step of one interval: it is found in the one that is looked at
        planted = [inject(fault, step=step, rank=1) for step in (2, 3)]
        keep, rollback = run(rank, *planted, folder=tmp_path)
        assert keep.held == [2], fault
        assert_equal(keep.parameters[2], keep.parameters[1])
        assert not rollback.history
        # what the unseen fault of step 3 did to the replicas is mended before step 4
        assert keep.metrics["grad_residual/resyncs"] > 0
        for told in gather_objects(keep.last):
            assert_equal(keep.last, told)


@on_ranks(2, timeout_s=100)
def test_nan_and_spiked_gradients_roll_back_to_the_snapshot(rank: Rank, tmp_path: Any) -> None:
    for fault in ("nan_grad", "scale_grad"):
        keep, rollback = run(rank, inject(fault, step=85, rank=1), folder=tmp_path, num_batches=88)
        (record,) = rollback.history
        assert (record.step, record.action, record.restored_step) == (85, "rolled back", 80)
        assert keep.held == [85]
        assert_equal(keep.parameters[85], keep.parameters[79])


@on_ranks(2, timeout_s=100)
def test_a_rank_that_stalls_changes_nothing(rank: Rank, tmp_path: Any) -> None:
    clean, _ = run(rank, folder=tmp_path, num_batches=3)
    late, rollback = run(rank, inject("stall", step=1, rank=1, seconds=0.5), folder=tmp_path, num_batches=3)
    assert_equal(late.last, clean.last)
    assert not rollback.history
    assert not late.held


@on_ranks(2, timeout_s=100)
def fails(rank: Rank, folder: Any) -> None:
    run(rank, inject("exception", step=1, rank=1), folder=folder)


def test_an_injected_exception_ends_all_ranks_with_its_name(tmp_path: Any) -> None:
    with pytest.raises(RanksFailed, match="InjectedFault") as failed:
        fails.launch(folder=tmp_path)
    assert "InjectedFault" in failed.value.failures[1]
