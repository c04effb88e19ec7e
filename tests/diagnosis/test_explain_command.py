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
        (["Tagged", "--strategy", "fsdp"], "REDUCED TO SOMETHING WRONG"),
    ],
)
def test_what_is_unreduced_or_wrong_is_1(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:{arguments[0]}", *arguments[1:]]) == 1
    assert told in capsys.readouterr().out


def test_what_configure_model_makes_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{HERE}:Built"]) == 0
    assert "layer.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
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
