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
