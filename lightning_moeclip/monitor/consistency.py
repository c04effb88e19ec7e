"""What it means that replicas differ: how often the same tensor may, and the story told of it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_moeclip.gradients.comparison import Comparison, Difference
from lightning_moeclip.gradients.report import ReductionResidual
from lightning_moeclip.monitor.bounds import check_steps, is_finite_number

__all__ = ["ConsistencyMonitor", "ConsistencySettings", "Level", "describe"]

Level = Literal["ok", "warn", "critical"]

# chosen: chance does not meet one tensor four times; each more lets a fault of the program run on to another check
_MAX_RESYNCS = 3
_MAX_TOLD = 8  # differences spelled out at once; of the others the number is told
_FLOAT16_EPSILON = torch.finfo(torch.float16).eps


@dataclass(frozen=True)
class ConsistencySettings:
    """When replicas are compared, and how much a low-precision reduction may lose.

    Attributes:
        threshold: of the relative L1 residual of a reduction in float16 over 2 ranks, above which it is told.
        critical_factor: how many times that, from where the step is held.
        every_n_steps: optimizer steps between two comparisons.
    """

    threshold: float = 1e-3
    critical_factor: float = 3.0
    every_n_steps: int = 50

    def __post_init__(self) -> None:
        if not (is_finite_number(self.threshold) and self.threshold > 0):
            raise ValueError(f"threshold={self.threshold!r} must be a positive number. The default is 1e-3.")
        if not (is_finite_number(self.critical_factor) and self.critical_factor >= 1):
            raise ValueError(
                f"critical_factor={self.critical_factor!r} must be a number from 1: it is told of a residual above "
                "threshold, and acted from critical_factor * threshold. The default is 3.0."
            )
        check_steps("every_n_steps", self.every_n_steps, advice="The default is 50.")


class ConsistencyMonitor:
    """Counts what differed and was mended, and gives up when the same tensor does so again and again.

    Everything it is told is the same on all ranks, and so is everything it decides.

    Attributes:
        num_mismatches: tensors and values that were found to differ so far, each time counted.
        num_resyncs: of these, how many got the values of the majority.
        relative: relative L1 residual of the last low-precision reduction that was looked at; NaN before.
    """

    def __init__(self, settings: ConsistencySettings, *, world_size: int) -> None:
        """Start without any history.

        Args:
            settings: bounds.
            world_size: W.
        """
        self._settings = settings
        self._world_size = world_size
        self._last_window: int | None = None
        self._repairs: Counter[tuple[str, str, str]] = Counter()
        self._history: list[str] = []
        self.num_mismatches = 0
        self.num_resyncs = 0
        self.relative = math.nan

    def is_due(self, step: int) -> bool:
        """Whether the step that begins is to be looked at: the first one, and each that enters a new window.

        Args:
            step: number of optimizer steps taken so far, which may grow by more than one at a time. Asked several
                times before one step, as its micro-batches do, only the first is due.
        """
        window = step // self._settings.every_n_steps
        is_new = window != self._last_window
        self._last_window = window
        return is_new

    def judge(self, comparison: Comparison, *, step: int) -> str:
        """Take note of what differs; returns the story, empty when nothing does.

        Args:
            comparison: outcome of comparing replicas at ``step``.
            step: number of optimizer steps taken.

        Raises:
            RuntimeError: something differs that was mended three times already, with the story of each time.
        """
        if comparison.is_equal:
            return ""
        differences = comparison.differences
        story = _story(differences, step)
        self._history.append(story)
        self.num_mismatches += len(differences)
        again = [d for d in differences if self._repairs[d.key] >= _MAX_RESYNCS]
        if again:
            told = "\n".join(self._history)
            raise RuntimeError(
                f"{describe(again[0])}, which was mended {_MAX_RESYNCS} times before. Something makes this rank "
                "compute other bits than its replicas, again and again: look for code that depends on the rank, for "
                f"random numbers without a common seed, and for a faulty device. What was found:\n{told}"
            )
        self._repairs.update({d.key for d in differences})
        self.num_resyncs += sum(d.category != "gradients" for d in differences)
        return story

    def judge_residual(self, residual: ReductionResidual) -> Level:
        """How bad it is what a reduction in low precision has lost.

        The bound is threshold * eps(dtype) / eps(float16) * sqrt(W / 2) of the L1 norm.

        Args:
            residual: the same on all ranks. One that is not finite is no matter of precision.
        """
        self.relative = residual.error / residual.norm if residual.norm else 0.0
        bound = self._settings.threshold * residual.epsilon / _FLOAT16_EPSILON * math.sqrt(self._world_size / 2)
        if not self.relative > bound:
            return "ok"
        return "critical" if self.relative >= self._settings.critical_factor * bound else "warn"

    def residual_story(self, residual: ReductionResidual, *, step: int) -> str:
        """What to say of a residual that is too large."""
        return (
            f"the sum over ranks in low precision differed from one in float32 by {self.relative:.2g} of the "
            f"gradients' L1 norm, in a sample of {residual.num_elements} elements (step {step})"
        )


def describe(difference: Difference) -> str:
    """One clause: what differed, on which ranks, how many elements and by how much."""
    ranks = f"rank {difference.ranks[0]}" if len(difference.ranks) == 1 else f"ranks {_listed(difference.ranks)}"
    what = _title(difference)
    if difference.is_absent:
        return f"{what} was there on {ranks} and not on most replicas"
    if difference.num_different is None:
        return f"{what} was missing or of another kind on {ranks}"
    elements = f"{difference.num_different} of {difference.num_elements} elements"
    return f"{what} differed on {ranks}: {elements}, by at most {difference.largest:.2g}"


def _title(difference: Difference) -> str:
    name, entry = difference.name, difference.entry
    if difference.category == "gradients":
        return f"gradient of {name}"
    if difference.category == "optimizer":
        return f"optimizer state {entry} of {name}"
    if difference.category == "scaler":
        return name
    return f"{entry or 'parameter'} {'of ' if entry else ''}{name}"


def _story(differences: Sequence[Difference], step: int) -> str:
    told = []
    for difference in differences[:_MAX_TOLD]:
        is_held = difference.category == "gradients"
        mended = "step held" if is_held else f"resynced from rank {difference.source}"
        told.append(f"{describe(difference)}; {mended} (step {step})")
    if len(differences) > _MAX_TOLD:
        told.append(f"and {len(differences) - _MAX_TOLD} more (step {step})")
    return "\n".join(told)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
