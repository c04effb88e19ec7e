"""What a step's gradients were, as frozen values for those who look on."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Attendance", "GradReport"]


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
class GradReport:
    """Gradients of the last optimizer step, after reduction.

    Attributes:
        attendance: who took part; None on one process, where nothing is reduced.
        total_norm: 0-d, float32 at least: norm over all ranks before clipping, each logical parameter once; None when
            the step was not clipped by norm.
        clip_factor: 0-d: what the gradients were multiplied by; None like ``total_norm``.
    """

    attendance: Attendance | None = None
    total_norm: Tensor | None = None
    clip_factor: Tensor | None = None
