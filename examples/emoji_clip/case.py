"""The training task and two global batches, for the commands of the package::

cd examples
python -m lightning_moeclip explain emoji_clip.case:make --world-size 4 --expert-parallel-size 2
"""

import torch

from emoji_clip.data import Batch, Draw, EmojiData, TrainingPairs, to_batch
from emoji_clip.training import EmojiTask


def make(batch_size: int = 16) -> tuple[EmojiTask, list[Batch]]:
    torch.manual_seed(0)
    data = EmojiData()
    pairs = TrainingPairs(data.train_pairs, data.tokenizer)
    rows = [[pairs[Draw(0, index)] for index in range(first, first + batch_size)] for first in (0, batch_size)]
    task = EmojiTask(len(data.tokenizer), data.tokenizer.max_words, len(data.held_out.captions), total_steps=2)
    return task, [to_batch(batch) for batch in rows]
