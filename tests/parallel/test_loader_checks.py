"""What ranks are fed: counts that differ are refused, rows that do not are warned of."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_moeclip.parallel.loader_checks import (
    FeedCard,
    check_equal_batch_counts,
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
    assert shares_rows_out(loader) == shares


WARNED = {
    "in order, same rows": (("SequentialSampler", False, 1, 1), r"has a SequentialSampler: the first batch is.*MOE502"),
    "in order, rows unknown": (("SequentialSampler", False, None, None), r"each rank draws from all rows .*MOE502"),
    "shuffled": (("RandomSampler", False, 1, 2), r"has a RandomSampler: each rank draws .* up to 2 times .*MOE502"),
    "a stream, same rows": ((None, False, 1, 1), r"All 2 ranks got the same first batch .*MOE503"),
}


@pytest.mark.parametrize("name", WARNED)
def test_same_rows_are_warned_of_once(name: str) -> None:
    (plain, is_shared_out, first, second), message = WARNED[name]
    with pytest.warns(UserWarning, match=message) as caught:
        warn_of_rows([FeedCard(plain, is_shared_out, rows) for rows in (first, second)])
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("plain", "is_shared_out", "first", "second"),
    [
        (None, False, 1, 2),
        (None, True, 1, 1),  # a dataset of fewer rows than ranks
        (None, False, None, None),
        ("SequentialSampler", False, 1, 2),  # each rank has a dataset of its own
    ],
)
def test_rows_that_differ_or_are_shared_out_are_not(
    plain: str | None, is_shared_out: bool, first: int | None, second: int | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_rows([FeedCard(plain, is_shared_out, rows) for rows in (first, second)])


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
