"""What a callback may ask of the strategy: the only way to the other ranks.

Every method is called by all ranks at the same point of a step, and answers the same on all of them.
"""

import warnings
from collections.abc import Collection
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from lightning_moeclip.binding import Trainer
from lightning_moeclip.gradients.comparison import Category, Comparison
from lightning_moeclip.gradients.report import GradReport

__all__ = ["World", "check_given_once", "warn", "world_of"]

Value = TypeVar("Value")


@runtime_checkable
class World(Protocol):
    """``MoEClipStrategy``, as callbacks see it.

    Attributes:
        report: of the last step.
        step_loss: 0-d, of this rank since the last optimizer step: in automatic optimization the mean over the
            micro-batches that had a loss, in manual optimization the sum of the losses. The objective is its mean over
            ranks. What went backward does not count when all gradients were set to None (``zero_grad``) without a step.
        num_losses: how many losses that are. Before the first backward of a step, also in ``on_before_backward``, 0.
    """

    report: GradReport

    @property
    def world_size(self) -> int:
        """W, number of ranks."""

    @property
    def step_loss(self) -> Tensor:
        """See the class."""

    @property
    def num_losses(self) -> int:
        """See the class."""

    def ask_for_statistics(self) -> None:
        """Have statistics in the report of the step at hand; to be called in ``on_train_batch_start``.

        They are there from ``on_before_optimizer_step`` on. No communication here, one small all-reduce then.
        """

    def ask_for_residual(self) -> None:
        """Have the residual of a low-precision reduction in the report, asked for and read like statistics."""

    def reduce_sums(self, sums: Tensor) -> Tensor:
        """[n] float64 of this rank to the sum over all ranks, bit-identical on each; a collective."""

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on any rank; a collective."""

    def gather(self, value: Value) -> list[Value]:
        """Picklable values of all ranks, by rank; a collective, slow, for rare events."""

    def gradient_square(self) -> Tensor:
        """0-d float64: this rank's part of the squared norm of the reduced gradients; parts of all ranks add up to it.

        Each logical parameter counts once, on one of the ranks that hold it: what was done to the gradients of one rank
        alone after the reduction is for ``compare`` to find. To be called in ``on_before_optimizer_step``; no
        communication.
        """

    def hold_step(self, reason: str) -> None:
        """Have no rank take the step at hand; to be called in ``on_before_optimizer_step``.

        The callback needs the attribute ``may_hold_step = True``, on which all ranks agree before the first step.
        """

    def compare(self, what: Collection[Category]) -> Comparison:
        """Whether replicas hold the same bits of what is asked for; a collective.

        To be called between steps, or in ``on_before_optimizer_step`` without "scaler", whose step is not over there.
        "gradients" are those of the optimizer that is about to step.
        """

    def resync(self, comparison: Comparison) -> None:
        """Give ranks that differ what the majority of their replicas holds, never gradients; a collective."""


def world_of(trainer: Trainer, callback: object) -> World:
    """The strategy of a run, for a callback that acts and therefore needs ours.

    Raises:
        TypeError: it is another strategy.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, World):
        name = type(callback).__name__
        raise TypeError(
            f"{name} acts on all ranks through the strategy, and {type(strategy).__name__} cannot do that. "
            f"Write Trainer(strategy=MoEClipStrategy(), callbacks=[{name}()])."
        )
    return strategy


def check_given_once(trainer: Trainer, callback: Any) -> None:
    """Refuse two callbacks of one class, which would act twice on one step.

    Raises:
        ValueError: there are two.
    """
    number = sum(type(other) is type(callback) for other in trainer.callbacks)
    if number > 1:
        name = type(callback).__name__
        raise ValueError(f"Trainer(callbacks=[...]) holds {number} of {name}: both would act on one step. Give one.")


def warn(trainer: Trainer, message: str) -> None:
    """Warn on the first rank, of what all ranks find."""
    if trainer.is_global_zero:
        warnings.warn(message, stacklevel=3)
