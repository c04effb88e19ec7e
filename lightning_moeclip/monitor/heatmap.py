"""The picture of gradient variances: layer by time for each tower, their ratio, and the load of experts.

Colours of the towers' panels: viridis on a log scale that stays for the run; white where all elements are exactly zero,
magenta where one is not finite, grey where there is no gradient.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_moeclip.gradients.report import GradSums, LayerKey
from lightning_moeclip.monitor.load_panel import LoadPanel
from lightning_moeclip.monitor.variance_history import NO_TOWER, VarianceHistory, label_of, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABSENT", "NON_FINITE", "ZERO", "Heatmap", "check_matplotlib", "warm_up"]

# RGB in 0..255, as they are in the picture
ZERO, NON_FINITE, ABSENT = (255, 255, 255), (214, 0, 89), (217, 217, 217)
_DPI = 100
# sizes in inches
_PLOT_WIDTH, _GAP, _TOP, _BOTTOM, _RIGHT = 7.2, 0.32, 0.65, 0.6, 1.15
_BAR_HEIGHT, _RATIO_HEIGHT = 5.0, 1.3
_MANY_ROWS = 60  # from here on rows are lower

_Rows = Mapping[str | None, Sequence[LayerKey]]


def check_matplotlib() -> None:
    """Refuse to go on without the package that draws.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "The variance heatmap draws with matplotlib, which is not installed. "
            "Run: pip install 'lightning-moeclip[plots]'"
        ) from error


@functools.cache
def warm_up() -> None:
    """Load what the first picture of a process needs, half a second of modules, fonts and glyphs, before training."""
    history = VarianceHistory()
    one = torch.ones(2, dtype=torch.float64)
    sums = GradSums(**{field.name: one for field in fields(GradSums)})
    history.add(0, [([LayerKey(tower, "", "dense") for tower in ("image", "text")], sums)])
    Heatmap(history).render()


@dataclass(frozen=True)
class _Layout:
    """What the axes are made for; as long as it is equal only their data is swapped."""

    range: tuple[float, float]
    panels: tuple[tuple[str, tuple[str, ...]], ...]
    ratio: tuple[str, str] | None
    load_rows: tuple[str, ...]
    load_columns: int

    @property
    def num_rows(self) -> int:
        return sum(len(labels) for _, labels in self.panels)

    @property
    def row_height(self) -> float:
        return 0.2 if self.num_rows < _MANY_ROWS else 0.15

    @property
    def font_size(self) -> float:
        return 8.0 if self.num_rows < _MANY_ROWS else 7.0


class Heatmap:
    """Draws a history, on one figure whose data is swapped.

    Attributes:
        history: what is drawn.
        note: behind the title, such as "local to rank 0".
        loads: the panel of the experts.
        figure: the figure, made by the first :meth:`render` and anew when rows come or go.
    """

    figure: "Figure"

    def __init__(self, history: VarianceHistory, *, note: str = "") -> None:
        self.history = history
        self.note = note
        self.loads = LoadPanel()
        self._layout: _Layout | None = None

    def set_loads(self, counts: Mapping[str, Sequence[float]], *, source: str) -> None:
        """Show how tokens were spread over experts.

        Args:
            counts: tokens by expert, or any multiple of them, by name of the layer.
            source: whose tokens they are, and since when, such as "rank 0 since step 100".
        """
        self.loads.set(counts, source=source)

    def render(self) -> NDArray[np.uint8]:
        """The picture as it stands, [height, width, 3].

        Raises:
            ValueError: the history has no samples.
        """
        if not self.history.samples:
            raise ValueError("The history has no samples to draw. Call VarianceHistory.add(step, parts) first.")
        rows = self.history.rows_by_tower()
        ratio = self.history.log_ratios(rows)
        layout = self._new_layout(rows, None if ratio is None else ratio[:2])
        if layout != self._layout:
            self._build(layout)
            self._layout = layout
        self._fill(rows, None if ratio is None else ratio[2])
        canvas: Any = self.figure.canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    def _new_layout(self, rows: _Rows, ratio: tuple[str, str] | None) -> _Layout:
        single = self.history.single
        panels = tuple(
            (NO_TOWER if tower is None else tower, tuple(shorten(label_of(k, is_square=k in single)) for k in keys))
            for tower, keys in rows.items()
        )
        return _Layout(self.history.freeze_range(), panels, ratio, self.loads.rows, self.loads.num_columns)

    def _build(self, layout: _Layout) -> None:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        self._norm = LogNorm(*layout.range, clip=True)
        self._colours = colormaps["viridis"]
        heights = [max(1, len(rows)) * layout.row_height for _, rows in layout.panels]
        heights += [_RATIO_HEIGHT] if layout.ratio else []
        heights += [len(layout.load_rows) * layout.row_height] if layout.load_rows else []
        gaps = _GAP * (len(heights) - 1) + (_GAP if layout.load_rows else 0.0)
        # a picture is no lower than its colour bar and the names beside it need
        height = max(_TOP + sum(heights) + gaps + _BOTTOM, 3.2)
        names = [*(name for _, rows in layout.panels for name in rows), *layout.load_rows]
        left = 0.3 + max(0.6, _widest(names, layout))
        self.figure = Figure(figsize=(left + _PLOT_WIDTH + _RIGHT, height), dpi=_DPI)
        FigureCanvasAgg(self.figure)
        self._from_top, self._left = _TOP, left

        self._images = [self._add_panel(name, rows, layout) for name, rows in layout.panels]
        self._time_axes: list[Axes] = [image.axes for image in self._images]
        self._add_colour_bar(self._from_top - _GAP - _TOP)
        if layout.ratio:
            self._add_ratio(*layout.ratio)
        for axes in self._time_axes[:-1]:
            axes.tick_params(labelbottom=False)
        self._time_axes[-1].set_xlabel("step", fontsize=10)
        if layout.load_rows:
            self._add_loads(layout)
        self._add_head()

    def _next_axes(self, height: float, *, width: float = _PLOT_WIDTH) -> "Axes":
        """Axes below those before."""
        total_width, total_height = self.figure.get_size_inches()
        bottom = total_height - self._from_top - height
        self._from_top += height + _GAP
        return self.figure.add_axes(
            (self._left / total_width, bottom / total_height, width / total_width, height / total_height)
        )

    def _add_panel(self, name: str, rows: Sequence[str], layout: _Layout) -> Any:
        axes = self._next_axes(len(rows) * layout.row_height)
        image = axes.imshow(np.ones((len(rows), 1, 4)), aspect="auto", interpolation="nearest")
        axes.set_yticks(range(len(rows)), rows, fontsize=layout.font_size)
        axes.set_title(name, fontsize=11, fontweight="bold", loc="left", pad=4)
        return image

    def _add_colour_bar(self, height: float) -> None:
        from matplotlib.cm import ScalarMappable

        total_width, total_height = self.figure.get_size_inches()
        height = min(max(height, 1.5), _BAR_HEIGHT)
        place = (
            (self._left + _PLOT_WIDTH + 0.15) / total_width,
            (total_height - _TOP - height) / total_height,
            0.18 / total_width,
            height / total_height,
        )
        bar = self.figure.colorbar(
            ScalarMappable(self._norm, self._colours), cax=self.figure.add_axes(place), extend="both"
        )
        bar.set_label("gradient variance (log scale)", fontsize=9)

    def _add_ratio(self, first: str, second: str) -> None:
        axes = self._next_axes(_RATIO_HEIGHT)
        (self._ratio_line,) = axes.plot([], [], color="black", linewidth=1.0, marker=".", markersize=4)
        axes.axhline(0.0, color="0.6", linewidth=0.8, zorder=0)
        axes.tick_params(labelsize=8)
        title = f"log2({shorten(first)} / {shorten(second)}) of the towers' variances"
        axes.set_title(title, fontsize=9, loc="left", pad=4)
        self._time_axes.append(axes)

    def _add_loads(self, layout: _Layout) -> None:
        self._from_top += _GAP  # room for the steps under the axis above
        axes = self._next_axes(len(layout.load_rows) * layout.row_height)
        axes.set_facecolor(tuple(c / 255 for c in ABSENT))
        self.loads.build(axes, font_size=layout.font_size)

    def _add_head(self) -> None:
        from matplotlib.patches import Patch

        width, height = self.figure.get_size_inches()
        self._title = self.figure.text(self._left / width, 1 - 0.1 / height, "", fontsize=12, ha="left", va="top")
        legend = {"exactly 0": ZERO, "NaN/Inf": NON_FINITE, "no gradient": ABSENT}
        self.figure.legend(
            handles=[
                Patch(facecolor=[c / 255 for c in colour], edgecolor="black", linewidth=0.5, label=label)
                for label, colour in legend.items()
            ],
            ncols=3,
            loc="upper right",
            fontsize=8,
            frameon=False,
            bbox_to_anchor=(1.0, 1.0),
        )

    def _fill(self, rows: _Rows, ratio: Sequence[float] | None) -> None:
        history = self.history
        number = len(history.samples)
        for image, keys in zip(self._images, rows.values(), strict=True):
            cells = np.array([[s.cells.get(key, math.nan) for s in history.samples] for key in keys])
            image.set_data(self._colour(cells))
            image.set_extent((-0.5, number - 0.5, len(keys) - 0.5, -0.5))
        if ratio is not None:
            self._ratio_line.set_data(range(number), ratio)
            known = [value for value in ratio if not math.isnan(value)]
            self._time_axes[-1].set_ylim(min([-1.0, *known]) - 0.3, max([1.0, *known]) + 0.3)
        ticks = sorted({round(i * (number - 1) / 7) for i in range(8)})
        for axes in self._time_axes:
            axes.set_xlim(-0.5, number - 0.5)
            axes.set_xticks(ticks, [str(history.samples[i].step) for i in ticks], fontsize=9)
        if self.loads.rows:
            self.loads.fill()
        note = f", {self.note}" if self.note else ""
        self._title.set_text(f"Gradient variance, step {history.samples[-1].step}{note}")

    def _colour(self, cells: NDArray[np.float64]) -> NDArray[np.uint8]:
        """[rows, samples] cells to [rows, samples, 3] colours."""
        is_value = np.isfinite(cells) & (cells > 0)
        rgba = self._colours(self._norm(np.where(is_value, cells, 1.0)), bytes=True)
        colours = np.asarray(rgba)[..., :3].copy()
        colours[cells == 0] = ZERO
        colours[np.isposinf(cells)] = NON_FINITE
        colours[np.isnan(cells)] = ABSENT
        return colours


def _widest(names: Sequence[str], layout: _Layout) -> float:
    """Width in inches of the longest of some names."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=layout.font_size)
    renderer = RendererAgg(1, 1, _DPI)
    return max(renderer.get_text_width_height_descent(name, font, ismath=False)[0] for name in names) / _DPI
