"""The emoji example through LightningCLI: strategy, precision, callbacks and the task come from a YAML file.

    python examples/cli.py fit --config examples/cli.yaml --trainer.max_steps 60

``--print_config`` prints the whole configuration, which is a config again; so is the ``config.yaml`` beside the curves.
``--trainer.strategy=moeclip`` takes the strategy by its name, with its defaults.
"""

import os
import warnings
from importlib import import_module
from typing import Any

import torch
from emoji_clip.data import EmojiData, Pairs, Tokenizer
from emoji_clip.training import EmojiTask

from lightning_moeclip.binding import ROOT  # lightning.pytorch or pytorch_lightning, whichever is installed

LightningCLI = import_module(f"{ROOT}.cli").LightningCLI

# the batches are made from memory in well under a millisecond per pair: workers would only cost a process each
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class EmojiCLI(LightningCLI):
    """What the task needs to know of the data, and the length of its learning rate, is written nowhere twice."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("trainer.max_steps", "model.total_steps")
        for source, target, told in (
            ("data.tokenizer", "model.num_words", len),
            ("data.tokenizer", "model.max_words", longest),
            ("data.held_out", "model.num_pairs", count),
        ):
            parser.link_arguments(source, target, compute_fn=told, apply_on="instantiate")


def longest(tokenizer: Tokenizer) -> int:
    return tokenizer.max_words


def count(pairs: Pairs) -> int:
    return len(pairs.captions)


def main(arguments: list[str] | None = None) -> EmojiCLI:
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    return EmojiCLI(EmojiTask, EmojiData, args=arguments)


if __name__ == "__main__":
    main()
