"""A callback that waits for the other ranks in every step, holds one, and does something on one rank in another."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_moeclip.binding import Callback, Trainer

HELD_STEP, BAD_STEP = 1, 3


class Watchful(Callback):
    """Sums over the ranks before each step, as callbacks that act do.

    Attributes:
        rank: where ``act`` is called in ``BAD_STEP``.
        where: "in": in the place of this rank's sum, for which the others wait; "after": when all have summed.
        num_held: steps that were held.
    """

    may_hold_step = True

    def __init__(self, rank: int, act: Callable[[], Any], *, where: str = "in") -> None:
        self.rank = rank
        self.act = act
        self.where = where
        self.num_held = 0

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        is_bad = trainer.global_rank == self.rank and trainer.global_step == BAD_STEP
        if is_bad and self.where == "in":
            self.act()
        trainer.strategy.reduce_sums(torch.ones(2, dtype=torch.float64))
        if trainer.global_step == HELD_STEP and trainer.global_rank == self.rank:
            trainer.strategy.hold_step("to see whether a held step ends as any other")
        if is_bad and self.where == "after":
            self.act()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.num_held += trainer.strategy.report.verdict.holds_step
