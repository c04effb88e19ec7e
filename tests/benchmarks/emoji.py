"""The emoji example as something to measure: its module, and its batches without its Trainer."""

import sys

from tests.benchmarks import measure

sys.path.insert(0, str(measure.ROOT / "examples"))

from emoji_clip.data import Batch, EmojiData, GlobalBatches, TrainingPairs, to_batch
from emoji_clip.training import EmojiTask

from lightning_moeclip.binding import pl

__all__ = ["batches", "make_task"]


def make_task(*, total_steps: int, seed: int = 0) -> EmojiTask:
    """The example's module, the same for a seed."""
    data = EmojiData(seed=seed)
    pl.seed_everything(seed, verbose=False)
    return EmojiTask(len(data.tokenizer), data.tokenizer.max_words, len(data.held_out.captions), total_steps)


def batches(rank: int, world_size: int, number: int, *, seed: int = 0, batch_size: int = 256) -> list[Batch]:
    """This rank's rows of the first global batches."""
    data = EmojiData(seed=seed)
    pairs = TrainingPairs(data.train_pairs, data.tokenizer, seed=seed)
    found: list[Batch] = []
    while len(found) < number:
        start = len(found)
        rows = GlobalBatches(
            len(data.train_pairs.captions),
            batch_size,
            lambda: start,  # noqa: B023 (read while the loop stands still)
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        found += [to_batch([pairs[draw] for draw in drawn]) for drawn in rows]
    return found[:number]
