"""What a step's gradients were, as frozen values for those who look on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Attendance", "GradReport", "LossScale"]


@dataclass(frozen=True)
class Attendance:
    """Agreed outcome of one reduction, equal on all ranks.

    Attributes:
        num_live_ranks: ranks whose ``training_step`` returned a loss.
        is_spoiled: a rank gave up a loss that was not finite, after it had sent such values to others: nobody has a
            gradient.
        absent: parameters without a gradient on any rank; their ``.grad`` is None.
        is_termination_requested: some rank was told to end.
    """

    num_live_ranks: int
    absent: tuple[str, ...] = ()
    is_spoiled: bool = False
    is_termination_requested: bool = False


@dataclass(frozen=True)
class LossScale:
    """Loss scale of a region, and how its gradients fare in 16 bits; 0-d tensors on the device.

    Attributes:
        scale: by which number the gradients inside are multiplied in the next step.
        overflow_rate: share of all steps so far that were skipped and blamed on it.
        underflow_rate: share of exact zeros among its gradients when they were last counted; NaN before.
    """

    scale: Tensor
    overflow_rate: Tensor
    underflow_rate: Tensor


@dataclass(frozen=True)
class GradReport:
    """Gradients of the last optimizer step, after reduction.

    Attributes:
        attendance: who took part; None on one process, where nothing is reduced.
        total_norm: 0-d, float32 at least: norm over all ranks before clipping, each logical parameter once; None when
            the step was not clipped by norm.
        clip_factor: 0-d: what the gradients were multiplied by; None like ``total_norm``.
        loss_scales: by region, "model" for what is in none; empty where the precision needs no scaling. With several
            optimizers they are of the step before: the scale is decided when the next backward begins.
    """

    attendance: Attendance | None = None
    total_norm: Tensor | None = None
    clip_factor: Tensor | None = None
    loss_scales: Mapping[str, LossScale] = field(default_factory=dict)
