"""Losses and gradient norms that were flagged one after the other: a fault, or the level of a run that changed."""

import math
from collections.abc import Sequence
from statistics import median

from lightning_moeclip.monitor.tracks import LossTrack, Track

__all__ = ["FlaggedRow"]

_NEW_LEVEL_BATCHES = 32
# another curriculum, loss weight or learning rate multiplies them by a few; what breaks a run, by more
_MAX_LOSS_RATIO, _MAX_NORM_RATIO = 10.0, 100.0


class FlaggedRow:
    """Counts batches in a row whose loss or gradient norm was flagged. No rollback takes it back."""

    def __init__(self) -> None:
        self._numbers: list[tuple[float, float]] = []
        self._kinds: list[set[str]] = []

    def add(self, loss: float, log_norm: float, kinds: set[str]) -> None:
        """Take in a flagged batch.

        Args:
            loss: finite.
            log_norm: logarithm of the gradient norm.
            kinds: which of "loss" and "grad_norm" were flagged.
        """
        self._numbers = [*self._numbers, (loss, log_norm)][-_NEW_LEVEL_BATCHES:]
        self._kinds = [*self._kinds, kinds][-_NEW_LEVEL_BATCHES:]

    def clear(self) -> None:
        """Forget them, after a batch that was not flagged."""
        self._numbers, self._kinds = [], []

    def take_over(self, loss: LossTrack, log_norm: Track) -> str:
        """Make a long row within reach the past of what was flagged, but for its last batch, and forget it.

        Returns:
            What is told of it; empty when there is nothing to take over.
        """
        if len(self._numbers) < _NEW_LEVEL_BATCHES:
            return ""
        kinds = set[str]().union(*self._kinds)
        losses, norms = ([numbers[i] for numbers in self._numbers] for i in (0, 1))
        reaches = {"loss": _is_loss_in_reach(loss.mean, losses), "grad_norm": _is_norm_in_reach(log_norm.mean, norms)}
        if not all(reaches[kind] for kind in kinds):
            return ""
        told = []
        if "loss" in kinds:
            told.append(f"the loss has stayed near {median(losses):.4g} after {loss.mean:.4g}")
            loss.start_from(losses[:-1])
        if "grad_norm" in kinds:
            new, old = math.exp(median(norms)), math.exp(log_norm.mean)
            told.append(f"the gradient norm has stayed near {new:.4g} after {old:.4g}")
            log_norm.start_from(norms[:-1])
        self.clear()
        return f"{' and '.join(told)} for {_NEW_LEVEL_BATCHES} batches, which is the level from now on"


def _is_loss_in_reach(old: float, losses: Sequence[float]) -> bool:
    new = median(losses)
    if old > 0 and new > 0:
        return new <= _MAX_LOSS_RATIO * old
    return abs(new - old) <= _MAX_LOSS_RATIO * abs(old)


def _is_norm_in_reach(old: float, norms: Sequence[float]) -> bool:
    return median(norms) - old <= math.log(_MAX_NORM_RATIO)
