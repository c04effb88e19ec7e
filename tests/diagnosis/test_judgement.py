"""From what ranks saw to findings and the report, without ranks."""

import json
from dataclasses import replace

import pytest

from lightning_moeclip.diagnosis.deadlock import Waiting
from lightning_moeclip.diagnosis.evidence import World
from lightning_moeclip.diagnosis.judgement import Seen, judge, largest_errors, uncounted_steps
from lightning_moeclip.diagnosis.observations import GradientSeen, NormSeen, ParameterSeen, StepSeen, Unfinished
from lightning_moeclip.diagnosis.verify_report import Finding, RankFailure, VerifyReport

SKETCH = (1.0, 2.0)
RIGHT = GradientSeen("w", True, False, False, 0.0, 1.0, 0.0, 1.0, 0, 1, SKETCH, SKETCH)
STEP = StepSeen(1, (2.0,), (NormSeen(3.0),), (RIGHT,), (ParameterSeen("w", 0.0, 0),))
START = StepSeen(0, parameters=(ParameterSeen("w", 0.0, 0),))


def seen(*ranks: StepSeen, one: StepSeen = STEP, start: StepSeen = START) -> Seen:
    return Seen(
        {0: START, 1: one}, {r: {0: start, step.step: step} for r, step in enumerate(ranks)}, {}, tolerance=1e-8
    )


def codes(found: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(f.quantity, f.code) for f in found]


def test_equal_numbers_are_no_finding() -> None:
    assert judge(seen(STEP, STEP), World(2)) == ()
    assert set(largest_errors(seen(STEP, STEP)).values()) == {0.0}
    assert uncounted_steps(seen(STEP, STEP)) == ()


def test_loss_is_the_mean_of_the_ranks() -> None:
    low, high = (replace(STEP, losses=(loss,)) for loss in (1.0, 3.0))
    assert judge(seen(low, high), World(2)) == ()
    found = judge(seen(high, high), World(2))
    assert codes(found) == [("loss", "step")]
    assert found[0].error == pytest.approx(0.5)


def test_norm_counts_parts_of_all_ranks_or_is_each_ranks_own() -> None:
    parts = [replace(STEP, norms=(NormSeen(square, is_square_part=True),)) for square in (4.0, 5.0)]
    assert judge(seen(*parts), World(2)) == ()
    own = replace(STEP, norms=(NormSeen(6.0),))
    assert codes(judge(seen(STEP, own), World(2))) == [("clip norm", "norm")]
    assert largest_errors(seen(STEP, own))["clip_norm"] == pytest.approx(1.0)
    without = replace(STEP, norms=(NormSeen(float("nan"), problem="mixed"),))
    assert judge(seen(without, without), World(2)) == ()


def test_parameters_that_differ_with_right_gradients_are_the_optimizers() -> None:
    other = replace(STEP, parameters=(ParameterSeen("w", 0.1, 0),))
    assert codes(judge(seen(STEP, other), World(2))) == [("parameter", "step_of_optimizer")]


def test_other_weights_at_the_start_are_found_there() -> None:
    start = StepSeen(0, parameters=(ParameterSeen("w", 0.3, 0),))
    (found,) = judge(seen(STEP, STEP, start=start), World(2))
    assert (found.step, found.code, found.error) == (0, "weights_differ", 0.3)


def test_a_wrong_gradient_hides_the_parameter_that_follows_from_it() -> None:
    wrong = replace(RIGHT, error=1.0, ratio=2.0, local=SKETCH, final=(2.0, 4.0))
    step = replace(STEP, gradients=(wrong,), parameters=(ParameterSeen("w", 0.1, 0),))
    assert codes(judge(seen(step, step), World(2))) == [("gradient", "times_world_size")]


def test_what_comes_after_a_wrong_step_follows_from_it() -> None:
    wrong = replace(RIGHT, error=0.4, ratio=1.1, residual=0.3, local=(0.0, 1.0), final=(0.0, 1.0))
    first = replace(STEP, parameters=(ParameterSeen("w", 0.1, 0),))
    second = replace(STEP, step=2, gradients=(wrong,))
    both = {0: START, 1: first, 2: second}
    found = judge(Seen({0: START, 1: STEP, 2: replace(STEP, step=2)}, {0: both, 1: both}, {}, 1e-8), World(2))
    assert codes(found) == [("parameter", "step_of_optimizer"), ("gradient", "follows")]


def test_steps_that_nobody_sees_are_no_success() -> None:
    empty = StepSeen(1)
    (found,) = uncounted_steps(seen(empty, empty, one=empty))
    assert found.code == "no_step"
    (found,) = uncounted_steps(seen(STEP, empty))
    assert found.cause == "one process took 1 optimizer steps, rank 1: 0"


def test_a_loss_that_is_zero_but_for_rounding_has_no_relative_error() -> None:
    one = replace(STEP, losses=(1e-17,))
    # the losses of the ranks cancel, and each of them is far from zero
    low, high = (replace(STEP, losses=(loss,)) for loss in (-0.1, 0.1))
    assert judge(seen(low, high, one=one), World(2)) == ()
    # terms within the loss cancel: its gradients tell how large they are
    other = replace(STEP, losses=(3e-17,))
    assert judge(seen(other, other, one=one), World(2)) == ()
    wrong = replace(STEP, losses=(0.5,))
    (found,) = judge(seen(wrong, wrong, one=one), World(2))
    assert (found.quantity, found.code) == ("loss", "step")
    assert found.cause.startswith("the mean of the ranks' losses is not the loss of one process: ")


def test_what_not_all_ranks_came_to_is_no_fault_where_an_error_ended_one() -> None:
    wrong = replace(RIGHT, error=0.4, ratio=1.1, residual=0.3, local=(0.0, 1.0), final=(0.0, 1.0))
    step = replace(STEP, gradients=(wrong,), norms=(NormSeen(5.0),), parameters=())
    alone = {0: {0: START, 1: step}, 1: {0: START}}
    assert codes(judge(Seen({0: START, 1: STEP}, alone, {}, 1e-8), World(2))) == [
        ("gradient", "not_reduced"),
        ("clip norm", "follows"),
    ]
    failed = Seen({0: START, 1: STEP}, alone, {}, 1e-8, has_failed=True)
    assert judge(failed, World(2)) == ()
    assert str(largest_errors(failed)["gradients"]) == "nan"
    both = replace(seen(step, step), has_failed=True)
    assert codes(judge(both, World(2))) == [("gradient", "step"), ("clip norm", "follows")]


def test_a_rank_that_waits_for_one_that_skips_its_loss_is_explained() -> None:
    none = replace(RIGHT, is_missing=True, is_missing_in_one=True, local=(), final=())
    skips = replace(STEP, losses=(), gradients=(none,), norms=(NormSeen(0.0),))
    stuck = Seen({0: START, 1: skips}, {0: {0: START, 1: skips}, 1: {0: START}}, {1: Unfinished(1)}, 1e-8)
    (found,) = judge(stuck, World(2))
    assert (found.quantity, found.code, found.step) == ("loss", "skipped", 1)
    assert found.cause.startswith("no loss in one process, rank 0, and one elsewhere")
    # nor is it a loss that MoEClipStrategy puts a zero in its place
    zero = replace(skips, losses=(0.0,))
    (found,) = judge(replace(stuck, ranks={0: {0: START, 1: zero}, 1: {0: START}}), World(2))
    assert found.cause.startswith("no loss in one process, rank 0, and one elsewhere")
    assert judge(seen(zero, zero, one=skips), World(2)) == ()
    # losses that go backward past Lightning are no skipped ones
    raw = replace(STEP, losses=())
    assert judge(Seen({0: START, 1: raw}, {0: {0: START, 1: raw}, 1: {}}, {1: Unfinished(1)}, 1e-8), World(2)) == ()


def test_each_step_of_an_optimizer_within_one_batch_is_its_own() -> None:
    again = replace(RIGHT, call=1)
    two = replace(STEP, gradients=(RIGHT, again), norms=(NormSeen(3.0), NormSeen(3.0)))
    wrong = replace(RIGHT, error=1.0, ratio=2.0, local=SKETCH, final=(2.0, 4.0))
    first = replace(two, gradients=(wrong, again))
    assert codes(judge(seen(first, first, one=two), World(2))) == [("gradient", "times_world_size")]
    second = replace(two, gradients=(RIGHT, replace(wrong, call=1)))
    assert codes(judge(seen(second, second, one=two), World(2))) == [("gradient", "times_world_size")]
    # what steps later from weights that went wrong follows, and only that
    other, spread = replace(RIGHT, name="v"), replace(wrong, name="v", call=1)
    three = replace(two, gradients=(RIGHT, other, again, replace(other, call=1)))
    ranks = replace(three, gradients=(wrong, other, again, spread))
    found = judge(seen(ranks, ranks, one=three), World(2))
    assert [(f.name, f.code) for f in found] == [("w", "times_world_size"), ("v", "follows")]


def test_gradients_that_nobody_has_are_no_success() -> None:
    none = replace(RIGHT, is_missing=True, is_missing_in_one=True, local=(), final=())
    empty = replace(STEP, gradients=(none,), norms=(NormSeen(0.0),))
    (found,) = uncounted_steps(seen(empty, empty, one=empty))
    assert found.code == "no_step"
    assert found.cause.startswith("no gradient was there in any step")
    assert str(largest_errors(seen(empty, empty, one=empty))["gradients"]) == "nan"


def report(**fields: object) -> VerifyReport:
    whole = VerifyReport("ddp", 2, 1, 2, 1e-8, loss=0.0, gradients=1e-16, clip_norm=float("nan"), parameters=0.0)
    return replace(whole, **fields)  # type: ignore[arg-type]


def test_report_tells_what_it_did_and_what_it_could_not_compare() -> None:
    text = str(report(notes=("dropout is set to 0 in drop",)))
    assert text.splitlines() == [
        "verify ddp: 2 ranks, 2 steps in float64 against one process: passed",
        "largest relative errors (bound 1e-08)",
        "  loss        0.00e+00",
        "  gradients   1.00e-16",
        "  clip norm   not compared",
        "  parameters  0.00e+00",
        "note: dropout is set to 0 in drop",
    ]


def test_report_of_a_failure_goes_to_json_without_infinities() -> None:
    findings = tuple(Finding(f"p{i}", "gradient", 1, float("inf"), "missing", "cut") for i in range(14))
    failed = report(findings=findings, failures=(RankFailure(1, "KeyError: 'x'", ("p0",)),))
    assert not failed.ok
    told = json.loads(failed.to_json())
    assert told["ok"] is False
    assert len(told["worst"]) == 10
    assert told["findings"][13]["error"] == "inf"
    assert told["clip_norm"] == "nan"
    text = str(failed)
    assert "rank 1 failed: KeyError: 'x'\n  parameters: p0" in text
    assert "missing: p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11 and 2 more\n    cut" in text
    assert "one process failed: it ended" in str(report(failures=(RankFailure(None, "it ended"),)))
    assert not report(deadlock=(Waiting(0, "barrier()"),)).ok
