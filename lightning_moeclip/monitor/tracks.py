"""The healthy past of one number, and how far the next one lies from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

__all__ = ["CosineTrack", "LossTrack", "Track", "variance"]

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

    @property
    def is_based(self) -> bool:
        """Whether there are as many recent values as the next one is compared with."""
        return len(self.recent) == _BASE

    def score(self, value: float) -> float | None:
        """How many deviations ``value`` lies above the usual distance; None while too few are known."""
        if len(self.distances) < self.needed:
            return None
        smallest = max(self.floor * abs(self.mean), self.absolute_floor)
        sigma = max(math.sqrt(variance(self.distances)), smallest)
        return (value - self.mean - fmean(self.distances)) / sigma if sigma > 0 else 0.0

    def add(self, value: float) -> None:
        """Take in a healthy value."""
        if self.is_based:
            self.distances = [*self.distances, value - self.mean][-self.length :]
        self.recent = [*self.recent, value][-_BASE:]

    def start_from(self, values: Sequence[float]) -> None:
        """Forget the past for that of another level; there is no score until enough distances are known again."""
        self.recent, self.distances = [], []
        for value in values:
            self.add(value)


@dataclass
class LossTrack:
    """The healthy past of a loss, compared by ratio while it is positive and by difference otherwise.

    The noise of a loss often grows with it and has a heavy upper tail, which its logarithm has not.

    Attributes:
        floor: smallest deviation that counts, as a share of the loss.
        values: the losses.
        logs: their logarithms, since the last one that was not positive.
    """

    floor: float
    values: Track = field(init=False)
    logs: Track = field(init=False)

    def __post_init__(self) -> None:
        self.values, self.logs = Track(floor=self.floor), Track(absolute_floor=self.floor)

    @property
    def recent(self) -> list[float]:
        """The last healthy losses."""
        return self.values.recent

    @property
    def mean(self) -> float:
        """Of the last few healthy losses; NaN before there are any."""
        return self.values.mean

    def score(self, value: float) -> float | None:
        """How many deviations ``value`` lies above the usual distance; None while too few are known."""
        score = self.logs.score(math.log(value)) if value > 0 and self.logs.is_based else None
        return self.values.score(value) if score is None else score

    def add(self, value: float) -> None:
        """Take in a healthy loss."""
        self.values.add(value)
        if value > 0:
            self.logs.add(math.log(value))
        else:
            self.logs.recent = []

    def start_from(self, values: Sequence[float]) -> None:
        """Forget the past for that of another level, as ``Track.start_from`` does."""
        self.values.start_from([])
        self.logs.start_from([])
        for value in values:
            self.add(value)


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
