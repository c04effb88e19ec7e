"""Emoji and their names: the file, words to numbers, and batches that are the same in every layout."""

import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_moeclip.binding import pl

FILE = Path(__file__).parent.parent / "data" / "emoji_32x32.pt.gz"
MAX_SHIFT = 2  # pixels a training picture moves by in x and y


class Pairs(NamedTuple):
    """images: [pairs, 3, 32, 32] uint8; captions: one string per image."""

    images: Tensor
    captions: list[str]


class Batch(NamedTuple):
    """images: [rows, 3, 32, 32] float in [-1, 1]; tokens: [rows, max_words] int64, padded with ``Tokenizer.PAD``."""

    images: Tensor
    tokens: Tensor


class Draw(NamedTuple):
    """One use of a training pair: the pass over the data it belongs to, and its index."""

    epoch: int
    index: int


def load_pairs(path: Path = FILE) -> tuple[Pairs, Pairs]:
    """Training pairs, and the pairs held out: one skin tone of each emoji that has skin tones."""
    with gzip.open(path) as file:
        stored = torch.load(io.BytesIO(file.read()), weights_only=True)
    images, held_out = stored["images"].permute(0, 3, 1, 2).contiguous(), stored["held_out"]
    parts = [
        Pairs(
            images[chosen], [caption for caption, keep in zip(stored["captions"], chosen.tolist(), strict=True) if keep]
        )
        for chosen in (~held_out, held_out)
    ]
    return parts[0], parts[1]


class Tokenizer:
    """Words to numbers; the vocabulary is the sorted set of words in the captions it is made from."""

    PAD = 0
    UNKNOWN = 1

    def __init__(self, captions: list[str]) -> None:
        words = sorted({word for caption in captions for word in caption.split()})
        self.ids = {word: number for number, word in enumerate(words, start=2)}
        self.max_words = max(len(caption.split()) for caption in captions)

    def __len__(self) -> int:
        return len(self.ids) + 2

    def __call__(self, captions: list[str]) -> Tensor:
        """[captions, max_words] int64; longer captions are cut."""
        tokens = torch.full((len(captions), self.max_words), self.PAD)
        for row, caption in zip(tokens, captions, strict=True):
            ids = [self.ids.get(word, self.UNKNOWN) for word in caption.split()][: self.max_words]
            row[: len(ids)] = torch.tensor(ids)
        return tokens


class GlobalBatches(Sampler[list[Draw]]):
    """This rank's rows of one endless list of global batches, which depends on the seed alone.

    Global batch t is the same set of pairs whatever the number of ranks: rank r takes the r-th contiguous share of its
    rows. Iterating starts at batch ``position()`` and ends with the pass over the data, so a run that was stopped
    anywhere goes on with the batch it would have seen next. What does not fill a batch is left for another pass.

    Args:
        num_pairs: number of training pairs.
        batch_size: rows of a global batch.
        position: number of global batches trained so far.
    """

    def __init__(
        self,
        num_pairs: int,
        batch_size: int,
        position: Callable[[], int],
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not world_size <= batch_size <= num_pairs:
            raise ValueError(
                f"batch_size={batch_size} makes no batch: use at least {world_size} (one row per rank) and at most "
                f"{num_pairs} (all pairs)."
            )
        self.num_pairs, self.batch_size, self.position, self.seed = num_pairs, batch_size, position, seed
        self.share = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)

    def __len__(self) -> int:
        return self.num_pairs // self.batch_size

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, start = divmod(self.position(), len(self))
        order = torch.randperm(self.num_pairs, generator=generator_of(self.seed, epoch)).tolist()
        for batch in range(start, len(self)):
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size][self.share]
            yield [Draw(epoch, index) for index in rows]


def generator_of(*key: int) -> torch.Generator:
    """A generator that depends on the key alone, not on who asks or when."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part) % 2**63  # a polynomial hash with a prime base
    return torch.Generator().manual_seed(seed)


class TrainingPairs(Dataset[tuple[Tensor, Tensor]]):
    """Pairs with the picture moved by up to ``MAX_SHIFT`` pixels, by an amount that the draw alone decides."""

    def __init__(self, pairs: Pairs, tokenizer: Tokenizer, *, seed: int = 0) -> None:
        margin = (MAX_SHIFT,) * 4
        self.images = pad(pairs.images, margin, value=255)
        self.tokens = tokenizer(pairs.captions)
        self.seed = seed

    def __getitem__(self, draw: Draw) -> tuple[Tensor, Tensor]:
        x, y = torch.randint(2 * MAX_SHIFT + 1, (2,), generator=generator_of(self.seed, *draw)).tolist()
        size = self.images.shape[-1] - 2 * MAX_SHIFT
        return self.images[draw.index, :, y : y + size, x : x + size], self.tokens[draw.index]


def to_batch(rows: list[tuple[Tensor, Tensor]]) -> Batch:
    images, tokens = zip(*rows, strict=True)
    return Batch(torch.stack(images).float() / 127.5 - 1, torch.stack(tokens))


class ResumableLoader(DataLoader):
    """Its place is the trainer's step count, which Lightning stores: a checkpoint needs no more than that."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class EmojiData(pl.LightningDataModule):
    """Training batches by ``GlobalBatches``; for validation every rank gets all held-out pairs, as one batch."""

    def __init__(self, *, batch_size: int = 256, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.train_pairs, self.held_out = load_pairs()
        self.tokenizer = Tokenizer(self.train_pairs.captions)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train_pairs.captions) // self.batch_size

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        batches = GlobalBatches(
            len(self.train_pairs.captions),
            self.batch_size,
            lambda: trainer.global_step,
            seed=self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        dataset = TrainingPairs(self.train_pairs, self.tokenizer, seed=self.seed)
        return ResumableLoader(dataset, batch_sampler=batches, collate_fn=to_batch)

    def val_dataloader(self) -> DataLoader:
        rows = list(zip(self.held_out.images, self.tokenizer(self.held_out.captions), strict=True))
        return DataLoader(rows, batch_size=len(rows), collate_fn=to_batch)
