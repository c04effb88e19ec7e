"""Gradient variances by layer over the last samples, in plain values.

A cell is one float: a positive variance, 0.0 where every element of the gradient is exactly zero, infinity where an
element is not finite, and NaN where there is no gradient. A row of one element, such as ``logit_scale``, has no
variance: its cell is the square of the element, and its label says so.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from lightning_moeclip.gradients.report import GradSums, LayerKey

__all__ = ["NO_TOWER", "Outlier", "Sample", "VarianceHistory", "label_of", "rows_of", "shorten"]

NO_TOWER = "shared"  # panel of what belongs to no tower
_KINDS = {"dense": "", "expert": "experts", "router": "router", "projection": "projection", "logit_scale": "scale"}
_HEAD_ROOM = 2  # decades that the colour scale goes beyond the first samples, at both ends
_SMALLEST = sys.float_info.min  # variance of equal elements that are not zero
_MAX_LABEL = 32

Row = dict[str, float]


@dataclass(frozen=True)
class Sample:
    """What one step's gradients were.

    Attributes:
        step: of the run, on any axis that only grows.
        cells: by row, in the order of the module.
        towers: the same over all elements of a tower; NaN too where these are fewer than two.
    """

    step: int
    cells: Mapping[LayerKey, float]
    towers: Mapping[str | None, float]


class Outlier(NamedTuple):
    """A row whose last cell lies far from its own median, in decades; see :meth:`VarianceHistory.worst`."""

    key: LayerKey
    cell: float
    median: float
    decades: float


def rows_of(parts: Iterable[tuple[Sequence[LayerKey], GradSums]]) -> dict[LayerKey, Row]:
    """Sums by row, over the optimizers of one step: each has stepped some of the parameters.

    Args:
        parts: keys and sums of each optimizer.

    Returns:
        By row, the sums of :class:`GradSums` by name.
    """
    names = [field.name for field in fields(GradSums)]
    found: dict[LayerKey, Row] = {}
    for keys, sums in parts:
        columns = [getattr(sums, name).tolist() for name in names]
        for key, values in zip(keys, zip(*columns, strict=True), strict=True):
            row = dict(zip(names, values, strict=True))
            found[key] = _added(found[key], row) if key in found else row
    return found


def _added(first: Row, second: Row) -> Row:
    row = {name: first[name] + second[name] for name in first}
    row["maximum"] = max(first["maximum"], second["maximum"])
    return row


def _cell(row: Row, *, has_square: bool) -> float:
    """See the file; ``has_square`` says whether one element alone gives its square, or NaN."""
    size = row["size"]
    if size == 0:
        return math.nan
    if row["num_nonfinite"] > 0:
        return math.inf
    if row["num_zeros"] == size:
        return 0.0
    if size == 1:
        return max(row["square"], _SMALLEST) if has_square else math.nan
    variance = (row["square"] - row["total"] ** 2 / size) / (size - 1)
    return max(variance, _SMALLEST)


def label_of(key: LayerKey, *, is_square: bool = False) -> str:
    """Name of a row, such as "blocks.3 experts".

    Args:
        key: of the row.
        is_square: it shows the square of its one element.
    """
    kind = _KINDS.get(key.kind, key.kind)
    last = key.layer.rpartition(".")[2]
    says_kind = kind in last or key.kind in last
    label = key.layer if says_kind else f"{key.layer} {kind}".strip()
    return f"{label or key.kind} (g²)" if is_square else label or key.kind


def shorten(label: str, *, length: int = _MAX_LABEL) -> str:
    """A name of at most ``length`` characters, with its middle left out."""
    if len(label) <= length:
        return label
    tail = (length - 1) * 2 // 3  # what tells layers apart is at the end
    return f"{label[: length - 1 - tail]}…{label[-tail:]}"


class VarianceHistory:
    """The last samples of a run and the range of their colour scale.

    Attributes:
        window: number of samples that are kept.
        samples: oldest first.
        single: rows of one element.
    """

    def __init__(self, *, window: int = 60) -> None:
        self.window = window
        self.samples: list[Sample] = []
        self.single: set[LayerKey] = set()
        self._range: tuple[float, float] | None = None

    def clear(self) -> None:
        """Forget the samples and the range, as another run begins."""
        self.samples = []
        self.single = set()
        self._range = None

    def add(self, step: int, parts: Iterable[tuple[Sequence[LayerKey], GradSums]]) -> Sample:
        """Take the statistics of a step; those of the same step and of later ones, from before a return, go.

        Args:
            step: the sample's.
            parts: keys and sums of each optimizer that stepped in it.
        """
        rows = rows_of(parts)
        by_tower: dict[str | None, Row] = {}
        for key, row in rows.items():
            by_tower[key.tower] = _added(by_tower[key.tower], row) if key.tower in by_tower else row
        self.single -= {key for key, row in rows.items() if row["size"] > 1}
        self.single |= {key for key, row in rows.items() if row["size"] == 1}
        cells = {key: _cell(row, has_square=True) for key, row in rows.items()}
        sample = Sample(step, cells, {t: _cell(row, has_square=False) for t, row in by_tower.items()})
        self.samples = [*(s for s in self.samples if s.step < step), sample][-self.window :]
        return sample

    def freeze_range(self) -> tuple[float, float]:
        """Bounds of the colour scale, powers of ten: chosen at the first call with a positive variance, then kept.

        They span the samples of that time, less the outer twentieths, and two decades more at both ends.
        """
        if self._range is not None:
            return self._range
        logs = sorted(math.log10(c) for s in self.samples for c in s.cells.values() if _SMALLEST < c < math.inf)
        if not logs:
            return 1e-12, 1.0
        low, high = logs[len(logs) // 20], logs[-1 - len(logs) // 20]
        self._range = 10.0 ** (math.floor(low) - _HEAD_ROOM), 10.0 ** (math.ceil(high) + _HEAD_ROOM)
        return self._range

    def keys(self) -> list[LayerKey]:
        """Rows of all samples kept: in the order of the newest, each row it lacks behind its neighbour of before."""
        order = dict.fromkeys(self.samples[-1].cells) if self.samples else {}
        for sample in reversed(self.samples[:-1]):
            # rows seldom come or go, and then this is all there is to do
            if sample.cells.keys() <= order.keys():
                continue
            neighbour: LayerKey | None = None
            lacking: dict[LayerKey | None, list[LayerKey]] = {}
            for key in sample.cells:
                if key in order:
                    neighbour = key
                else:
                    lacking.setdefault(neighbour, []).append(key)
            first = lacking.get(None, [])
            order = dict.fromkeys([*first, *(row for key in order for row in (key, *lacking.get(key, [])))])
        return list(order)

    def rows_by_tower(self) -> dict[str | None, list[LayerKey]]:
        """Rows of each tower, both in the order of :meth:`keys`; what belongs to no tower comes last."""
        rows: dict[str | None, list[LayerKey]] = {}
        for key in self.keys():
            rows.setdefault(key.tower, []).append(key)
        if None in rows:
            rows[None] = rows.pop(None)
        return rows

    def log_ratios(self, towers: Iterable[str | None]) -> tuple[str, str, list[float]] | None:
        """Two towers and log2 of the ratio of their variances by sample, NaN where one is not positive and finite.

        Args:
            towers: what there is, such as :meth:`rows_by_tower`.

        Returns:
            None unless there are exactly two towers.
        """
        named = [tower for tower in towers if tower is not None]
        if len(named) != 2:
            return None
        first, second = named
        pairs = [(s.towers.get(first, math.nan), s.towers.get(second, math.nan)) for s in self.samples]
        ratios = [math.log2(a) - math.log2(b) if 0 < a < math.inf and 0 < b < math.inf else math.nan for a, b in pairs]
        return first, second, ratios

    def worst(self, *, number: int = 5) -> list[Outlier]:
        """Rows of the newest sample by their distance from their own median over the samples kept.

        The distance is |log10(cell / median)|, in decades. Zeros count as a logarithm of minus infinity, so a row of
        zeros is infinitely far away unless it mostly was so before; a row that is not finite always is. Medians are of
        the finite cells with a gradient. Rows without a gradient in the newest sample are left out.
        """
        if not self.samples:
            return []
        found = []
        for key, cell in self.samples[-1].cells.items():
            before = [s.cells[key] for s in self.samples if math.isfinite(s.cells.get(key, math.nan))]
            median = statistics.median_low(before) if before else math.nan
            if not math.isnan(cell):
                found.append(Outlier(key, cell, median, _decades(cell, median)))
        return sorted(found, key=lambda outlier: -outlier.decades)[:number]

    def state_dict(self) -> dict[str, Any]:
        """Samples and frozen range in plain values."""
        samples = [
            {
                "step": sample.step,
                "cells": [[*key, cell] for key, cell in sample.cells.items()],
                "towers": [[tower, cell] for tower, cell in sample.towers.items()],
            }
            for sample in self.samples
        ]
        single = [list(key) for key in sorted(self.single, key=str)]
        return {"range": None if self._range is None else list(self._range), "samples": samples, "single": single}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._range = None if state["range"] is None else (state["range"][0], state["range"][1])
        self.single = {LayerKey(*key) for key in state["single"]}
        self.samples = [
            Sample(s["step"], {LayerKey(*row[:3]): row[3] for row in s["cells"]}, dict(s["towers"]))
            for s in state["samples"]
        ][-self.window :]


def _decades(cell: float, median: float) -> float:
    if cell == math.inf:
        return math.inf
    if cell == 0.0 or median == 0.0:
        return 0.0 if cell == median else math.inf
    return abs(math.log10(cell) - math.log10(median))
