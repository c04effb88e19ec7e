"""The panel of the experts: how the tokens of each layer were spread over them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_moeclip.monitor.variance_history import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LoadPanel"]

_MOST_NUMBERS = 16  # experts of a layer, for which there is room for numbers


class LoadPanel:
    """Draws a row for each layer and a column for each expert, coloured by its tokens against an even share.

    Attributes:
        counts: tokens by expert, or any multiple of them, by name of the layer.
        source: whose tokens they are, and since when.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[float]] = {}
        self.source = ""

    def set(self, counts: Mapping[str, Sequence[float]], *, source: str) -> None:
        """Take what the next picture shows; see the class."""
        self.counts = {name: list(values) for name, values in counts.items()}
        self.source = source

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the layers, as they are shown."""
        return tuple(map(shorten, self.counts))

    @property
    def num_columns(self) -> int:
        """Experts of the layer that has the most."""
        return max((len(values) for values in self.counts.values()), default=0)

    def build(self, axes: "Axes", *, font_size: float) -> None:
        """Make the artists for as many rows and columns as there are.

        Args:
            axes: empty; its ground is seen where a layer has no such expert, or no token.
            font_size: of the names, in points.
        """
        rows, num_columns = self.rows, self.num_columns
        self._image = axes.imshow(
            np.zeros((len(rows), num_columns)),
            aspect="auto",
            interpolation="nearest",
            cmap="coolwarm",
            vmin=0.0,
            vmax=2.0,
        )
        axes.set_yticks(range(len(rows)), rows, fontsize=font_size)
        axes.set_xticks(range(0, num_columns, max(1, num_columns // 16)))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("expert", fontsize=10)
        self._title = axes.set_title("", fontsize=9, loc="left", pad=4)
        numbers = range(num_columns if num_columns <= _MOST_NUMBERS else 0)
        self._texts = [
            [axes.text(column, row, "", ha="center", va="center", fontsize=font_size) for column in numbers]
            for row in range(len(rows))
        ]

    def fill(self) -> None:
        """Show what was set last, in the artists of :meth:`build`."""
        relative = np.full((len(self.counts), self.num_columns), np.nan)
        for row, counts in enumerate(self.counts.values()):
            total = sum(counts)
            if total > 0:
                relative[row, : len(counts)] = [count * len(counts) / total for count in counts]
            for column, text in enumerate(self._texts[row]):
                has_share = column < len(counts) and total > 0
                text.set_text(f"{counts[column] / total:.0%}" if has_share else "")
        self._image.set_data(relative)
        self._title.set_text(f"expert load of {self.source}: blue none, grey even, red twice and more")
