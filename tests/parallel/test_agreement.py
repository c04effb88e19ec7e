import pytest

from lightning_moeclip.parallel.agreement import gather_objects, raise_together, together
from lightning_moeclip.testing import Rank, on_ranks


class BatchTooOdd(ValueError):
    pass


def errors_of(kind: str, failing: set[int], rank: int) -> Exception | None:
    kinds = {"ValueError": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError, "own": BatchTooOdd}
    return kinds[kind](f"bad width {rank}") if rank in failing else None


def test_one_process_gets_its_own_value() -> None:
    assert gather_objects({"a": 1}) == [{"a": 1}]


def test_one_process_raises_its_own_error() -> None:
    raise_together(None)
    with pytest.raises(KeyError, match="planted"):
        raise_together(KeyError("planted"))


@on_ranks(2)
def test_every_rank_sees_all_values_in_rank_order(rank: Rank) -> None:
    assert gather_objects("x" * (1 + 5 * rank.index)) == ["x", "xxxxxx"]


@pytest.mark.parametrize("kind", ["ValueError", "TypeError", "RuntimeError"])
@on_ranks(2)
def test_other_ranks_raise_the_type_and_name_the_rank(rank: Rank, kind: str) -> None:
    message = "^bad width 1$" if rank.index == 1 else "^rank 1: bad width 1$"
    with pytest.raises(Exception, match=message) as caught:
        raise_together(errors_of(kind, {1}, rank.index))
    assert type(caught.value).__name__ == kind


@on_ranks(2)
def test_a_type_of_the_user_stays_his_and_is_named_elsewhere(rank: Rank) -> None:
    message = "^bad width 0$" if rank.index == 0 else "^rank 0: BatchTooOdd: bad width 0$"
    with pytest.raises(Exception, match=message) as caught:
        raise_together(errors_of("own", {0}, rank.index))
    assert type(caught.value) is (BatchTooOdd if rank.index == 0 else RuntimeError)


@on_ranks(3)
def test_all_failing_ranks_are_named(rank: Rank) -> None:
    with pytest.raises(ValueError, match="bad width") as caught:
        raise_together(errors_of("ValueError", {0, 2}, rank.index))
    if rank.index == 1:
        assert str(caught.value) == "rank 0: bad width 0\nrank 2: bad width 2"


@on_ranks(2)
def test_without_errors_all_ranks_go_on(rank: Rank) -> None:
    raise_together(None)
    assert gather_objects(rank.index) == [0, 1]


@on_ranks(2)
def test_what_the_body_raises_on_one_rank_is_raised_on_all(rank: Rank) -> None:
    with pytest.raises(IndexError if rank.index == 0 else RuntimeError, match="list index out of range"), together():
        _ = [0][1 - rank.index]
    with together():
        pass
    assert gather_objects(rank.index) == [0, 1]
