"""Ranks that fail, are told to end or come late while callbacks of the other ranks wait for them in a collective."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.watch import POLL_S, FailureWatch
from lightning_moeclip.testing import Rank, inject, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.launch.watchful import BAD_STEP, Watchful
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

NUM_BATCHES = 6


class UserError(Exception):
    pass


def fail() -> None:
    raise UserError("my own bug")


def fail_in_a_moment() -> None:
    time.sleep(0.5)  # the others wait already
    fail()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def own_batches(rank: Rank) -> Any:
    rows = [8 // rank.world_size] * rank.world_size
    return loader(share(batches(NUM_BATCHES), rows, rank.index))


def fit(rank: Rank, *callbacks: Any, kind: type[TwoTowers] = TwoTowers) -> Any:
    trainer = quiet_trainer(rank.world_size, callbacks=list(callbacks))
    trainer.fit(kind(), own_batches(rank))
    return trainer


class ModuleFails(TwoTowers):
    """A hook of the module itself raises on one rank; the others do not wait there but in what comes next."""

    bad_rank = 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank == self.bad_rank and self.trainer.global_step == BAD_STEP:
            fail_in_a_moment()


@on_ranks(2)
def of_two(rank: Rank, folder: str, bad: int, where: str) -> None:
    fail_on(rank, folder, bad, where)


@on_ranks(4)
def of_four(rank: Rank, folder: str, bad: int, where: str) -> None:
    fail_on(rank, folder, bad, where)


def fail_on(rank: Rank, folder: str, bad: int, where: str) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)
    if where == "module":
        ModuleFails.bad_rank = bad
        fit(rank, Watchful(-1, fail), kind=ModuleFails)
    else:
        fit(rank, Watchful(bad, fail_in_a_moment, where=where))


@pytest.mark.parametrize(
    ("body", "bad", "where"),
    [(of_two, 0, "in"), (of_two, 1, "after"), (of_two, 0, "module"), (of_four, 0, "after"), (of_four, 2, "in")],
)
def test_case_31_error_of_any_rank_in_a_hook_ends_the_ranks_that_wait_in_a_sum_of_callbacks(
    body: Any, bad: int, where: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as caught:
        body.launch(folder=str(tmp_path), bad=bad, where=where)
    failures = caught.value.failures
    assert "UserError: my own bug" in failures[bad]
    assert len(failures) == (2 if body is of_two else 4)
    for other in failures.keys() - {bad}:
        # a traceback where the closed connection was seen first, and what the watch wrote where it was not
        told = failures[other] + (tmp_path / f"{other}.err").read_text()
        assert f"rank {bad} failed with UserError: my own bug" in told
        assert "still running" not in told


@on_ranks(4)
def told_to_end(rank: Rank, bad: int) -> tuple[list[int], int, bool]:
    callback = Watchful(bad, terminate)
    trainer = quiet_trainer(4, callbacks=[callback])
    with pytest.raises(SystemExit) as caught:
        trainer.fit(TwoTowers(), own_batches(rank))
    assert type(caught.value).__name__ == "SIGTERMException"
    return gather_objects(trainer.global_step), callback.num_held, trainer.strategy.has_failed


@pytest.mark.parametrize("bad", [0, 2])
def test_case_32_sigterm_to_any_rank_of_four_in_a_hook_ends_all_after_the_same_step(bad: int) -> None:
    for steps, num_held, has_failed in told_to_end.launch(bad=bad):
        # told in the step after the signal, with which the flag travels
        assert steps == [BAD_STEP + 2] * 4
        assert num_held == 1
        assert not has_failed


@on_ranks(2)
def late(rank: Rank) -> tuple[int, int, bool]:
    FailureWatch.__init__.__kwdefaults__["grace_s"] = 0.1
    callback = Watchful(0, lambda: None)
    trainer = fit(rank, inject("stall", BAD_STEP, 1, seconds=4 * POLL_S), callback)
    return trainer.global_step, callback.num_held, trainer.strategy.has_failed


def test_a_rank_that_comes_late_to_a_sum_is_waited_for_and_nobody_is_ended() -> None:
    assert late.launch() == [(NUM_BATCHES, 1, False)] * 2
