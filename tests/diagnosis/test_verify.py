"""verify on modules with planted faults: each parameter by name, with the right cause."""

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_moeclip import verify
from lightning_moeclip.__main__ import main
from lightning_moeclip.diagnosis.verify_report import Finding, VerifyReport
from tests.diagnosis import planted

FAULTS = {
    **{f"gathered.{tower}.{kind}": "missing" for tower in ("image", "text") for kind in ("weight", "bias")},
    **{f"own_slot.{tower}.{kind}": "own_rows" for tower in ("image", "text") for kind in ("weight", "bias")},
    "counted": "counted_times",
}
UNREDUCED = {"bare.loss.logit_scale": "not_reduced", "routed.router.weight": "frozen"}
HERE = "tests.diagnosis.planted"


def causes(report: VerifyReport) -> dict[str, str]:
    """Code of the cause by name of the parameter, without what only follows."""
    return {f.name: f.code for f in report.findings if f.name and f.code != "follows"}


def named(report: VerifyReport, name: str) -> Finding:
    return next(f for f in report.findings if f.name == name)


def test_ddp_that_finds_unused_parameters_leaves_a_bare_scale_and_takes_idle_experts() -> None:
    report = verify(planted.everything_and_frozen, strategy="ddp_find_unused_parameters_true")
    # the experts that rank 1 has no rows for are no false alarm
    assert causes(report) == FAULTS | UNREDUCED
    assert "in the optimizer and not in the LightningModule" in named(report, "bare.loss.logit_scale").cause
    assert named(report, "counted").error == pytest.approx(2.0)
    assert {f.name for f in report.worst[:4]} == {name for name, code in FAULTS.items() if code == "missing"}
    assert len(report.worst) == 10
    assert not report.failures


def test_ours_mends_what_a_strategy_can_and_says_that_the_rest_is_the_steps_own() -> None:
    report = verify(planted.everything)
    assert causes(report) == FAULTS
    for name in FAULTS:
        assert named(report, name).is_in_step
        assert named(report, name).cause.endswith("No strategy can mend that.")
    assert report.notes == ("an optimizer holds bare.loss.logit_scale, and the LightningModule does not",)


def test_a_deadlock_is_told_within_half_a_minute_with_the_collective_of_each_rank() -> None:
    began = time.monotonic()
    report = verify(planted.idle_on_one_rank, strategy="ddp")
    assert time.monotonic() - began < 30.0 + 15.0  # with the start of all processes on a busy machine
    assert not report.ok
    assert [w.rank for w in report.deadlock] == [0, 1]
    assert report.deadlock[0].operation.startswith("all_reduce(double[186]), number ")
    assert "in backward" in report.deadlock[0].place
    assert report.deadlock[1].operation.startswith("broadcast(long[1]), number ")
    text = str(report)
    assert "DEADLOCK: no rank computes, each waits for another\n  rank 0 waits in all_reduce(double[186])" in text
    told = causes(report)
    assert told["experts.2.weight"] == told["experts.2.bias"] == "missing_on_ranks"
    assert "arrives on rank 1" in named(report, "experts.2.weight").cause
    assert {told[name] for name in told if not name.startswith("experts.2.")} == {"not_reduced"}
    assert len(told) == 9


def test_dense_parameters_beside_dtensors_are_not_reduced() -> None:
    report = verify(f"{HERE}:sharded", strategy=planted.model_parallel)
    assert causes(report) == {"stem.weight": "not_reduced", "stem.bias": "not_reduced"}
    assert report.strategy == "ModelParallelStrategy"
    assert report.notes[-1].startswith("no clip norm to compare, gradient_clip_val would fail: RuntimeError")


def test_experts_averaged_over_their_replicas_are_ep_times_too_large() -> None:
    report = verify(planted.spread, strategy=f"{HERE}:averaged_over_replicas")
    assert causes(report) == dict.fromkeys(("moe.w_in", "moe.w_out"), "times_expert_parallel_size")
    assert named(report, "moe.w_in").error == pytest.approx(1.0)
    assert report.expert_parallel_size == 2


def test_a_loss_times_w_is_one_cause_for_all() -> None:
    report = verify(planted.times_world, steps=1)
    assert set(causes(report).values()) == {"loss_scaled"}
    assert len(causes(report)) == 5
    assert report.loss == pytest.approx(1.0)
    assert "the loss is 2 = world_size times that of one process" in str(report)


def test_a_router_frozen_on_one_rank_is_refused_and_named() -> None:
    report = verify(planted.frozen_router)
    assert causes(report) == {"router.weight": "frozen"}
    assert [f.rank for f in report.failures] == [0, 1]
    assert "The set of trainable parameters differs between ranks" in report.failures[0].error
    assert "router.weight" in report.failures[0].parameters


def test_random_numbers_in_the_step_are_named() -> None:
    report = verify(planted.noisy, steps=1)
    assert set(causes(report).values()) == {"random"}
    assert any(f.quantity == "loss" and f.code == "random" for f in report.findings)


def test_error_of_one_rank_is_the_users_own_and_no_other() -> None:
    report = verify(planted.failing, steps=1)
    assert [(f.rank, f.error) for f in report.failures] == [(1, "KeyError: 'planted on rank 1'")]
    assert "planted.py" in report.failures[0].traceback
    assert not report.ok
    # rank 0 had a gradient when it was ended, which is no fault of the step
    assert report.findings == ()


def test_layers_made_in_hooks_and_gradients_reduced_in_one_are_no_false_alarm() -> None:
    report = verify(planted.made_later, strategy="ddp")
    assert report.ok, str(report)
    assert max(report.loss, report.gradients, report.parameters) <= 1e-10
    assert report.notes == (
        "dropout is set to 0 in image.1, drop",
        "an optimizer holds loss.logit_scale, and the LightningModule does not",
        "callbacks of configure_callbacks() are left out: EarlyStopping, LearningRateMonitor",
        "no validation is run: ReduceLROnPlateau is stepped only where training logs val_loss",
    )


def test_two_steps_of_an_optimizer_in_one_batch_and_sparse_gradients_are_compared() -> None:
    report = verify(planted.steps_twice, strategy="ddp", steps=1)
    assert report.ok, str(report)
    assert report.gradients <= 1e-10


def test_a_step_that_one_process_skips_is_named() -> None:
    report = verify(planted.skips, steps=1)
    assert {(f.name, f.code) for f in report.findings} == {
        ("", "skipped"),
        ("image.weight", "skipped"),
        ("image.bias", "skipped"),
    }
    assert "no loss in one process, rank 0, and one elsewhere" in report.findings[0].cause


def test_gradients_that_are_never_there_are_no_success() -> None:
    report = verify(planted.unreached, steps=1)
    assert [f.code for f in report.findings] == ["no_step"]
    assert "the loss reaches no parameter that an optimizer holds" in report.findings[0].cause
    assert "gradients   not compared" in str(report)


def test_a_process_that_cannot_import_the_factory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ModuleType("module_of_one_process")
    monkeypatch.setitem(sys.modules, alone.__name__, alone)
    exec("def make(): pass", vars(alone))  # the children do not have it
    report = verify(alone.make)
    assert "one process failed: ended with exit code 1 before it ran anything: it could not import" in str(report)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(planted.pair, "__module__", "__main__")
    with pytest.raises(TypeError, match=r"came from standard input, where no other process can import it"):
        verify(planted.pair)


def test_one_process_that_does_not_end_waits_for_nobody() -> None:
    (failure,) = verify(planted.slow_factory, timeout_s=0.2).failures
    assert failure.error == "still running after 0.2 s: give a larger timeout_s, or smaller batches"


def test_clipping_accumulation_dropout_and_rows_left_over(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--accumulate-grad-batches", "2", "--gradient-clip-val", "0.01", "--expert-parallel-size", "2"]
    assert main(["verify", f"{HERE}:left_over", *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["findings"] == told["failures"] == told["worst"] == []
    for name in ("loss", "gradients", "clip_norm", "parameters"):
        assert told[name] <= 1e-10
    assert told["notes"] == [
        "the last 1 of 9 rows of a batch are left out: 2 ranks share it",
        "dropout is set to 0 in drop",
    ]


def test_the_example_equals_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    report = verify("emoji_clip.verification:make_case", expert_parallel_size=2, tolerance=1e-10)
    assert report.ok, str(report)
    assert report.notes == ()
    assert max(report.loss, report.gradients, report.clip_norm, report.parameters) <= 1e-10


def test_steps_past_lightning_are_compared_too() -> None:
    report = verify(planted.raw_step, steps=1)
    assert report.ok, str(report)
    assert report.gradients <= 1e-10  # not NaN: it was compared


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tests.diagnosis.nowhere:make"], "importing tests.diagnosis.nowhere failed with ModuleNotFoundError"),
        ([f"{HERE}:no_batches"], "It must return (module, batches)"),
        ([f"{HERE}:needs_gpu"], "It must make its model on the CPU"),
        ([f"{HERE}:unequal"], "batches of unequal structure"),
        ([f"{HERE}:pair", "--world-size", "9"], "batch 0 has 8 rows for world_size=9"),
        ([f"{HERE}:pair", "--world-size", "1"], "world_size=1 compares nothing with one process"),
        ([f"{HERE}:pair", "--steps", "0"], "steps=0 and accumulate_grad_batches=1 must both be at least 1"),
        ([f"{HERE}:pair", "--expert-parallel-size", "3"], "does not divide the world of 2 ranks"),
        ([f"{HERE}:pair", "--tolerance", "nan"], "tolerance=nan must be a number above 0"),
        ([f"{HERE}:pair", "--tolerance", "0"], "tolerance=0.0 must be a number above 0"),
        ([f"{HERE}:pair", "--timeout-s", "0"], "timeout_s=0.0 must be above 0"),
        ([f"{HERE}:pair", "--strategy", "fsdp"], "explain package.module:factory --strategy fsdp` says what"),
        ([f"{HERE}:pair", "--strategy", "deepspeed_stage_2"], "strategy='deepspeed_stage_2' needs a GPU"),
        ([f"{HERE}:pair", "--strategy", "dpd"], "strategy='dpd' is not registered with Lightning"),
        ([f"{HERE}:pair", "--strategy", "ddp", "--expert-parallel-size", "2"], "It is an argument of 'moeclip'"),
    ],
)
def test_unusable_input_is_exit_code_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_strategy_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"gave a Pair\. Give a name that Trainer\(strategy=\.\.\.\) takes"):
        verify(planted.pair, strategy=f"{HERE}:Pair")


@pytest.mark.parametrize("name", ["factory", "strategy"])
def test_a_lambda_cannot_be_sent_to_ranks(name: str) -> None:
    arguments: dict[str, Any] = {"factory": planted.pair, name: lambda: None}
    with pytest.raises(TypeError, match=rf"{name}=<function .* cannot be sent to the ranks"):
        verify(**arguments)


def test_a_closer_look_leaves_what_else_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Finding("a.weight", "gradient", 1, 1.0, "other_steps", "one process took 2 optimizer steps, rank 1: 3")
    monkeypatch.setattr("lightning_moeclip.diagnosis.verify.uncounted_steps", lambda seen: (other,))
    found = verify(planted.own_rows, strategy="ddp").findings
    assert other in found
    assert {f.code for f in found} > {"other_steps"}
