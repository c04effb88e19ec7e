"""The example's task and a few of its batches, for ``python -m lightning_moeclip verify`` in the folder above.

python -m lightning_moeclip verify emoji_clip.verification:make_case --world-size 4 --expert-parallel-size 2
"""

from emoji_clip.data import Batch, EmojiData, GlobalBatches, TrainingPairs, to_batch
from emoji_clip.training import EmojiTask

ROWS = 32
NUM_BATCHES = 2


def make_case() -> tuple[EmojiTask, list[Batch]]:
    """The task as it is trained, and the first global batches of its data, smaller ones."""
    data = EmojiData(batch_size=ROWS)
    total_steps = 100  # of the learning rate: the first steps of a short run
    task = EmojiTask(len(data.tokenizer), data.tokenizer.max_words, len(data.held_out.captions), total_steps)
    pairs = TrainingPairs(data.train_pairs, data.tokenizer)
    draws = iter(GlobalBatches(len(data.train_pairs.captions), ROWS, lambda: 0))
    return task, [to_batch([pairs[draw] for draw in next(draws)]) for _ in range(NUM_BATCHES)]
