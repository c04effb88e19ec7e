"""From what ranks saw to findings and the report, without ranks."""

import json
from dataclasses import replace

import pytest

from lightning_moeclip.diagnosis.deadlock import Waiting
from lightning_moeclip.diagnosis.evidence import World
from lightning_moeclip.diagnosis.judgement import Seen, judge, largest_errors, uncounted_steps
from lightning_moeclip.diagnosis.observations import GradientSeen, NormSeen, ParameterSeen, StepSeen
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
