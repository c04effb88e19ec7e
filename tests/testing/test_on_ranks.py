import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.processes import hold_or_wait


@on_ranks(2)
def sum_of_ranks(rank: Rank) -> float:
    total = torch.tensor(float(rank.index + 1))
    dist.all_reduce(total)
    return total.item()


@on_ranks(2)
def fails_on_rank_1(rank: Rank) -> None:
    dist.barrier()  # the other rank has not much to do any more
    if rank.index == 1:
        raise KeyError("planted")


@on_ranks(2, timeout_s=1.0)
def hangs_on_rank_0(rank: Rank) -> None:
    if rank.index == 0:
        time.sleep(60.0)


@on_ranks(2)
def is_ended_on_rank_1(rank: Rank, folder: str, exit_code: int) -> None:
    if rank.index == 1:
        hold_or_wait(folder)
        dist.barrier()
        os._exit(exit_code)
    dist.barrier()
    hold_or_wait(folder)


@on_ranks(2)
def fails_on_rank_0_and_rank_1_asks_the_store(rank: Rank, folder: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank.index == 0:
        store.set("cause", "planted")
        hold_or_wait(folder)
    dist.barrier()
    if rank.index == 0:
        raise KeyError("planted")
    hold_or_wait(folder)
    raise ValueError(f"rank 0 left {store.get('cause')}")


@on_ranks(2)
def test_body_may_leave_the_group_and_join_another_at_the_same_address(rank: Rank) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor(float(rank.index + 1))
    dist.all_reduce(total)
    assert total == 3.0


def test_every_rank_returns_its_value() -> None:
    assert sum_of_ranks.launch() == [3.0, 3.0]


def test_failure_names_the_rank_and_its_error() -> None:
    with pytest.raises(RanksFailed, match="planted") as caught:
        fails_on_rank_1()
    assert list(caught.value.failures) == [1]


def test_hang_is_ended_and_reported() -> None:
    with pytest.raises(RanksFailed) as caught:
        hangs_on_rank_0()
    assert caught.value.failures[0].startswith("still running: most likely in a collective")


@pytest.mark.parametrize("exit_code", [0, 3])
def test_rank_that_ends_without_a_word_is_not_waited_for(exit_code: int, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        is_ended_on_rank_1(folder=str(tmp_path), exit_code=exit_code)
    assert caught.value.failures == {1: f"ended with exit code {exit_code}"}


def test_store_outlives_rank_0(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        fails_on_rank_0_and_rank_1_asks_the_store(folder=str(tmp_path))
    assert "KeyError: 'planted'" in caught.value.failures[0]
    assert "ValueError: rank 0 left b'planted'" in caught.value.failures[1]


@pytest.mark.parametrize("value", [1.5])
@on_ranks(2)
def test_arguments_reach_the_body(rank: Rank, value: float) -> None:
    assert value == 1.5
    assert dist.get_rank() == rank.index
