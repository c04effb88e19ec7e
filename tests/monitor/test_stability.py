"""What the stability monitor says of series of numbers, healthy and not."""

import dataclasses
import math
import pickle
import random
from typing import Any

import pytest

from lightning_moeclip.monitor.stability import Observation, StabilityMonitor, StabilitySettings
from lightning_moeclip.monitor.tracks import CosineTrack, Track


def healthy(num: int, *, level: float = 0.85, noise: float = 0.015, seed: int = 0) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and cosine of a run that learns as the example does: the cosine is 0.3 at first."""
    draw = random.Random(seed)
    return [
        (
            (0.3 + 5.7 * math.exp(-step / 80)) * (1 + 0.06 * draw.gauss(0, 1)),
            2.5 * math.exp(0.2 * draw.gauss(0, 1)),
            level + noise * draw.gauss(0, 1) - (level - 0.3) * math.exp(-step / 4),
        )
        for step in range(num)
    ]


def feed(monitor: StabilityMonitor, numbers: list[tuple[float, float, float]]) -> list[Observation]:
    return [monitor.observe(*each) for each in numbers]


def settled(num: int = 130, **settings: object) -> StabilityMonitor:
    monitor = StabilityMonitor(StabilitySettings(**settings))  # type: ignore[arg-type]
    feed(monitor, healthy(num))
    return monitor


def kinds(observation: Observation) -> list[str]:
    return [finding.kind for finding in observation.findings]


def usual(monitor: StabilityMonitor) -> tuple[float, float, float]:
    """Numbers in the middle of what is healthy now."""
    level = monitor.state().cosine.level
    return monitor.state().loss.mean, math.exp(monitor.state().log_norm.mean), 0.85 if level is None else level


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_healthy_run_of_2000_steps_shows_nothing(seed: int) -> None:
    found = feed(StabilityMonitor(), healthy(2000, seed=seed))
    assert not [o.findings for o in found if o.findings]
    assert all(o.is_good for o in found[20:])
    assert not found[0].is_good  # a cosine of 0.3, and nothing known of this model


def test_a_cosine_that_falls_with_the_loss_is_no_fault_and_told_of_once() -> None:
    numbers = healthy(2000)
    falling = [(loss, norm, cosine - 0.45 * min(1.0, k / 800)) for k, (loss, norm, cosine) in enumerate(numbers)]
    found = feed(StabilityMonitor(), falling)
    findings = [finding for o in found for finding in o.findings]
    assert [finding.kind for finding in findings] == ["level"]
    assert "below low=0.55" in findings[0].message
    assert not findings[0].acts
    assert not findings[0].blocks


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_settled", [False, True])
def test_what_is_not_finite_acts_from_the_first_step(number: float, *, is_settled: bool) -> None:
    for loss, norm in ((number, 1.0), (1.0, abs(number)), (number, abs(number))):
        monitor = settled() if is_settled else StabilityMonitor()
        before = monitor.state()
        observation = monitor.observe(loss, norm, 0.8)
        assert kinds(observation) == ["non_finite"]
        assert observation.acts
        assert not observation.is_good
        assert monitor.state() == before


def test_overflow_is_left_to_the_scaler_and_a_loss_that_is_not_finite_is_not() -> None:
    monitor = settled()
    before = monitor.state()
    observation = monitor.observe(1.0, math.inf, 0.8, is_scaled=True)
    assert (observation.findings, observation.is_good) == ((), False)
    assert monitor.state() == before
    assert kinds(monitor.observe(math.inf, math.inf, 0.8, is_scaled=True)) == ["non_finite"]


@pytest.mark.parametrize("arguments", [{"grad_norm": 0.0}, {"grad_norm": 1.0, "is_whole": False}])
def test_step_without_gradients_or_without_some_ranks_teaches_nothing(arguments: dict) -> None:
    monitor = settled()
    before = monitor.state()
    observation = monitor.observe(0.0, **arguments)
    assert (observation.findings, observation.is_good, monitor.state()) == ((), False, before)


def test_loss_that_jumps_while_it_falls_acts_though_it_is_below_the_first_losses() -> None:
    monitor = settled(100)
    loss, norm, cosine = usual(monitor)
    assert kinds(monitor.observe(4.5, norm, cosine)) == ["loss"]
    assert healthy(1)[0][0] > 4.5
    # the z-score over the losses themselves would say nothing
    losses = [each[0] for each in healthy(100)]
    mean = sum(losses) / len(losses)
    assert (4.5 - mean) / math.sqrt(sum((x - mean) ** 2 for x in losses) / len(losses)) < 6
    assert not monitor.observe(loss, norm, cosine).findings  # it taught nothing


def test_gradient_norm_that_jumps_acts_and_one_that_falls_does_not() -> None:
    monitor = settled()
    loss, norm, cosine = usual(monitor)
    observation = monitor.observe(loss, 1e6 * norm, cosine)
    assert kinds(observation) == ["grad_norm"]
    assert observation.acts
    assert not monitor.observe(loss / 10, norm / 1000, cosine).findings


def test_flat_history_does_not_alarm_on_noise() -> None:
    monitor = StabilityMonitor()
    for _ in range(200):
        assert not monitor.observe(1.0, 1.0, 0.9).findings
    assert not monitor.observe(1.05, 1.2, 0.93).findings
    assert kinds(monitor.observe(1.2, 1.6, 0.7)) == ["loss", "grad_norm", "deviates"]


@pytest.mark.parametrize("cosine", [0.95, 0.7])
def test_cosine_that_deviates_on_either_side_warns_and_blocks_and_acts_only_when_asked(cosine: float) -> None:
    for acts in (False, True):
        monitor = settled(act_on_cosine=acts)
        loss, norm, _ = usual(monitor)
        observation = monitor.observe(loss, norm, cosine)
        assert kinds(observation) == ["deviates"]
        assert observation.acts is acts
        assert observation.findings[0].blocks
        assert not observation.is_good
        assert observation.deviation is not None
        assert (observation.deviation > 0) == (cosine > 0.85)


def test_low_cosines_that_vary_are_the_preset_and_others_are_not() -> None:
    monitor = settled()
    loss, norm, _ = usual(monitor)
    found = [kinds(monitor.observe(loss, norm, cosine)) for cosine in (0.85, 0.5, 0.2, 0.5)]
    assert found == [[], ["deviates"], ["deviates"], ["unstable", "deviates"]]
    assert "unstable" not in kinds(monitor.observe(loss, norm, 0.56))  # not 3 in a row


def test_variance_alone_or_low_values_alone_are_not_unstable() -> None:
    monitor = settled()
    loss, norm, _ = usual(monitor)
    for cosine in (0.9, 0.56, 0.9, 0.56, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5):
        found = kinds(monitor.observe(loss, norm, cosine))
    assert found == ["deviates"]


def test_cosines_that_stay_low_are_found_after_two_windows_and_taken_over_after_64_steps() -> None:
    monitor = settled(300)
    loss, norm, _ = usual(monitor)
    found = [monitor.observe(loss, norm, 0.4 + 0.005 * (k % 2)) for k in range(66)]
    assert ["low" in kinds(o) for o in found[:11]] == [False] * 9 + [True] * 2
    assert not any(o.acts for o in found)
    assert kinds(found[63])[-1] == "level"
    assert "its level from now on" in found[63].findings[-1].message
    assert kinds(found[64]) == ["level"]  # a habit of this run now, and told
    assert found[65].findings == ()
    assert found[65].is_good


def test_a_model_with_a_low_healthy_cosine_is_told_once_and_keeps_snapshots() -> None:
    monitor = StabilityMonitor()
    found = feed(monitor, healthy(200, level=0.3))
    assert [kinds(o) for o in found if o.findings] == [["level"]]
    assert found[-1].is_good
    assert not found[40].is_good  # before its level is known
    loss, norm, _ = usual(monitor)
    for cosine in (0.02, 0.5, 0.02):  # low and varying: nothing but a deviation
        assert kinds(monitor.observe(loss, norm, cosine)) == ["deviates"]


@pytest.mark.parametrize("cosine", [None, math.nan])
def test_unknown_cosine_leaves_loss_and_norm_watched(cosine: float | None) -> None:
    monitor = StabilityMonitor()
    for loss, norm, _ in healthy(100):
        observation = monitor.observe(loss, norm, cosine)
        assert (observation.findings, observation.is_good, observation.cosine) == ((), True, None)
    assert kinds(monitor.observe(20.0, norm, cosine)) == ["loss"]


def test_state_goes_back_and_is_neither_shared_nor_tied_to_the_process() -> None:
    monitor = settled()
    kept = pickle.loads(pickle.dumps(monitor.state()))
    assert dataclasses.is_dataclass(kept)
    first = feed(monitor, healthy(50, seed=7))
    for _ in range(2):
        monitor.load_state(kept)
        assert feed(monitor, healthy(50, seed=7)) == first


@pytest.mark.parametrize("deviation", [0.5, 1.0])
def test_lognormal_losses_of_20000_steps_show_nothing(deviation: float) -> None:
    # Student's t with 63 degrees lies above 6 once in 2e7: 1e-3 times in 20,000 steps
    draw, monitor = random.Random(1), StabilityMonitor()
    found = [monitor.observe(math.exp(deviation * draw.gauss(0, 1)), 1.0) for _ in range(20_000)]
    assert not [o.findings for o in found if o.findings]
    # the z-score of the losses themselves does flag such a run
    draw, track, flags = random.Random(1), Track(floor=0.02), 0
    for _ in range(20_000):
        loss = math.exp(deviation * draw.gauss(0, 1))
        flags += (track.score(loss) or 0.0) > 6
        track.add(loss)
    assert flags > 5


def test_losses_that_are_not_positive_are_compared_by_difference() -> None:
    draw, monitor = random.Random(0), StabilityMonitor()
    for _ in range(500):
        assert not monitor.observe(0.1 * draw.gauss(0, 1), 1.0).findings
    assert kinds(monitor.observe(1.5, 1.0)) == ["loss"]
    for _ in range(500):
        assert not monitor.observe(-5.0 + 0.1 * draw.gauss(0, 1), 1.0).findings
    assert kinds(monitor.observe(-3.0, 1.0)) == ["loss"]


@pytest.mark.parametrize(("loss_ratio", "norm_ratio"), [(3.0, 1.0), (1.0, 30.0), (8.0, 80.0)])
def test_level_that_lasts_for_32_batches_is_taken_over_though_the_state_goes_back(
    loss_ratio: float, norm_ratio: float
) -> None:
    monitor = settled()
    kept = monitor.state()
    loss, norm, cosine = usual(monitor)
    draw = random.Random(3)
    found = []
    for k in range(200):
        noise = math.exp(0.05 * draw.gauss(0, 1))
        found.append(monitor.observe(loss_ratio * loss * noise, norm_ratio * norm * noise, cosine))
        if k == 16:
            monitor.load_state(kept)
    assert all(o.acts for o in found[:31])
    assert [o.is_new_level for o in found] == [k == 31 for k in range(200)]
    assert kinds(found[31]) == ["level"]
    assert "for 32 batches, which is the level from now on" in found[31].findings[0].message
    assert found[31].is_good
    assert not any(o.findings for o in found[32:])
    assert monitor.observe(30 * loss_ratio * loss, 1e4 * norm_ratio * norm, cosine).acts  # watched again


@pytest.mark.parametrize(("loss_ratio", "norm_ratio"), [(12.0, 1.0), (1.0, 120.0), (3.0, 1e6)])
def test_level_out_of_reach_stays_a_fault(loss_ratio: float, norm_ratio: float) -> None:
    monitor = settled()
    loss, norm, cosine = usual(monitor)
    assert all(monitor.observe(loss_ratio * loss, norm_ratio * norm, cosine).acts for _ in range(100))


def test_batches_between_break_the_row_of_flagged_ones() -> None:
    monitor = settled()
    loss, norm, cosine = usual(monitor)
    for k in range(100):
        between = k % 31 == 30
        number = (math.nan if k % 2 else loss) if between else 5 * loss
        assert monitor.observe(number, norm, cosine).acts is (not between or bool(k % 2))


def test_track_measures_the_distance_from_the_values_just_before() -> None:
    track = Track(needed=2, length=3)
    for value in (1.0,) * 8 + (2.0, 1.0, 1.0, 1.0):
        track.add(value)
    # means of 8 before: 1, 9/8, 9/8, 9/8, of which the last three distances are kept
    assert track.distances == [-0.125, -0.125, -0.125]
    assert track.mean == 1.125
    assert track.score(2.0) == 0.0  # no spread and no floor
    track.absolute_floor = 0.5
    assert track.score(2.0) == (2.0 - 1.125 + 0.125) / 0.5


def test_cosine_track_counts_robust_deviations() -> None:
    track = CosineTrack(floor=0.0, length=5)
    for value in (0.1, 0.2, 0.3, 0.4):
        track.add(value)
    assert track.score(0.9) is None
    track.add(9.0)  # moves neither median nor deviation much
    assert track.level == 0.3
    assert track.score(0.9) == pytest.approx(0.6 / (1.4826 * 0.1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": "a"}, r"low='a' and good=0.75 must be cosines"),
        ({"good": None}, r"low=0.55 and good=None must be cosines"),
        ({"variance": None}, r"variance=None must be above 0"),
        ({"variance": "0.02"}, r"variance='0.02' must be above 0"),
        ({"variance": math.inf}, r"variance=inf must be above 0"),
        ({"act_on_cosine": "yes"}, r"act_on_cosine='yes' must be True or False. The default is False"),
    ],
)
def test_settings_that_are_no_numbers_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StabilitySettings(**settings)
