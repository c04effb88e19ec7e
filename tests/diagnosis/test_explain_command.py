"""``python -m lightning_moeclip explain``: what it prints and what it returns."""

import json

import pytest

from lightning_moeclip.__main__ import main

HERE = "tests.diagnosis.odd_modules"


def test_a_sound_model_is_0_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:two_towers", "--world-size", "8", "--expert-parallel-size", "4"]) == 0
    printed = capsys.readouterr().out
    assert "Gradients under moeclip on 8 ranks, experts spread over 4" in printed
    assert "{r, r+4}" in printed
    assert "Nothing is left unreduced" in printed


def test_json_and_towers_and_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--json --towers left=image --towers right=text.stem --towers right=text.head --ranks-per-node 4"
    assert main(["explain", f"{HERE}:with_batches", *arguments.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {group["tower"] for group in told["groups"]} == {"left", "right", None}
    assert sum(link["crosses_nodes"] for link in told["links"]) == 2
    assert told["world_size"] == 8


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_example_has_the_numbers_counted_by_hand(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world-size", "4", "--expert-parallel-size", str(size), "--json"]
    assert main(["explain", f"{HERE}:emoji", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    # norms, qkv, out of two blocks; a perceptron; a router; norm and projection; D is 128
    tower = 2 * (2 * 256 + 384 * 129 + 128 * 129) + (512 * 129 + 128 * 513) + 4 * 128 + 256 + 128 * 128
    image, text = 16 * 128 + 128 * (3 * 64 + 1), (11 + 1739) * 128
    dense, experts = 2 * tower + image + text + 1, 2 * 2 * 4 * 128 * 256 // size
    assert told["totals_per_rank"]["gradient_bytes"] == 4 * (dense + experts)
    assert [group["shape"] for group in told["groups"] if group["kind"] == "expert"] == [
        [4 // size, 128, 256],
        [4 // size, 256, 128],
    ] * 2
    sent = {"dp": 2 * 4 * (dense + (experts if size == 1 else 0)) * 3 / 4}
    if size == 2:
        sent["edp"] = 2 * 4 * experts / 2
    assert told["totals_per_rank"]["sent_bytes"] == pytest.approx(sent)
    assert sum(group["count"] for group in told["groups"]) == 2 * (2 * 8 + 4 + 3 + 3) + 3 + 2 + 1
    assert [group["pattern"] for group in told["groups"] if group["tower"] is None] == ["loss.logit_scale"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["Hiding"], "NOBODY REDUCES"),
        (["Lists", "--strategy", "ddp"], "NOBODY REDUCES"),
        (["Soft", "--strategy", "ddp"], "MAY BE LEFT UNREDUCED"),
        (["Soft", "--strategy", "deepspeed_stage_3"], "MAY BE LEFT UNREDUCED"),
        (["Tagged", "--strategy", "fsdp"], "REDUCED TO SOMETHING WRONG"),
    ],
)
def test_what_is_unreduced_or_wrong_is_1(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:{arguments[0]}", *arguments[1:]]) == 1
    assert told in capsys.readouterr().out


def test_what_configure_model_makes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:Built"]) == 0
    assert "layer.weight" in capsys.readouterr().out


def test_configure_model_that_asks_for_the_number_of_ranks_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:BuiltForTrainer", "--world-size", "6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [group["shape"] for group in told["groups"]] == [[6, 4], [6]]
    assert "configure_model() asked its Trainer" in told["notes"][0]
    assert told["notes"][0].endswith("world_size=6.")


@pytest.mark.parametrize(
    ("name", "verdict", "missing"),
    [
        ("NeverBuilt", "NOT KNOWN: the module has no parameters.", "no parameters"),
        ("HalfBuilt", "NOT ALL IS KNOWN: parts of the module could not be made", "parts of the module"),
        ("Empty", "NOT KNOWN: the module has no parameters.", "no parameters"),
        ("Unanswered", "NOT KNOWN, since configure_optimizers() failed: loss.logit_scale.", "loss.logit_scale"),
    ],
)
def test_what_cannot_be_told_is_2_and_no_success(
    name: str, verdict: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{HERE}:{name}"]) == 2
    printed = capsys.readouterr()
    assert verdict in printed.out
    assert "Nothing is left unreduced" not in printed.out
    assert printed.err == f"explain: it cannot be told whether all is reduced ({missing}): see the notes.\n"
    failure = "Note: configure_model() failed with KeyError: 'no such weights': what it makes is not in the table."
    assert (failure in printed.out) == name.endswith("Built")


def test_a_failure_that_nobody_expects_has_its_traceback_and_is_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:broken"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith("explain: it failed with LookupError, and found nothing out.\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([f"{HERE}:Lazy"], "explain: Lazy returned a module whose lazy parameters have no shape yet: net.weight"),
        (["nowhere:make"], "explain: 'nowhere:make': importing nowhere failed"),
        ([f"{HERE}:a_number"], "explain: a_number returned a int"),
        ([f"{HERE}:two_towers", "--expert-parallel-size", "3"], "explain: expert_parallel_size=3 does not divide"),
        ([f"{HERE}:two_towers", "--strategy", "dp"], "explain: strategy='dp' cannot be explained"),
        ([f"{HERE}:two_towers", "--towers", "image"], "explain: --towers image: write TOWER=PATH"),
    ],
)
def test_input_that_cannot_be_used_is_2_without_a_traceback(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(told)
    assert printed.out == ""
