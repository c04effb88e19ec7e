"""What the loss, the gradient norm and the directional cosine of a step say about the run: a state machine of numbers.

All ranks feed it the same reduced numbers, so all come to the same findings. Values that were flagged teach it nothing.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import Literal

from lightning_moeclip.monitor.bounds import is_finite_number, is_integer
from lightning_moeclip.monitor.levels import FlaggedRow
from lightning_moeclip.monitor.tracks import CosineTrack, LossTrack, Track, variance

__all__ = ["Finding", "Observation", "StabilityMonitor", "StabilitySettings", "StabilityState"]

Kind = Literal["non_finite", "loss", "grad_norm", "unstable", "deviates", "low", "level"]

_SIGMAS = 6.0
# healthy runs of examples/train_clip_moe.py: the distances of their losses spread by more than 2 % of the loss, those
# of the logarithm of their gradient norms by more than 0.05, and half their cosines lie farther from the median
_LOSS_FLOOR, _NORM_FLOOR, _COSINE_FLOOR = 0.02, 0.05, 0.01
_STEADY_SIGMAS = 3.0  # how far a steady cosine below ``low`` lies from the level, where it is a fault and no habit
_NEW_LEVEL_STEPS = 64  # all that ``CosineTrack`` keeps: the new level is as well known as the old one was


@dataclass(frozen=True)
class Finding:
    """Something that a healthy run does not show.

    Attributes:
        kind: "non_finite"; "loss" or "grad_norm", far above those before; "unstable", low cosines that vary;
            "deviates", a cosine far from its level on either side; "low", cosines that stay low; "level", only news.
        message: what was seen, with numbers.
        acts: the step must not be taken.
    """

    kind: Kind
    message: str
    acts: bool = False

    @property
    def blocks(self) -> bool:
        """Whether no snapshot is to be taken of what the step leaves."""
        return self.kind != "level"


@dataclass(frozen=True)
class Observation:
    """What one step showed.

    Attributes:
        findings: most serious first.
        cosine: the directional cosine; None where nothing is known about it.
        deviation: of the cosine from its level in robust deviations; None before the level is known.
        is_good: the state after the step is worth keeping.
        is_judged: loss and gradient norm could be measured; an overflow under a loss scaler, say, tells nothing.
        is_new_level: what was flagged for long is the level from now on.
    """

    findings: tuple[Finding, ...] = ()
    cosine: float | None = None
    deviation: float | None = None
    is_good: bool = False
    is_judged: bool = False
    is_new_level: bool = False

    @property
    def acts(self) -> bool:
        """Whether the step must not be taken."""
        return any(finding.acts for finding in self.findings)


@dataclass(frozen=True)
class StabilitySettings:
    """When a directional cosine is a bad sign, and when a good one.

    Attributes:
        window: cosines whose variance counts.
        low: below it a cosine is low.
        patience: low cosines in a row that, with the variance, make a run unstable.
        variance: of the window; above it a run is unstable.
        good: from it on a cosine is worth a snapshot.
        act_on_cosine: a cosine alone may hold a step.

    Raises:
        ValueError: a value out of its range.
    """

    window: int = 5
    low: float = 0.55
    patience: int = 3
    variance: float = 0.02
    good: float = 0.75
    act_on_cosine: bool = False

    def __post_init__(self) -> None:
        for name, value, default in (("window", self.window, 5), ("patience", self.patience, 3)):
            if not is_integer(value):
                raise ValueError(f"{name}={value!r} must be an integer. The default is {default}.")
        if self.window < 2:
            raise ValueError(f"window={self.window} has no variance: it takes at least 2 cosines. Use window=5.")
        if not 1 <= self.patience <= self.window:
            raise ValueError(
                f"patience={self.patience} must lie between 1 and window={self.window} steps. "
                f"Use patience={min(3, self.window)}."
            )
        are_numbers = is_finite_number(self.low) and is_finite_number(self.good)
        if not (are_numbers and -1.0 <= self.low < self.good <= 1.0):
            raise ValueError(
                f"low={self.low!r} and good={self.good!r} must be cosines with low < good, both in [-1, 1]. "
                "Use low=0.55, good=0.75."
            )
        if not (is_finite_number(self.variance) and self.variance > 0.0):
            raise ValueError(
                f"variance={self.variance!r} must be above 0: cosines of a healthy run vary too. Use variance=0.02."
            )
        if type(self.act_on_cosine) is not bool:
            raise ValueError(f"act_on_cosine={self.act_on_cosine!r} must be True or False. The default is False.")


@dataclass
class StabilityState:
    """All that a monitor remembers; plain numbers.

    Attributes:
        loss: of healthy steps.
        log_norm: logarithm of the gradient norm of healthy steps.
        cosine: of healthy steps.
        seen: the last cosines whatever they were.
        changed: cosines since they began to deviate.
        is_told_low: somebody was told that the healthy cosine of this run is a low one.
    """

    loss: LossTrack = field(default_factory=lambda: LossTrack(floor=_LOSS_FLOOR))
    log_norm: Track = field(default_factory=lambda: Track(absolute_floor=_NORM_FLOOR))
    cosine: CosineTrack = field(default_factory=lambda: CosineTrack(floor=_COSINE_FLOOR))
    seen: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    is_told_low: bool = False


class StabilityMonitor:
    """Judges one step after the other.

    Nothing but values that are not finite is found before 72 healthy steps of loss and gradient norm, and 64 of the
    cosine. A loss or gradient norm that was flagged in 32 batches in a row is a new level when the loss lies within 10
    times of the old one and the norm within 100 times: it is taken over, and told of; 40 batches later the bounds hold
    again. Going back to an earlier state does not shorten that row.

    Args:
        settings: when a cosine is a bad sign.
    """

    def __init__(self, settings: StabilitySettings | None = None) -> None:
        self.settings = settings or StabilitySettings()
        self._state = StabilityState()
        self._row = FlaggedRow()

    def state(self) -> StabilityState:
        """A copy of all that it remembers."""
        return copy.deepcopy(self._state)

    def load_state(self, state: StabilityState) -> None:
        """Go back to what it remembered; ``state`` stays as it is."""
        self._state = copy.deepcopy(state)

    def observe(
        self,
        loss: float,
        grad_norm: float,
        cosine: float | None = None,
        *,
        is_scaled: bool = False,
        is_whole: bool = True,
    ) -> Observation:
        """Judge a step before it is taken.

        Args:
            loss: mean over ranks.
            grad_norm: of the reduced gradients, before clipping; 0 says that there are none, and teaches nothing.
            cosine: directional, between -1 and 1; None or NaN where it is not known.
            is_scaled: a loss scaler deals with gradients that are not finite under a finite loss: they are no finding.
            is_whole: every rank had a loss; otherwise its mean is no measure, and only what is not finite is found.
        """
        cosine = None if cosine is None or not math.isfinite(cosine) else cosine
        if not math.isfinite(loss) or (not math.isfinite(grad_norm) and not is_scaled):
            self._row.clear()
            message = f"loss {loss:g} and gradient norm {grad_norm:g} must both be finite"
            return Observation((Finding("non_finite", message, acts=True),), cosine)
        if not is_whole or grad_norm == 0.0 or not math.isfinite(grad_norm):
            return Observation(cosine=cosine)
        log_norm = math.log(grad_norm)
        spikes = [
            *self._spike("loss", self._state.loss.score(loss), f"loss {loss:.4g}"),
            *self._spike("grad_norm", self._state.log_norm.score(log_norm), f"log of the gradient norm {log_norm:.4g}"),
        ]
        new_level = self._tell_new_level(loss, log_norm, spikes)
        findings = new_level or spikes
        deviation = None
        if cosine is not None:
            deviation = self._state.cosine.score(cosine)
            findings = [*findings, *self._judge_cosine(cosine, deviation)]
        is_good = self._is_good(findings, cosine)
        if not any(finding.acts for finding in findings):
            self._state.loss.add(loss)
            self._state.log_norm.add(log_norm)
            findings = [*findings, *([] if cosine is None else self._learn(cosine, findings))]
        return Observation(tuple(findings), cosine, deviation, is_good, is_judged=True, is_new_level=bool(new_level))

    def _tell_new_level(self, loss: float, log_norm: float, spikes: list[Finding]) -> list[Finding]:
        if not spikes:
            self._row.clear()
            return []
        self._row.add(loss, log_norm, {finding.kind for finding in spikes})
        message = self._row.take_over(self._state.loss, self._state.log_norm)
        return [Finding("level", message)] if message else []

    def _spike(self, kind: Kind, score: float | None, what: str) -> list[Finding]:
        if score is None or score <= _SIGMAS:
            return []
        return [Finding(kind, f"{what} lies {score:.1f} deviations above the steps before it (bound 6)", acts=True)]

    def _judge_cosine(self, cosine: float, deviation: float | None) -> list[Finding]:
        state, settings = self._state, self.settings
        state.seen = [*state.seen, cosine][-2 * settings.window :]
        level = state.cosine.level
        if level is None or deviation is None:
            return []
        if level < settings.low:  # a habit of this model: what is low says nothing here
            found = self._tell_low(level)
        else:
            found = self._judge_low(level)
        if abs(deviation) > _SIGMAS:
            message = (
                f"directional cosine {cosine:.3f} lies {deviation:+.1f} robust deviations from its level {level:.3f}"
            )
            found = [*found, Finding("deviates", f"{message} (bound 6)", acts=settings.act_on_cosine)]
        return found

    def _judge_low(self, level: float) -> list[Finding]:
        """The preset: low cosines that vary, and low ones that do not and are none of this model's habits."""
        settings, seen = self.settings, self._state.seen
        window = seen[-settings.window :]
        spread = variance(window)
        if len(window) == settings.window and spread > settings.variance:
            if all(value < settings.low for value in window[-settings.patience :]):
                message = (
                    f"the last {settings.patience} directional cosines lie below {settings.low} and those of "
                    f"{settings.window} steps vary by {spread:.3f}, more than {settings.variance}"
                )
                return [Finding("unstable", message, acts=settings.act_on_cosine)]
            return []
        track = self._state.cosine
        if len(seen) == 2 * settings.window and all(
            value < settings.low and (track.score(value) or 0.0) < -_STEADY_SIGMAS for value in seen
        ):
            message = (
                f"{len(seen)} directional cosines in a row lie below {settings.low}, and below their level {level:.3f}"
            )
            return [Finding("low", message)]
        return []

    def _tell_low(self, level: float) -> list[Finding]:
        if self._state.is_told_low:
            return []
        self._state.is_told_low = True
        message = (
            f"the directional cosine of this run is {level:.3f} when it is healthy, below low={self.settings.low}: low "
            "values are no sign any more, deviations from the level are"
        )
        return [Finding("level", message)]

    def _is_good(self, findings: list[Finding], cosine: float | None) -> bool:
        if any(finding.blocks for finding in findings):
            return False
        if cosine is None or cosine >= self.settings.good:
            return True
        level = self._state.cosine.level  # within its band, or there would be a finding
        return level is not None and level < self.settings.good

    def _learn(self, cosine: float, findings: list[Finding]) -> list[Finding]:
        """Take a cosine into the past; flagged ones wait until they are a level of their own."""
        state = self._state
        if not any(finding.blocks for finding in findings):
            state.cosine.add(cosine)
            state.changed = []
            return []
        state.changed = [*state.changed, cosine]
        if len(state.changed) < _NEW_LEVEL_STEPS:
            return []
        state.cosine.healthy, state.changed = state.changed, []
        message = f"the directional cosine has stayed near {state.cosine.level:.3f} for {_NEW_LEVEL_STEPS} steps"
        return [Finding("level", f"{message}, which is its level from now on")]
