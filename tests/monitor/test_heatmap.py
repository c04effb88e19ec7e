"""Colours of known cells are read back from the picture."""

import math
import sys

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import LogNorm

from lightning_moeclip.gradients.report import LayerKey
from lightning_moeclip.gradients.statistics import sums_of
from lightning_moeclip.monitor.heatmap import ABSENT, NON_FINITE, ZERO, Heatmap, check_matplotlib
from lightning_moeclip.monitor.variance_history import VarianceHistory

WAVE = torch.tensor([1.0, -1.0, 3.0, -3.0], dtype=torch.float64)
IMAGE = [LayerKey("image", f"blocks.{i}", "expert" if i % 2 else "dense") for i in range(4)]
TEXT = [LayerKey("text", f"blocks.{i}", "dense") for i in range(2)]
SCALE = LayerKey(None, "logit_scale", "logit_scale")


def sample(**changes: torch.Tensor) -> dict[LayerKey, torch.Tensor]:
    """Gradients of all rows; ``image_2=...`` changes one."""
    rows = {key: WAVE * 10.0 ** -(index + 1) for index, key in enumerate([*IMAGE, *TEXT])}
    rows[SCALE] = torch.tensor([0.1], dtype=torch.float64)
    for name, gradient in changes.items():
        tower, _, index = name.partition("_")
        rows[{"image": IMAGE, "text": TEXT}[tower][int(index)]] = gradient
    return rows


def heatmap_of(*samples: dict[LayerKey, torch.Tensor], note: str = "") -> Heatmap:
    history = VarianceHistory()
    for index, gradients in enumerate(samples):
        history.add(10 * index, [sums_of(gradients.items())])
    return Heatmap(history, note=note)


def panel_named(heatmap: Heatmap, title: str) -> int:
    return [axes.get_title(loc="left") for axes in heatmap.figure.axes].index(title)


def colour_at(heatmap: Heatmap, picture: np.ndarray, title: str, row: int, column: int) -> tuple[int, ...]:
    axes = heatmap.figure.axes[panel_named(heatmap, title)]
    x, y = axes.transData.transform((column, row))
    return tuple(int(value) for value in picture[round(picture.shape[0] - y), round(x)])


def viridis(variance: float, bounds: tuple[float, float]) -> tuple[int, ...]:
    return tuple(colormaps["viridis"](LogNorm(*bounds, clip=True)(variance), bytes=True)[:3])


def test_cells_have_the_colours_of_the_legend() -> None:
    heatmap = heatmap_of(
        sample(),
        sample(image_1=0 * WAVE, text_0=torch.empty(0)),
        sample(image_3=WAVE * math.nan, text_1=WAVE * math.inf),
    )
    picture = heatmap.render()
    assert picture.dtype == np.uint8
    bounds = heatmap.history.freeze_range()
    for index, key in enumerate(IMAGE):
        wanted = viridis(heatmap.history.samples[0].cells[key], bounds)
        assert colour_at(heatmap, picture, "image", index, 0) == wanted
    assert colour_at(heatmap, picture, "image", 1, 1) == ZERO == (255, 255, 255)
    assert colour_at(heatmap, picture, "text", 0, 1) == ABSENT
    assert colour_at(heatmap, picture, "image", 3, 2) == NON_FINITE
    assert colour_at(heatmap, picture, "text", 1, 2) == NON_FINITE
    assert colour_at(heatmap, picture, "shared", 0, 2) == viridis(0.01, bounds)
    texts = [text.get_text() for text in heatmap.figure.legends[0].get_texts()]
    assert texts == ["exactly 0", "NaN/Inf", "no gradient"]


def test_colours_keep_their_meaning_when_gradients_explode() -> None:
    heatmap = heatmap_of(sample())
    before = colour_at(heatmap, heatmap.render(), "image", 0, 0)
    history = heatmap.history
    history.add(10, [sums_of(sample(image_0=1e9 * WAVE, text_0=1e-30 * WAVE).items())])
    picture = heatmap.render()
    assert colour_at(heatmap, picture, "image", 0, 0) == before
    assert colour_at(heatmap, picture, "image", 0, 1) == viridis(1e9, (0.1, 1.0))  # the brightest
    assert colour_at(heatmap, picture, "text", 0, 1) == viridis(1e-9, (0.1, 1.0))  # the darkest


def test_a_figure_is_kept_while_its_rows_stay_and_its_data_is_swapped() -> None:
    heatmap = heatmap_of(sample())
    first = heatmap.render()
    figure = heatmap.figure
    heatmap.history.add(10, [sums_of(sample(image_2=0 * WAVE).items())])
    second = heatmap.render()
    assert heatmap.figure is figure
    assert first.shape == second.shape
    assert colour_at(heatmap, second, "image", 2, 1) == ZERO
    assert not np.shares_memory(first, second)


def test_a_layer_that_is_unfrozen_is_grey_before() -> None:
    frozen = {key: gradient for key, gradient in sample().items() if key != IMAGE[1]}
    heatmap = heatmap_of(frozen)
    low = heatmap.render()
    heatmap.history.add(10, [sums_of(sample().items())])
    picture = heatmap.render()
    assert picture.shape[0] > low.shape[0]
    assert colour_at(heatmap, picture, "image", 1, 0) == ABSENT
    wanted = viridis(heatmap.history.samples[1].cells[IMAGE[1]], heatmap.history.freeze_range())
    assert colour_at(heatmap, picture, "image", 1, 1) == wanted


def test_only_the_last_sixty_samples_are_drawn() -> None:
    heatmap = heatmap_of(sample(image_0=0 * WAVE), *[sample()] * 60)
    picture = heatmap.render()
    assert colour_at(heatmap, picture, "image", 0, 0) != ZERO
    image = heatmap.figure.axes[0].images[0]
    assert image.get_array().shape[:2] == (4, 60)
    ratio = heatmap.figure.axes[panel_named(heatmap, "log2(image / text) of the towers' variances")]
    assert ratio.get_xticklabels()[0].get_text() == "10"


def test_expert_rows_are_named_and_the_title_says_what_is_shown() -> None:
    heatmap = heatmap_of(sample(), note="local to rank 0")
    heatmap.render()
    names = [label.get_text() for label in heatmap.figure.axes[0].get_yticklabels()]
    assert names == ["blocks.0", "blocks.1 experts", "blocks.2", "blocks.3 experts"]
    shared = heatmap.figure.axes[panel_named(heatmap, "shared")]
    assert [label.get_text() for label in shared.get_yticklabels()] == ["logit_scale (g²)"]
    assert "Gradient variance, step 0, local to rank 0" in [text.get_text() for text in heatmap.figure.texts]


def test_second_panel_draws_log2_of_the_two_towers() -> None:
    heatmap = heatmap_of({IMAGE[0]: WAVE, TEXT[0]: 4 * WAVE}, {IMAGE[0]: 8 * WAVE, TEXT[0]: WAVE})
    heatmap.render()
    axes = heatmap.figure.axes[panel_named(heatmap, "log2(image / text) of the towers' variances")]
    assert axes.lines[0].get_ydata() == pytest.approx([-4.0, 6.0])


def test_load_panel_shows_each_expert_against_an_even_share() -> None:
    heatmap = heatmap_of(sample())
    heatmap.set_loads({"image blocks.1": [1, 1, 1, 1], "text blocks.1": [1, 1]}, source="all ranks")
    heatmap.render()
    figure = heatmap.figure
    heatmap.set_loads({"image blocks.1": [6, 2, 0, 0], "text blocks.1": [0, 0]}, source="rank 0")
    picture = heatmap.render()
    assert heatmap.figure is figure
    title = next(a.get_title(loc="left") for a in heatmap.figure.axes if "expert load" in a.get_title(loc="left"))
    assert title == "expert load of rank 0: blue none, grey even, red twice and more"
    axes = heatmap.figure.axes[panel_named(heatmap, title)]
    relative = axes.images[0].get_array()
    assert relative[0].tolist() == [3.0, 1.0, 0.0, 0.0]
    assert relative.mask[1].all()  # no tokens, and no expert
    assert [text.get_text() for text in axes.texts[:4]] == ["75%", "25%", "0%", "0%"]
    # beside the number, which stands in the middle
    assert colour_at(heatmap, picture, title, 1, 0) == ABSENT


def test_title_of_the_load_fits_into_the_picture() -> None:
    heatmap = heatmap_of(sample())
    heatmap.set_loads({"moe": [1, 1]}, source="all ranks, as published after 1000000 optimizer steps")
    picture = heatmap.render()
    (title,) = (a._left_title for a in heatmap.figure.axes if "expert load" in a.get_title(loc="left"))
    assert title.get_window_extent(heatmap.figure.canvas.get_renderer()).x1 < picture.shape[1]


def test_rows_are_put_in_order_once_for_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    heatmap, calls, keys = heatmap_of(sample(), sample()), [], VarianceHistory.keys

    def counted(history: VarianceHistory) -> list[LayerKey]:
        calls.append(history)
        return keys(history)

    monkeypatch.setattr(VarianceHistory, "keys", counted)
    heatmap.render()
    assert calls == [heatmap.history]


def test_a_hundred_rows_have_a_place_of_their_own() -> None:
    keys = [LayerKey("text", f"encoder.transformer.a_rather_long_name.blocks.{i}", "dense") for i in range(100)]
    heatmap = heatmap_of(dict.fromkeys(keys, WAVE))
    picture = heatmap.render()
    axes = heatmap.figure.axes[0]
    low, high = axes.transData.transform((0, 1))[1], axes.transData.transform((0, 0))[1]
    assert high - low >= 14  # pixels of a row
    renderer = heatmap.figure.canvas.get_renderer()
    boxes = [label.get_window_extent(renderer) for label in axes.get_yticklabels()]
    assert len(boxes) == 100
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.height for box in boxes) <= high - low
    assert picture.shape[0] >= 1500


def test_names_fit_beside_the_panels() -> None:
    wide = LayerKey("image", "MMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMMM", "dense")
    heatmap = heatmap_of({wide: WAVE, TEXT[0]: WAVE})
    heatmap.render()
    renderer = heatmap.figure.canvas.get_renderer()
    assert heatmap.figure.axes[0].get_yticklabels()[0].get_window_extent(renderer).x0 >= 0


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no samples to draw. Call VarianceHistory.add"):
        Heatmap(VarianceHistory()).render()


def test_missing_matplotlib_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-moeclip\[plots\]'"):
        check_matplotlib()
