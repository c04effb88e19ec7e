"""The healthy past of one number, and how far the next one lies from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

__all__ = ["CosineTrack", "Track", "variance"]

_BASE = 8  # values that the next one is compared with: few enough to follow a loss that falls while it is learned
_SIGMA_PER_MAD = 1.4826  # of a normal distribution


def variance(values: Sequence[float]) -> float:
    """Mean square distance from the mean; that of the ``statistics`` module is exact and takes 20 times as long."""
    mean = fmean(values)
    return fmean((value - mean) * (value - mean) for value in values)


@dataclass
class Track:
    """The distances of healthy values from the mean of those just before them, for a z-score of the next one.

    The mean and deviation of the values themselves say little while a model learns: the loss of the first hundred
    steps lies so far above the present one that a fault hides in its spread.

    Attributes:
        floor: smallest deviation that counts, as a share of the mean.
        absolute_floor: the same in the unit of the values.
        length: how many distances are kept.
        needed: how many there must be for a score.
        recent: the last healthy values.
        distances: of the healthy values.
    """

    floor: float = 0.0
    absolute_floor: float = 0.0
    length: int = 128
    needed: int = 64
    recent: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Of the last few healthy values; NaN before there are any."""
        return fmean(self.recent) if self.recent else math.nan

    def score(self, value: float) -> float | None:
        """How many deviations ``value`` lies above the usual distance; None while too few are known."""
        if len(self.distances) < self.needed:
            return None
        smallest = max(self.floor * abs(self.mean), self.absolute_floor)
        sigma = max(math.sqrt(variance(self.distances)), smallest)
        return (value - self.mean - fmean(self.distances)) / sigma if sigma > 0 else 0.0

    def add(self, value: float) -> None:
        """Take in a healthy value."""
        if len(self.recent) == _BASE:
            self.distances = [*self.distances, value - self.mean][-self.length :]
        self.recent = [*self.recent, value][-_BASE:]


@dataclass
class CosineTrack:
    """Healthy cosines, and how far the next one lies from their median in robust deviations.

    Attributes:
        floor: smallest median absolute deviation that counts.
        length: how many values are kept, and needed before anything is said.
        healthy: the last healthy values.
    """

    floor: float
    length: int = 64
    healthy: list[float] = field(default_factory=list)

    @property
    def level(self) -> float | None:
        """The median of the healthy values; None while too few are known."""
        return median(self.healthy) if len(self.healthy) >= self.length else None

    def score(self, value: float) -> float | None:
        """Signed distance from the level in robust deviations; None while too few values are known."""
        level = self.level
        if level is None:
            return None
        deviation = median(abs(v - level) for v in self.healthy)
        return (value - level) / (_SIGMA_PER_MAD * max(deviation, self.floor))

    def add(self, value: float) -> None:
        """Take in a healthy value."""
        self.healthy = [*self.healthy, value][-self.length :]
