"""Which region an overflow is blamed on, and how factors fall and grow."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_moeclip.gradients.boundary import Region
from lightning_moeclip.gradients.region_scales import (
    BAD,
    INCOMING,
    INSIDE,
    NUM_CROSSINGS,
    NUM_FIELDS,
    NUM_ZEROS,
    SIZE,
    RegionScales,
)

S = torch.tensor(2.0**10)
SAME, GROWN, FALLEN = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0.5)


def regions(*names: str, ancestors: Sequence[Sequence[int]] | None = None, growth_interval: int = 20) -> RegionScales:
    made = [Region(name) for name in names]
    return RegionScales(made, ancestors=ancestors or [[] for _ in made], growth_interval=growth_interval)


def table(number: int, **events: float) -> Tensor:
    """Nothing wrong, half of a percent of zeros, each boundary crossed; ``bad_1=2`` sets a column of a row."""
    rows = torch.zeros(1 + number, NUM_FIELDS, dtype=torch.float64)
    rows[:, SIZE], rows[:, NUM_ZEROS], rows[1:, NUM_CROSSINGS] = 1000.0, 5.0, 1.0
    columns = {"bad": BAD, "incoming": INCOMING, "inside": INSIDE, "zeros": NUM_ZEROS, "size": SIZE}
    columns |= {"crossings": NUM_CROSSINGS}
    for name, value in events.items():
        column, _, row = name.rpartition("_")
        rows[int(row), columns[column]] = value
    return rows


def step(scales: RegionScales, *, growth: Tensor = SAME, **events: float) -> bool:
    return bool(scales.update(table(len(scales.regions), **events), scale=S, growth=growth))


def factors(scales: RegionScales) -> list[float]:
    return [float(region.scale) for region in scales.regions]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ({"bad_1": 1}, [0.5, 1.0]),  # gradients of its parameters, on one rank
        ({"inside_1": 1, "bad_0": 1}, [0.5, 1.0]),  # the cotangent that went out, to parameters outside
        ({"inside_1": 1}, [1.0, 1.0]),  # it went nowhere: no step was skipped
        ({"bad_1": 1, "bad_2": 3}, [0.5, 0.5]),  # two regions beside each other
        ({"bad_0": 1}, [1.0, 1.0]),
        ({"bad_1": 2, "incoming_1": 1}, [1.0, 1.0]),  # on one of two ranks what came in was bad already
        ({"bad_1": 1, "inside_1": 1, "bad_2": 1, "incoming_2": 1}, [0.5, 1.0]),  # the second lies behind the first
    ],
)
def test_a_region_falls_alone_when_what_came_in_was_finite(events: dict, expected: list[float]) -> None:
    scales = regions("a", "b")
    assert step(scales, growth=FALLEN, **events) == (0.5 in expected)
    assert factors(scales) == expected
    is_skipped = any(name.startswith("bad") for name in events)
    own = [float(is_skipped and 0.5 not in expected), *(f == 0.5 for f in expected)]
    assert [float(n) for n in scales.num_overflows] == own


def test_of_nested_regions_the_innermost_falls_and_totals_are_products() -> None:
    scales = regions("outer", "outer.inner", ancestors=[[], [0]])
    assert step(scales, bad_1=1, bad_2=1, inside_1=1, inside_2=1)
    assert factors(scales) == [1.0, 0.5]
    assert step(scales, bad_1=1, bad_2=1, incoming_2=1)  # what came into the inner one was bad: the outer one's fault
    assert factors(scales) == [0.5, 0.5]
    assert [float(total) for total in scales.totals] == [0.5, 0.25]


def test_a_clean_interval_doubles_a_factor_and_a_growth_around_it_leaves_its_total() -> None:
    scales = regions("outer", "outer.inner", "other", ancestors=[[], [0], []])
    scales.tracker.copy_(torch.tensor([19.0, 0.0, 0.0]))
    assert not step(scales)
    assert factors(scales) == [2.0, 0.5, 1.0]
    assert [float(total) for total in scales.totals] == [2.0, 1.0, 1.0]
    assert not step(scales, growth=GROWN)  # the loss scale itself
    assert factors(scales) == [1.0, 0.5, 0.5]
    assert not step(scales, growth=FALLEN, bad_0=1)  # falls: all totals fall along
    assert factors(scales) == [1.0, 0.5, 0.5]
    assert scales.tracker.tolist() == [1.0, 2.0, 2.0]  # a step with an overflow is not clean, nor starts it anew


def test_the_loss_scale_falls_where_a_factor_cannot_fall_further() -> None:
    scales = regions("a")
    blamed = [step(scales, bad_1=1, growth=FALLEN) for _ in range(26)]
    assert blamed == [True] * 24 + [False] * 2


def test_a_region_that_rested_from_the_start_grows_early_once_it_is_used() -> None:
    scales = regions("a", growth_interval=5)
    for _ in range(5):
        scales.update(table(1, size_1=0, zeros_1=0), scale=S, growth=SAME)
    assert factors(scales) == [2.0]
    scales.growth_interval = 2000
    for _ in range(40):
        step(scales, zeros_1=1000)
    assert factors(scales)[0] > 2.0


def test_a_region_that_overflows_again_where_it_did_waits_twice_as_long() -> None:
    scales = regions("a", growth_interval=5)
    limit, overflows = 4.0, []
    for number in range(400):
        is_over = float(scales.totals[0]) >= limit
        if is_over:
            overflows.append(number)
        step(scales, bad_1=float(is_over))
    gaps = [later - earlier for earlier, later in itertools.pairwise(overflows)]
    # patience 4, then 8, 16, ... intervals of 5 steps between a fall and the way back, and the step of the overflow
    assert gaps == [4 * 5 + 1, 8 * 5 + 1, 16 * 5 + 1, 32 * 5 + 1]


def test_underflow_grows_early_while_growing_brings_gradients_back_and_not_where_it_overflowed() -> None:
    scales = regions("a", growth_interval=2000)
    nonzero = 0.0
    for _ in range(100):
        # each doubling brings back as many again, up to a half: the rest are true zeros
        nonzero = min(0.01 * float(scales.totals[0]), 0.5)
        step(scales, zeros_1=1000 * (1 - nonzero))
    assert factors(scales) == [128.0]  # one doubling more than the half needs tells that no more come back
    fallen = regions("b", growth_interval=2000)
    step(fallen, bad_1=1)
    for _ in range(100):
        step(fallen, zeros_1=1000)
    assert factors(fallen) == [0.5]


def test_factors_stay_within_two_to_the_24_either_way() -> None:
    scales = regions("a", "b", growth_interval=1)
    for _ in range(60):
        step(scales, bad_1=1)
    assert factors(scales)[0] == 2.0**-24
    for _ in range(60):
        step(scales)
    assert factors(scales)[1] == 2.0**24


def test_weights_used_without_calling_their_region_are_an_error_in_the_first_step() -> None:
    with pytest.raises(RuntimeError, match=r"region 'a' have gradients, but no forward .* Call the module itself"):
        step(regions("a"), crossings_1=0)
    scales = regions("a")
    step(scales, crossings_1=0, zeros_1=1000)  # no gradient, nothing to divide
    step(scales, crossings_1=0)  # a module that rests for a step later on


def test_a_state_goes_by_names_is_a_copy_and_restores_every_number() -> None:
    scales = regions("a", "b")
    step(scales, bad_1=1)
    state = scales.state_dict()
    step(scales, bad_2=1, zeros_1=100)
    before, after = [float(t) for t in scales.totals], state["factor"].tolist()
    assert (before, after) == ([0.5, 0.5], [0.5, 1.0])
    scales.load_state_dict(state)
    assert factors(scales) == [0.5, 1.0]
    assert [float(t) for t in scales.totals] == [0.5, 1.0]
    assert (scales.num_steps, scales.num_overflows.tolist()) == (1, [0.0, 1.0, 0.0])
    other = regions("new", "a")
    other.load_state_dict(state)
    assert factors(other) == [1.0, 0.5]
    assert other.num_overflows.tolist() == [0.0, 0.0, 1.0]
    other.load_state_dict(None)
    assert factors(other) == [1.0, 1.0]
    assert other.num_steps == 0


def test_without_regions_overflows_and_zeros_of_the_whole_model_are_counted() -> None:
    scales = RegionScales()
    assert not step(scales, growth=FALLEN, bad_0=2)
    step(scales)
    report = scales.report(S)["model"]
    assert (float(report.scale), float(report.overflow_rate)) == (2.0**10, 0.5)
    assert float(report.underflow_rate) == pytest.approx(0.005)
