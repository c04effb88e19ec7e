"""Ranks with different numbers of batches, also where nobody knows them before: one error on all ranks, no deadlock."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_moeclip.binding import Callback, Trainer
from lightning_moeclip.parallel.watch import FailureWatch
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, quiet_trainer, share

NUM_BATCHES = 5


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, data: list) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def stream(rank: Rank, num_batches: int) -> DataLoader:
    rows = [8 // rank.world_size] * rank.world_size
    return DataLoader(Stream(share(batches(num_batches), rows, rank.index)), batch_size=None)


class LogsOnAllRanks(Callback):
    """What pytorch-lightning#19604 is about: a collective of a callback at the end of each batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.log("step", float(trainer.global_step), sync_dist=True, batch_size=1)


class Manual(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        # past the strategy: the reducer ends it
        self.compute_loss(batch).backward()
        optimizer.step()

    def on_train_batch_end(self, *args: object) -> None:
        pass


class Dense(TwoTowers):
    """Without layers and losses that communicate."""

    def __init__(self) -> None:
        super().__init__(has_own_moe=False)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.image(batch[0]) - self.text(batch[1])).pow(2).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.compute_loss(batch)

    def on_train_batch_end(self, *args: object) -> None:
        pass


def told_by_fit(rank: Rank, num_batches: int, kind: type[TwoTowers] = TwoTowers, **settings: Any) -> str:
    trainer = quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=2),
        callbacks=[LogsOnAllRanks()],
        **settings,
    )
    try:
        trainer.fit(kind(), stream(rank, num_batches))
    except RuntimeError as error:
        return f"{trainer.global_step} {error}"
    return f"{trainer.global_step}"


@on_ranks(2)
def unequal(rank: Rank) -> list[str]:
    told = [
        told_by_fit(rank, [3, 5][rank.index]),
        told_by_fit(rank, [5, 3][rank.index]),
        told_by_fit(rank, [3, 5][rank.index], Manual),
        # whoever stops before the shortest ends is right
        told_by_fit(rank, [3, 5][rank.index], max_steps=3),
        told_by_fit(rank, [3, 5][rank.index], limit_train_batches=3, max_epochs=2),
        told_by_fit(rank, 3, max_epochs=2),
    ]
    dist.barrier()
    return told


def test_case_30_callback_that_logs_and_streams_of_3_and_5_batches_end_with_one_error_on_both_ranks() -> None:
    first, second = unequal.launch()
    assert first == second
    message = "different numbers of training batches"
    assert f"3 The ranks have {message} (rank 0: 3, rank 1: more than 3), and each" in first[0]
    assert f"3 The ranks have {message} (rank 0: more than 3, rank 1: 3), and each" in first[1]
    assert f"3 The ranks have {message} (rank 0: 3, rank 1: more than 3), and each" in first[2]
    assert "Trainer(limit_train_batches=...)" in first[0]
    assert first[3:] == ["3", "6", "6"]


@on_ranks(2)
def unequal_while_accumulating(rank: Rank, folder: str, kind: str) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)
    # where a rank raises, the watch must not come first
    model, grace_s = {"exchange": (TwoTowers, 0.5), "dense": (Dense, 60.0)}[kind]
    FailureWatch.__init__.__kwdefaults__["grace_s"] = grace_s
    trainer = quiet_trainer(2, accumulate_grad_batches=2)
    trainer.fit(model(), stream(rank, 4))
    assert trainer.global_step == 2
    trainer = quiet_trainer(2, accumulate_grad_batches=2)
    trainer.fit(model(), stream(rank, [3, 5][rank.index]))


@pytest.mark.parametrize("kind", ["exchange", "dense"])
def test_stream_that_ends_while_others_accumulate_ends_the_run_with_the_reason(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        unequal_while_accumulating.launch(folder=str(tmp_path), kind=kind)
    reason = {
        # each waits for the other in another collective: the watch ends both
        "exchange": r"different numbers of training batches \(rank 0: 3, rank 1: more than 3\)",
        # rank 0 steps on its last batch, and its reduction meets that of rank 1's next batch
        "dense": r"The ranks reduce gradients of different steps: .*The loaders of ranks \[0\] have ended",
    }[kind]
    for rank in range(2):
        told = caught.value.failures[rank] + (tmp_path / f"{rank}.err").read_text()
        assert re.search(reason, told), told
        assert "still running" not in told
