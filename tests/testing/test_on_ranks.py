import pytest
import torch
import torch.distributed as dist

from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed


@on_ranks(2)
def sum_of_ranks(rank: Rank) -> float:
    total = torch.tensor(float(rank.index + 1))
    dist.all_reduce(total)
    return total.item()


@on_ranks(2)
def fails_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        raise KeyError("planted")


@on_ranks(2, timeout_s=4.0)
def hangs_on_rank_0(rank: Rank) -> None:
    if rank.index == 0:
        dist.barrier()


def test_every_rank_returns_its_value() -> None:
    assert sum_of_ranks.launch() == [3.0, 3.0]


def test_failure_names_the_rank_and_its_error() -> None:
    with pytest.raises(RanksFailed, match="planted") as caught:
        fails_on_rank_1()
    assert list(caught.value.failures) == [1]


def test_hang_is_ended_and_reported() -> None:
    with pytest.raises(RanksFailed) as caught:
        hangs_on_rank_0()
    assert 0 in caught.value.failures


@pytest.mark.parametrize("value", [1.5])
@on_ranks(2)
def test_arguments_reach_the_body(rank: Rank, value: float) -> None:
    assert value == 1.5
    assert dist.get_rank() == rank.index
