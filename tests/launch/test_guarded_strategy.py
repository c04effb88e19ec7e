import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.watch import FailureWatch
from lightning_moeclip.strategy import MoEClipStrategy as Strategy
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.processes import hold_or_wait, wait_for


class Model(LightningModule):
    def __init__(self, *, bad_rank: int = -1, act: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.bad_rank = bad_rank
        self.act = act
        self.threads: set[str] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.threads |= {thread.name for thread in threading.enumerate()}
        if self.global_rank == self.bad_rank and batch_idx == 2:
            self.act()
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.global_rank == self.bad_rank and batch_idx == 2:
            self.act()
        if dist.is_initialized():
            dist.barrier()

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(devices: int, **kwargs: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=Strategy(process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **kwargs,
    )


def loader(batches: int = 5) -> DataLoader:
    return DataLoader(torch.ones(2 * batches, 2), batch_size=2)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise KeyError("planted")


@on_ranks(1)
def test_one_process_is_left_as_it_is(rank: Rank) -> None:
    model = Model()
    trainer = trainer_of(1)
    trainer.fit(model, loader())
    assert trainer.global_step == 5
    assert "failure-watch" not in model.threads
    assert not trainer.strategy.has_failed
    assert not trainer.strategy.termination_requested


@on_ranks(2)
def test_two_fits_have_one_watch_at_a_time_and_leave_none(rank: Rank) -> None:
    model = Model()
    trainer = trainer_of(2)
    trainer.fit(model, loader())
    assert "failure-watch" in model.threads
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.global_step == 10
    assert "failure-watch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("bad", [0, 1])
@on_ranks(2)
def test_sigterm_to_one_rank_ends_both_after_the_same_step(rank: Rank, bad: int) -> None:
    trainer = trainer_of(2)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(Model(bad_rank=bad, act=terminate), loader())
    assert type(caught.value).__name__ == "SIGTERMException"
    steps = gather_objects(trainer.global_step)
    # told in the step after the signal when the flag travels with that step's reduction
    assert steps in ([3, 3], [4, 4])
    assert trainer.received_sigterm
    assert trainer.strategy.termination_requested is (rank.index == bad)
    assert not trainer.strategy.has_failed
    dist.barrier()


@on_ranks(2)
def sigterm_in_a_test(rank: Rank, folder: str) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)
    if rank.index == 0:
        hold_or_wait(folder)
    dist.barrier()
    FailureWatch.__init__.__kwdefaults__["grace_s"] = [0.5, 60.0][rank.index]
    trainer = trainer_of(2)
    with pytest.raises(SystemExit):
        trainer.test(Model(bad_rank=1, act=terminate), loader(), verbose=False)
    Path(folder, f"{rank.index}.ended").touch()
    hold_or_wait(folder)  # alive, so that the other rank's collective waits


def test_sigterm_outside_fit_ends_the_rank_that_waits(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        sigterm_in_a_test.launch(folder=str(tmp_path))
    assert caught.value.failures[0] == "ended with exit code 1"
    assert "[rank 0] ended because rank 1 failed with SIGTERMException" in (tmp_path / "0.err").read_text()
    assert (tmp_path / "1.ended").exists()


class BusyOnRank0(Model):
    last_batch = -1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.last_batch = batch_idx
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == 0:
            wait_for(lambda: self.trainer.strategy._watch.seen)
        elif batch_idx == 2:
            fail()


@on_ranks(2)
def test_rank_that_is_not_yet_waiting_raises_at_its_next_batch(rank: Rank) -> None:
    FailureWatch.__init__.__kwdefaults__["grace_s"] = 60.0
    trainer = trainer_of(2)
    model = BusyOnRank0()
    kind, message = (
        (KeyError, "planted") if rank.index == 1 else (RuntimeError, "rank 0 was ended because rank 1 failed with Key")
    )
    with pytest.raises(kind, match=message):
        trainer.fit(model, loader())
    assert trainer.strategy.has_failed
    assert model.last_batch == 1
    # alive until the other has raised: a closed connection would end it too
    dist.barrier()


@on_ranks(2)
def failed_run(rank: Rank, folder: str) -> None:
    FailureWatch.__init__.__kwdefaults__["grace_s"] = 60.0
    trainer = trainer_of(2)
    with pytest.raises((KeyError, RuntimeError)):
        trainer.fit(Model(bad_rank=1, act=fail), loader())
    if rank.index == 1:
        strategy = trainer.strategy
        strategy.barrier()
        assert strategy.broadcast("mine") == "mine"
        assert strategy.reduce(torch.tensor(3.0), reduce_op="sum") == 3.0
        trainer.save_checkpoint(f"{folder}/last.ckpt")


def test_failed_run_waits_for_nobody_and_saves_its_own_shard(tmp_path: Path) -> None:
    failed_run.launch(folder=str(tmp_path))
    assert os.listdir(tmp_path) == ["last.ckpt.rank1"]


@pytest.mark.parametrize("stage", ["fit", "test"])
@on_ranks(2)
def test_unequal_batch_counts_are_refused_on_both_ranks(rank: Rank, stage: str) -> None:
    trainer = trainer_of(2)
    told = rf"{'training' if stage == 'fit' else stage} batches \(rank 0: 4, rank 1: 5\)"
    with pytest.raises(RuntimeError, match=told):
        getattr(trainer, stage)(Model(), loader(4 + rank.index))
    dist.barrier()


class EmptyIsMeant(Model):
    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)


@on_ranks(2)
def test_loaders_that_may_be_empty_are_not_compared(rank: Rank) -> None:
    batches = DataLoader(torch.ones(4 * rank.index, 2), batch_size=2)
    trainer_of(2).test(EmptyIsMeant(), batches, verbose=False)


@on_ranks(2)
def test_start_up_timeout_that_is_no_number_is_refused(rank: Rank) -> None:
    os.environ["MOECLIP_STARTUP_TIMEOUT_S"] = "soon"
    with pytest.raises(ValueError, match=r"MOECLIP_STARTUP_TIMEOUT_S='soon' is not a number\. .* set a number"):
        trainer_of(2).fit(Model(), loader())
