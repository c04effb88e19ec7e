"""What a step's gradients were, as frozen values for those who look on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

__all__ = [
    "Attendance",
    "GradReport",
    "GradStatistics",
    "GradSums",
    "LayerKey",
    "LossScale",
    "ReductionResidual",
    "Verdict",
]


@dataclass(frozen=True)
class Attendance:
    """Agreed outcome of one reduction, equal on all ranks.

    Attributes:
        num_live_ranks: ranks whose ``training_step`` returned a loss.
        is_spoiled: a rank gave up a loss that was not finite, after it had sent such values to others: nobody has a
            gradient.
        absent: parameters without a gradient on any rank; their ``.grad`` is None.
        is_termination_requested: some rank was told to end.
        ending_ranks: whose loader ends with this batch, where that is known before it does.
    """

    num_live_ranks: int
    absent: tuple[str, ...] = ()
    is_spoiled: bool = False
    is_termination_requested: bool = False
    ending_ranks: tuple[int, ...] = ()


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


class LayerKey(NamedTuple):
    """A row of the statistics: what one layer of one tower has of one kind of parameters.

    Attributes:
        tower: None for what belongs to none.
        layer: path of the layer inside its tower, such as "transformer.blocks.3".
        kind: "dense", "expert", "router", "projection" or "logit_scale".
    """

    tower: str | None
    layer: str
    kind: str


@dataclass(frozen=True)
class GradSums:
    """Sums over gradients by row; [rows], float64, on the CPU. Non-finite elements are counted and in no sum.

    Added up in float64, whatever the gradients are: a variance has an error of about 1e-15 times the square of mean
    over standard deviation.

    Attributes:
        size: number of elements of the gradients that there were; 0 where no parameter of the row has one.
        total: sum of g.
        square: sum of g squared.
        absolute: sum of |g|.
        maximum: largest |g|.
        num_nonfinite: elements that are NaN or infinite.
        num_zeros: elements that are exactly zero.
    """

    size: Tensor
    total: Tensor
    square: Tensor
    absolute: Tensor
    maximum: Tensor
    num_nonfinite: Tensor
    num_zeros: Tensor

    @property
    def variance(self) -> Tensor:
        """Variance over the elements of a row, [rows]; NaN with fewer than two elements or with a non-finite one."""
        mean = self.total / self.size
        variance = ((self.square - self.total * mean) / (self.size - 1)).clamp(min=0.0)
        return variance.where((self.size >= 2) & (self.num_nonfinite == 0), float("nan"))

    @property
    def norm(self) -> Tensor:
        """L2 norm of the finite elements of a row, [rows]."""
        return self.square.sqrt()


@dataclass(frozen=True)
class GradStatistics:
    """Statistics of the gradients of one optimizer step, by layer, with loss scales divided out.

    Automatic optimization clips after them; in manual optimization they are of what is there when the optimizer steps.
    Complex gradients count as twice as many real ones. Where several backwards were reduced for one step, as in manual
    optimization that adds up batches, what was reduced before is in the local gradient of each rank.

    Attributes:
        keys: what the rows are, in the order of the module.
        local: of the gradients that autograd left on the ranks, before any reduction: sums over all ranks, or, with a
            strategy that is not ours, of this rank alone.
        reduced: of the gradients that the optimizer sees, each logical element once, equal on all ranks; None with a
            strategy that is not ours.
        noise: variance of a rank's gradient around the reduced one, summed over the elements of a row, [rows]: W/|R|
            (sum_R |h_r|^2 - |R| |g|^2) / (|R| - 1) with h_r = g_r |R|/W; NaN where a parameter has one replica. A
            difference of sums: where ranks agree to the rounding of the reduced gradient's dtype, it is that rounding.
            None with a strategy that is not ours.
    """

    keys: tuple[LayerKey, ...]
    local: GradSums
    reduced: GradSums | None = None
    noise: Tensor | None = None


@dataclass(frozen=True)
class ReductionResidual:
    """What a reduction in low precision loses, from a sample of elements that was also reduced in float32.

    Attributes:
        error: sum of |g - g_float32| over the sample.
        norm: sum of |g_float32| over the sample.
        epsilon: of the dtype in which gradients travel.
        num_elements: size of the sample, over all ranks' own parameters.
    """

    error: float
    norm: float
    epsilon: float
    num_elements: int


@dataclass(frozen=True)
class Verdict:
    """What those who look at gradients decide about the step at hand, agreed over all ranks before it is taken.

    Attributes:
        holds_step: an optimizer of the training step does not step, and its gradients are dropped; of what they say
            about the loss scale only an overflow counts.
        reasons: why, as each decider on this rank said; empty on a rank whose own deciders have nothing against it.
    """

    holds_step: bool = False
    reasons: tuple[str, ...] = ()


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
        statistics: None in a step for which nobody asked.
        residual: None in a step for which nobody asked, or where gradients travel in full precision.
        verdict: whether the step was held.
    """

    attendance: Attendance | None = None
    total_norm: Tensor | None = None
    clip_factor: Tensor | None = None
    loss_scales: Mapping[str, LossScale] = field(default_factory=dict)
    statistics: GradStatistics | None = None
    residual: ReductionResidual | None = None
    verdict: Verdict = Verdict()
