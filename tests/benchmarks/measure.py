"""What the benchmarks share: interleaved rounds, paired ratios with a bootstrap interval, CSV rows with their origin.

On a shared machine a millisecond means little. All arms take turns within one run, each round gives one ratio, and
a row tells the median ratio, its interval and the commit.
"""

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from lightning_moeclip.binding import pl
from tests.benchmarks.origin import RESULTS, ROOT, device_name, is_dirty, short_commit

__all__ = [
    "RESULTS",
    "ROOT",
    "Figure",
    "Row",
    "bootstrap",
    "device_name",
    "exact",
    "is_dirty",
    "middle",
    "paired_ratio",
    "row",
    "short_commit",
    "take_turns",
    "write_rows",
]

_RESAMPLES = 4000


@dataclass(frozen=True)
class Figure:
    """A median and the 95 % bootstrap interval around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One line of a results file."""

    name: str
    median_ratio: float
    low: float
    high: float
    rounds: int
    ranks: int
    device: str
    torch: str
    lightning: str
    commit: str


def take_turns(
    arms: Mapping[str, Callable[[], float | None]],
    *,
    rounds: int,
    warmup: int = 3,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time every arm once per round, in an order that rotates from round to round.

    Args:
        arms: what to time, by name; one that returns a number has timed itself, in seconds.
        rounds: timed rounds.
        warmup: rounds before, not timed.
        before: called before each turn and not timed, such as a barrier.

    Returns:
        Seconds by arm, one per round.
    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-warmup, rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            before()
            began = time.perf_counter()
            told = arms[name]()
            took = time.perf_counter() - began if told is None else told
            if index >= 0:
                seconds[name].append(took)
    return seconds


def bootstrap(
    statistic: Callable[[torch.Tensor], torch.Tensor], num_rounds: int, *, seed: int = 0
) -> tuple[Figure, float]:
    """Interval of a statistic over rounds, by drawing rounds with replacement.

    Args:
        statistic: from round indices [resamples, rounds] to one value each, [resamples].
        num_rounds: rounds that were measured.
        seed: of the draws.

    Returns:
        The statistic of the rounds as they are with its percentile interval, and the standard deviation of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(num_rounds, (_RESAMPLES, num_rounds), generator=generator)
    values = statistic(draws).double()
    point = statistic(torch.arange(num_rounds)[None]).item()
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Figure(point, low, high), values.std().item()


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """Median over rounds of ours / theirs, both measured in the same round."""
    ratios = torch.tensor(ours, dtype=torch.float64) / torch.tensor(theirs, dtype=torch.float64)
    return bootstrap(lambda rounds: middle(ratios[rounds]), len(ratios))[0]


def middle(values: torch.Tensor) -> torch.Tensor:
    """Median along the last dim, the mean of the two middle values of an even number."""
    return torch.quantile(values, 0.5, dim=-1)


def exact(value: float) -> Figure:
    """A figure that was counted and has no spread."""
    return Figure(value, value, value)


def row(name: str, figure: Figure, *, rounds: int, ranks: int, device: str | None = None) -> Row:
    """A line for a figure of this machine, these versions and this commit."""
    return Row(
        name,
        round(figure.median, 4),
        round(figure.low, 4),
        round(figure.high, 4),
        rounds,
        ranks,
        device or device_name(),
        torch.__version__,
        pl.__version__,
        short_commit(),
    )


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Replace a results file by the rows of this run, and print them; None only prints."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(line) for line in rows)
    for line in rows:
        print(f"{line.name:48} {line.median_ratio:8.4g}   95 % interval {line.low:.4g} .. {line.high:.4g}")
