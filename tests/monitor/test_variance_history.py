"""Cells, towers, the frozen scale and the outliers of a history are what a float64 computation says."""

import json
import math

import pytest
import torch

from lightning_moeclip.gradients.report import LayerKey
from lightning_moeclip.gradients.statistics import sums_of
from lightning_moeclip.monitor.variance_history import VarianceHistory, label_of, shorten

IMAGE_0, IMAGE_1 = LayerKey("image", "blocks.0", "dense"), LayerKey("image", "blocks.1", "expert")
TEXT_0 = LayerKey("text", "blocks.0", "dense")
SCALE = LayerKey(None, "loss.logit_scale", "logit_scale")
WAVE = torch.tensor([1.0, -1.0, 3.0, -3.0], dtype=torch.float64)  # variance 20 / 3


def history_of(*samples: dict[LayerKey, torch.Tensor], window: int = 60) -> VarianceHistory:
    history = VarianceHistory(window=window)
    for index, gradients in enumerate(samples):
        history.add(10 * index, [sums_of(gradients.items())])
    return history


def test_cells_are_variance_zero_non_finite_absent_and_the_square_of_one_element() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(50, generator=generator, dtype=torch.float64) + 2
    sample = history_of(
        {
            IMAGE_0: gradient,
            IMAGE_1: torch.zeros(4, dtype=torch.float64),
            TEXT_0: torch.tensor([1.0, math.nan]),
            LayerKey("text", "blocks.1", "dense"): torch.empty(0),
            SCALE: torch.tensor([3.0], dtype=torch.float64),
        }
    ).samples[0]
    assert list(sample.cells.values()) == pytest.approx(
        [gradient.var().item(), 0.0, math.inf, math.nan, 9.0], nan_ok=True
    )


def test_equal_elements_that_are_not_zero_are_not_shown_as_zero() -> None:
    assert 0 < history_of({IMAGE_0: torch.full((4,), 0.5, dtype=torch.float64)}).samples[0].cells[IMAGE_0] < 1e-300


def test_tower_is_the_variance_over_all_its_elements_and_one_element_has_none() -> None:
    first, second = WAVE + 5, 2 * WAVE
    sample = history_of({IMAGE_0: first, IMAGE_1: second, SCALE: torch.tensor([3.0])}).samples[0]
    assert sample.towers["image"] == pytest.approx(torch.cat([first, second]).var().item(), rel=1e-12)
    assert math.isnan(sample.towers[None])


def test_a_row_that_grows_beyond_one_element_shows_its_variance() -> None:
    history = history_of({IMAGE_0: torch.ones(1)})
    assert history.single == {IMAGE_0}
    history.add(10, [sums_of([(IMAGE_0, WAVE)])])
    assert history.single == set()


def test_optimizers_of_one_step_give_one_sample_and_share_rows() -> None:
    history = VarianceHistory()
    both = sums_of([(IMAGE_0, WAVE)]), sums_of([(IMAGE_0, 3 * WAVE), (TEXT_0, WAVE)])
    history.add(0, both)
    assert len(history.samples) == 1
    truth = torch.cat([WAVE, 3 * WAVE]).var().item()
    assert history.samples[0].cells[IMAGE_0] == pytest.approx(truth, rel=1e-12)
    assert history.samples[0].cells[TEXT_0] == pytest.approx(WAVE.var().item(), rel=1e-12)


def test_sixty_samples_are_kept() -> None:
    history = history_of(*[{IMAGE_0: WAVE}] * 70)
    assert [sample.step for sample in history.samples] == list(range(100, 700, 10))


def test_a_run_that_goes_back_loses_the_samples_from_there_on() -> None:
    history = history_of(*[{IMAGE_0: WAVE}] * 4)
    history.add(20, [sums_of([(IMAGE_0, 2 * WAVE)])])
    assert [sample.step for sample in history.samples] == [0, 10, 20]
    assert history.samples[-1].cells[IMAGE_0] == pytest.approx(4 * WAVE.var().item(), rel=1e-12)


def test_rows_that_come_later_lie_where_the_module_has_them() -> None:
    middle = LayerKey("image", "blocks.0", "router")
    grown = history_of({IMAGE_0: WAVE, IMAGE_1: WAVE}, {IMAGE_0: WAVE, middle: WAVE, IMAGE_1: WAVE})
    assert grown.keys() == [IMAGE_0, middle, IMAGE_1]
    shrunk = history_of({IMAGE_0: WAVE, middle: WAVE, IMAGE_1: WAVE}, {IMAGE_0: WAVE, IMAGE_1: WAVE})
    assert shrunk.keys() == [IMAGE_0, middle, IMAGE_1]


@pytest.mark.parametrize("seed", range(20))
def test_rows_lie_behind_their_neighbour_of_before_whatever_comes_and_goes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    all_keys = [LayerKey("image", f"blocks.{i}", "dense") for i in range(8)]
    samples = []
    for _ in range(5):
        shuffled = torch.randperm(8, generator=generator)
        samples.append({all_keys[i]: WAVE for i in shuffled[: int(torch.randint(1, 8, (1,), generator=generator))]})
    # one row after the other, by the words of the docstring
    wanted = list(samples[-1])
    for sample in reversed(samples[:-1]):
        known, at = set(wanted), 0
        for key in sample:
            if key not in known:
                wanted.insert(at, key)
            at = wanted.index(key) + 1
    assert history_of(*samples).keys() == wanted


class CountedKey(LayerKey):
    """Counts how often two keys are compared."""

    number = 0
    __hash__ = LayerKey.__hash__

    def __eq__(self, other: object) -> bool:
        type(self).number += 1
        return super().__eq__(other)


def test_order_of_rows_takes_a_few_comparisons_of_each_cell() -> None:
    size, samples = 100, 20
    # the last row is another one in each sample; keys that are one object would not be compared
    layers = [[*map(str, range(size - 1)), f"of step {step}"] for step in range(samples)]
    history = history_of(*[{CountedKey("image", layer, "dense"): WAVE for layer in row} for row in layers])
    CountedKey.number = 0
    keys = history.keys()
    assert CountedKey.number < 3 * size * samples  # size^2 * samples / 2 by looking through a list
    assert len(keys) == size - 1 + samples


def test_colour_scale_is_that_of_the_first_samples_with_two_decades_beyond_and_stays() -> None:
    history = history_of({IMAGE_0: 0 * WAVE})
    assert history.freeze_range() == (1e-12, 1.0)  # nothing to choose from
    history.add(10, [sums_of([(IMAGE_0, 1e-3 * WAVE), (TEXT_0, 1e-2 * WAVE)])])  # 6.7e-6 and 6.7e-4
    assert history.freeze_range() == pytest.approx((1e-8, 1e-1))
    history.add(20, [sums_of([(IMAGE_0, 1e6 * WAVE)])])
    assert history.freeze_range() == pytest.approx((1e-8, 1e-1))


def test_ratio_is_log2_of_the_two_towers_and_a_gap_where_one_has_no_variance() -> None:
    history = history_of(
        {IMAGE_0: WAVE, TEXT_0: 2 * WAVE},
        {IMAGE_0: 4 * WAVE, TEXT_0: WAVE},
        {IMAGE_0: 0 * WAVE, TEXT_0: WAVE},
    )
    ratios = history.log_ratios(history.rows_by_tower())
    assert ratios is not None
    assert ratios[:2] == ("image", "text")
    assert ratios[2] == pytest.approx([-2.0, 4.0, math.nan], nan_ok=True)


@pytest.mark.parametrize("towers", [["image"], ["image", "text", "audio"]])
def test_there_is_a_ratio_of_two_towers_only(towers: list[str]) -> None:
    rows = {LayerKey(tower, "head", "dense"): WAVE for tower in towers}
    history = history_of({SCALE: torch.ones(1), **rows})
    assert list(history.rows_by_tower()) == [*towers, None]
    assert history.log_ratios(history.rows_by_tower()) is None


def test_worst_rows_are_those_farthest_from_their_own_median() -> None:
    keys = [LayerKey("text", f"blocks.{i}", "dense") for i in range(7)]
    usual = {key: 10.0**-i * WAVE for i, key in enumerate(keys)}
    # one explodes, one dies, one is not finite, one shrinks a little, one was always zero
    last = {
        **usual,
        keys[0]: 0 * WAVE,
        keys[1]: usual[keys[1]] * 100,
        keys[2]: WAVE * math.inf,
        keys[3]: usual[keys[3]] / 2,
    }
    usual[keys[4]] = last[keys[4]] = 0 * WAVE
    worst = history_of(usual, usual, usual, last).worst()
    assert [outlier.key for outlier in worst] == [keys[0], keys[2], keys[1], keys[3], keys[4]]
    decades = [outlier.decades for outlier in worst]
    assert decades == pytest.approx([math.inf, math.inf, 4.0, 2 * math.log10(2), 0.0])
    assert worst[2].median == pytest.approx(usual[keys[1]].var().item())


def test_state_is_plain_and_goes_on_with_the_frozen_range() -> None:
    history = history_of({IMAGE_0: WAVE, TEXT_0: WAVE * math.inf}, {IMAGE_0: 0 * WAVE, SCALE: torch.zeros(1)})
    frozen = history.freeze_range()
    state = json.loads(json.dumps(history.state_dict()))
    resumed = VarianceHistory()
    resumed.load_state_dict(state)
    resumed.add(20, [sums_of([(IMAGE_0, 1e9 * WAVE)])])
    assert resumed.freeze_range() == frozen
    assert [sample.cells for sample in resumed.samples[:2]] == [sample.cells for sample in history.samples]
    assert resumed.samples[0].towers == {"image": pytest.approx(WAVE.var().item(), rel=1e-12), "text": math.inf}
    assert resumed.single == {SCALE}


@pytest.mark.parametrize(
    ("key", "label"),
    [
        (LayerKey("text", "blocks.3", "expert"), "blocks.3 experts"),
        (LayerKey("text", "blocks.3", "dense"), "blocks.3"),
        (LayerKey("text", "blocks.3", "router"), "blocks.3 router"),
        (LayerKey("text", "head", "projection"), "head projection"),
        (LayerKey("text", "text_projection", "projection"), "text_projection"),
        (LayerKey(None, "loss.logit_scale", "logit_scale"), "loss.logit_scale"),
        (LayerKey("text", "", "dense"), "dense"),
    ],
)
def test_rows_are_named_by_layer_and_kind(key: LayerKey, label: str) -> None:
    assert label_of(key) == label
    assert label_of(key, is_square=True) == f"{label} (g²)"


def test_long_names_lose_their_middle() -> None:
    short = shorten("encoder.some_very_long_name.transformer.blocks.31 experts")
    assert len(short) == 32
    assert short == "encoder.som…er.blocks.31 experts"
    assert shorten("blocks.3") == "blocks.3"
