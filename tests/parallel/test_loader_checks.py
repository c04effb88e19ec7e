"""What ranks are fed: counts that differ are refused, rows that do not are warned of."""

import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_moeclip.parallel.loader_checks import (
    FeedCard,
    check_equal_batch_counts,
    check_equal_stops,
    chosen_rows,
    first_item,
    plain_sampler,
    shares_rows_out,
    warn_of_rows,
)

ROWS = TensorDataset(torch.zeros(6, 1))
INF = float("inf")


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS.tensors[0])


class OwnOrder(SequentialSampler):
    pass


LOADERS: list[tuple[object, str | None, bool]] = [
    (DataLoader(ROWS, batch_size=2), "SequentialSampler", False),
    (DataLoader(ROWS, batch_size=2, shuffle=True), "RandomSampler", False),
    (DataLoader(ROWS, batch_size=2, sampler=DistributedSampler(ROWS, 2, 0)), None, True),
    (DataLoader(ROWS, batch_sampler=BatchSampler(DistributedSampler(ROWS, 2, 0), 2, True)), None, True),
    (DataLoader(ROWS, sampler=DistributedSampler(ROWS, 1, 0)), None, False),
    (DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 1)), None, False),
    (DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 2, True)), "RandomSampler", False),
    (DataLoader(ROWS, batch_sampler=[[0], [1]]), None, False),
    (DataLoader(ROWS, batch_size=2, sampler=SubsetRandomSampler([0, 1])), None, False),
    (DataLoader(ROWS, batch_size=2, sampler=OwnOrder(ROWS)), None, False),
    (DataLoader(ROWS, batch_size=None), None, False),
    (DataLoader(Stream(), batch_size=2), None, False),
    ([torch.zeros(2)], None, False),
]


@pytest.mark.parametrize(("loader", "name", "shares"), LOADERS)
def test_samplers_of_torch_alone_are_plain(loader: object, name: str | None, shares: bool) -> None:
    assert plain_sampler(loader) == name
    assert shares_rows_out(loader, rank=0, world_size=2) == shares


def feeds(
    plain: str | None, rows: Sequence[int | None], data: Sequence[int] = (), shared: bool = False
) -> list[FeedCard]:
    return [FeedCard(plain, shared, row, data[rank] if data else None) for rank, row in enumerate(rows)]


WARNED = {
    "in order, same rows": (
        feeds("SequentialSampler", [1, 1]),
        r"has a SequentialSampler: all 2 ranks got the same first batch, .* different ones\. Give .*MOE502",
    ),
    "in order, rows unknown": (feeds("SequentialSampler", [None, None]), r"each rank draws from all rows .*MOE502"),
    "in order, two ranks": (feeds("SequentialSampler", [1, 2, 1]), r"ranks 0 and 2 got the same first .*MOE502"),
    "shuffled": (
        feeds("RandomSampler", [1, 2], data=[5, 5]),
        r"has a RandomSampler: each rank draws .* 2 times .*, unless each rank has a dataset of its own\..*MOE502",
    ),
    "shuffled, two of three alike": (feeds("RandomSampler", [1, 2, 3], data=[5, 6, 5]), r"each rank draws .*MOE502"),
    "a stream, same rows": (feeds(None, [1, 1]), r"All 2 ranks got the same first batch .*MOE503"),
    "a stream, two of three": (feeds(None, [1, 2, 2]), r"Ranks 1 and 2 got the same first batch .*MOE503"),
    "a stream by node": (
        feeds(None, [1, 2, 1, 2, 1, None]),
        r"Ranks 0, 2 and 4, and ranks 1 and 3 each got the same first batch .*MOE503",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_same_rows_are_warned_of_once(name: str) -> None:
    cards, message = WARNED[name]
    with pytest.warns(UserWarning, match=message) as caught:
        warn_of_rows(cards)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "cards",
    [
        feeds(None, [1, 2]),
        feeds(None, [1, 1], shared=True),  # a dataset of fewer rows than ranks
        feeds(None, [None, None]),
        # each rank has a dataset of its own
        feeds("SequentialSampler", [1, 2]),
        feeds("SequentialSampler", [None, 2], data=[1, 2]),
        feeds("RandomSampler", [1, 2], data=[1, 2]),
    ],
)
def test_rows_that_differ_or_are_shared_out_are_not(cards: list[FeedCard]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_rows(cards)


class Raises(Dataset):
    def __getitem__(self, index: object) -> None:
        raise AssertionError("code of the user's")


class Fingerprinted(Raises):
    _fingerprint = "3f2a"


def test_of_a_dataset_only_what_lies_in_memory_is_looked_at() -> None:
    rows = torch.arange(6.0).view(6, 1)
    assert torch.equal(first_item(Subset(TensorDataset(rows), [3, 4]))[0], rows[:1])
    assert first_item([4, 5]) == [4]
    assert first_item(Raises()) is None
    assert chosen_rows(Raises()) is None
    assert chosen_rows(Fingerprinted()) == "3f2a"
    assert chosen_rows(Subset(Raises(), range(0, 6, 2))) != chosen_rows(Subset(Raises(), torch.arange(1, 6, 2)))


def test_ranks_that_alone_were_told_to_stop_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1 was told to stop .*, the others not, .*MOE501"):
        check_equal_stops([False, True, False], [4, 0, INF])
    with pytest.raises(RuntimeError, match=r"^ranks 0 and 1 were told to stop"):
        check_equal_stops([True, True, False], [0, 0, 4])
    check_equal_stops([True, True], [0, 0])
    check_equal_stops([True, False], [4, 4])  # not before min_epochs
    check_equal_stops([True, False, False], [0, 0, 4])  # there is another reason


@pytest.mark.parametrize(
    ("stage", "rows", "told"),
    [
        ("training", [(0,), (INF,)], r"training batches \(rank 0: 0, rank 1: more than 0\).*limit_train_batches"),
        ("training", [(5,), (INF,)], r"\(rank 0: 5, rank 1: of unknown number\)"),
        ("validation", [(2, 3), (3, 2)], r"\(rank 0: 2 \+ 3, rank 1: 3 \+ 2\).*limit_val_batches.*\[MOE501:"),
        ("test", [(0,), (INF,)], r"test batches \(rank 0: 0, rank 1: of unknown number\).*limit_test_batches"),
    ],
)
def test_different_counts_are_refused(stage: str, rows: list[tuple[float, ...]], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        check_equal_batch_counts(stage, rows)
    check_equal_batch_counts(stage, [rows[0], rows[0]])
