"""Checks of what the ranks are fed: as many batches on each, and not the same rows."""

import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_moeclip.parallel import rules

__all__ = [
    "FeedCard",
    "check_equal_batch_counts",
    "check_equal_ends",
    "check_equal_stops",
    "chosen_rows",
    "first_item",
    "plain_sampler",
    "shares_rows_out",
    "unequal_batch_counts",
    "warn_of_rows",
]

_PLAIN = (SequentialSampler, RandomSampler)
_NUM_INDICES = 1000  # chosen: of a subset, compared with those of other ranks


def check_equal_batch_counts(stage: str, by_rank: Sequence[Sequence[int | float]]) -> None:
    """Refuse loaders of different lengths.

    Args:
        stage: "training", "validation" or "test".
        by_rank: number of batches of each loader of each rank, infinite where nobody knows; the same on all ranks.

    Raises:
        RuntimeError: they differ.
    """
    if len({tuple(row) for row in by_rank}) > 1:
        # the others are at their first batch of training when one has none
        unknown = "more than 0" if stage == "training" and (0,) in map(tuple, by_rank) else "of unknown number"
        rows = [" + ".join(unknown if n == math.inf else str(n) for n in row) for row in by_rank]
        told = ", ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
        raise RuntimeError(unequal_batch_counts(stage, told))


def check_equal_ends(ending: Collection[int], *, world_size: int, num_batches: int) -> None:
    """Refuse training loaders of unknown length that end on some ranks alone.

    Args:
        ending: ranks whose loader has ended, the same on all ranks.
        world_size: number of ranks.
        num_batches: what each rank has had in this epoch.

    Raises:
        RuntimeError: on every rank, when some have ended and some have not.
    """
    if 0 < len(ending) < world_size:
        told = ", ".join(
            f"rank {rank}: {num_batches if rank in ending else f'more than {num_batches}'}"
            for rank in range(world_size)
        )
        raise RuntimeError(unequal_batch_counts("training", told))


def unequal_batch_counts(stage: str, told: str) -> str:
    """What is wrong with different numbers of batches, and what to write.

    Args:
        stage: "training", "validation" or "test".
        told: the numbers by rank.
    """
    limit = {"training": "train", "validation": "val"}.get(stage, stage)
    return rules.UNEQUAL_BATCHES.told(
        f"The ranks have different numbers of {stage} batches ({told}), and each batch is a collective: the run "
        "would hang at the end of the shortest. Give every rank the same number, with a sampler that pads or "
        f"drops (torch.utils.data.DistributedSampler) or Trainer(limit_{limit}_batches=...)."
    )


def check_equal_stops(stopping: Sequence[bool], num_batches: Sequence[int | float]) -> None:
    """Refuse an epoch of training that some ranks skip because they alone were told to stop.

    Args:
        stopping: whether ``trainer.should_stop`` is set, by rank; the same sequence on all ranks.
        num_batches: of the epoch, by rank.

    Raises:
        RuntimeError: those that have no batch are those that were told to stop.
    """
    stopped = [rank for rank, is_told in enumerate(stopping) if is_told]
    if 0 < len(stopped) < len(stopping) and stopped == [rank for rank, n in enumerate(num_batches) if n == 0]:
        raise RuntimeError(
            rules.UNEQUAL_BATCHES.told(
                f"{_named(stopped)} {'was' if len(stopped) == 1 else 'were'} told to stop (trainer.should_stop) before "
                "an epoch of training, the others not, and each batch is a collective: they would wait for ever. Set "
                "trainer.should_stop on all ranks, by trainer.strategy.reduce_boolean_decision(stop, all=False)."
            )
        )


@dataclass(frozen=True)
class FeedCard:
    """What one rank is fed when training starts.

    Attributes:
        plain: name of a sampler that gives every rank all rows; None where there is none.
        is_shared_out: a sampler sees to it that ranks get different rows.
        rows: of the first batch, as something that is equal where the rows are; None where nobody knows.
        data: of the datasets behind plain samplers, as something that is equal where the datasets are, or may be.
    """

    plain: str | None
    is_shared_out: bool
    rows: Hashable | None
    data: Hashable | None = None


def plain_sampler(loader: object) -> str | None:
    """Name of a sampler of torch that gives this rank all rows of a dataset; None for anything else.

    A loader without automatic batching, or with a batch sampler of the user's, is the user's own affair.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    return type(sampler).__name__ if type(sampler) in _PLAIN else None


def shares_rows_out(loader: object, *, rank: int, world_size: int) -> bool:
    """Whether a ``DistributedSampler`` gives this rank its share among all ranks.

    One that counts other replicas, as of a single node, gives some ranks the same share.
    """
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(s, DistributedSampler) and (s.rank, s.num_replicas) == (rank, world_size) for s in samplers)


def chosen_rows(dataset: object) -> Hashable:
    """What says which rows of a larger dataset are in this one: indices, or the fingerprint of Hugging Face datasets.

    Raises:
        Exception: of indices that nobody can read.
    """
    if type(dataset) is Subset:
        return tuple(map(int, itertools.islice(dataset.indices, _NUM_INDICES))), chosen_rows(dataset.dataset)
    fingerprint = getattr(dataset, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else None


def first_item(dataset: object) -> object | None:
    """The first item of a dataset that lies in memory; None for any other.

    Nothing is asked of a dataset of the user's: it may draw random numbers, or open files that do not survive a fork.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    # subclasses may do anything
    if type(dataset) is TensorDataset or type(dataset) is list or type(dataset) is tuple or type(dataset) is Tensor:
        return dataset[:1]
    return None


def warn_of_rows(cards: Sequence[FeedCard]) -> None:
    """Warn that ranks train on the same rows, or may.

    Args:
        cards: by rank, the same sequence on all ranks.
    """
    same = _ranks_of_equal_rows(cards)
    plain = next((card.plain for card in cards if card.plain is not None), None)
    # in the order of the dataset, and yet not the same rows: each rank has a dataset of its own
    is_in_order = plain == SequentialSampler.__name__ and all(card.rows is not None for card in cards)
    is_own = is_in_order or len({card.data for card in cards}) == len(cards)
    if plain is not None and (same or not is_own):
        seen = f"{same} got the same first batch" if same else "each rank draws from all rows by itself"
        unless = "" if same else ", unless each rank has a dataset of its own"
        rules.PLAIN_SAMPLER.warn(
            f"use_distributed_sampler=False, and the training loader has a {plain}: {seen}, so that an epoch shows "
            f"rows up to {len(cards)} times and a batch of {len(cards)} ranks holds fewer different ones{unless}. Give "
            "the DataLoader a torch.utils.data.DistributedSampler, or leave out use_distributed_sampler=False."
        )
    elif same:
        rules.SAME_ROWS.warn(
            f"{same[0].upper()}{same[1:]} got the same first batch of training, bit by bit: such ranks do the work of "
            "one, and a contrastive loss takes copies of a pair for its negatives. Have each rank read its share, by "
            "trainer.global_rank and trainer.world_size, or with a torch.utils.data.DistributedSampler."
        )


def _ranks_of_equal_rows(cards: Sequence[FeedCard]) -> str:
    """Names of the ranks that have rows of another rank; empty where there are none."""
    by_rows: dict[Hashable, list[int]] = {}
    for rank, card in enumerate(cards):
        if card.rows is not None and not card.is_shared_out:
            by_rows.setdefault(card.rows, []).append(rank)
    same = [ranks for ranks in by_rows.values() if len(ranks) > 1]
    if same == [list(range(len(cards)))]:
        return f"all {len(cards)} ranks"
    return ", and ".join([_named(ranks) for ranks in same]) + (" each" if len(same) > 1 else "")


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
