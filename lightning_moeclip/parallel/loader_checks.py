"""Checks of what the ranks are fed: as many batches on each, and not the same rows."""

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_moeclip.parallel import rules

__all__ = [
    "FeedCard",
    "check_equal_batch_counts",
    "check_equal_ends",
    "plain_sampler",
    "shares_rows_out",
    "unequal_batch_counts",
    "warn_of_rows",
]

_PLAIN = (SequentialSampler, RandomSampler)


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


@dataclass(frozen=True)
class FeedCard:
    """What one rank is fed when training starts.

    Attributes:
        plain: name of a sampler that gives every rank all rows; None where there is none.
        is_shared_out: a sampler sees to it that ranks get different rows.
        rows: of the first batch, as something that is equal where the rows are; None where there are no tensors.
    """

    plain: str | None
    is_shared_out: bool
    rows: Hashable | None


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


def shares_rows_out(loader: object) -> bool:
    """Whether a ``DistributedSampler`` gives this rank its share."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def warn_of_rows(cards: Sequence[FeedCard]) -> None:
    """Warn that ranks train on the same rows, or may.

    Args:
        cards: by rank, the same sequence on all ranks.
    """
    rows = {card.rows for card in cards}
    is_same = len(rows) == 1 and None not in rows and not any(card.is_shared_out for card in cards)
    plain = next((card.plain for card in cards if card.plain is not None), None)
    # in the order of the dataset, and yet not the same rows: each rank has a dataset of its own
    is_own = plain == SequentialSampler.__name__ and None not in rows and not is_same
    if plain is not None and not is_own:
        seen = "the first batch is the same on all ranks" if is_same else "each rank draws from all rows by itself"
        rules.PLAIN_SAMPLER.warn(
            f"use_distributed_sampler=False, and the training loader has a {plain}: {seen}, so that an epoch shows "
            f"rows up to {len(cards)} times and a batch of {len(cards)} ranks holds fewer different ones. Give the "
            "DataLoader a torch.utils.data.DistributedSampler, or leave out use_distributed_sampler=False."
        )
    elif is_same:
        rules.SAME_ROWS.warn(
            f"All {len(cards)} ranks got the same first batch of training, bit by bit: {len(cards)} ranks then do the "
            "work of one, and a contrastive loss takes copies of a pair for its negatives. Have each rank read its "
            "share, by trainer.global_rank and trainer.world_size, or with a torch.utils.data.DistributedSampler."
        )
