"""The proof reads its bars right, and the benchmarks' shared statistics mean what they say."""

import csv
from pathlib import Path

import pytest

from tests.benchmarks import kernel_table, measure
from tests.proof import __main__ as proof
from tests.proof import readme
from tests.proof.bars import BARS, Bar

BAR = Bar("promise", ("-m", "tests.nothing"), "some.csv", "time of ours", "median_ratio", "<=", 1.1)


def write(folder: Path, *rows: dict[str, object]) -> None:
    with (folder / "some.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["name", "median_ratio", "low", "high", "commit"])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "short_commit", lambda: "abc1234-dirty")
    return tmp_path


@pytest.mark.parametrize(("value", "verdict"), [(1.1, "pass"), (1.11, "fail"), ("nan", "fail")])
def test_a_bar_is_judged_by_its_last_row(results: Path, value: object, verdict: str) -> None:
    row = {"name": "time of ours / theirs", "low": 1, "high": 2, "commit": "abc1234"}
    write(results, {**row, "median_ratio": 7}, {**row, "median_ratio": value})
    assert proof.judge(BAR).verdict == verdict


def test_a_bar_without_its_row_or_from_another_commit_does_not_pass(results: Path) -> None:
    assert proof.judge(BAR).verdict.startswith("no number: FileNotFoundError")
    write(results, {"name": "another", "median_ratio": 1, "commit": "abc1234"})
    assert proof.judge(BAR).verdict.startswith("no number: IndexError")
    write(results, {"name": "time of ours", "median_ratio": 1, "commit": "0000000"})
    assert proof.judge(BAR).verdict == "measured on 0000000, not on this commit"


def test_a_measurement_that_fails_misses_its_bars(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof, "BARS", [BAR])
    monkeypatch.setattr(proof, "run", lambda command: "exit code 1")
    monkeypatch.setattr("sys.argv", ["proof", "--dirty"])
    write(results, {"name": "time of ours", "median_ratio": 1, "commit": "abc1234"})
    assert proof.main() == 1
    assert "exit code 1" in capsys.readouterr().out


def test_a_changed_checkout_is_refused(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "is_dirty", lambda: True)
    monkeypatch.setattr("sys.argv", ["proof"])
    assert proof.main() == 2
    assert "differs from its commit" in capsys.readouterr().out


def test_readme_shows_the_rows_of_the_results() -> None:
    assert readme.split()[1] == readme.render()


def test_every_command_of_the_proof_is_a_file() -> None:
    for bar in BARS:
        assert (measure.ROOT / f"{bar.command[1].replace('.', '/')}.py").exists(), bar.command


def test_paired_ratio_is_the_median_over_rounds_within_its_interval() -> None:
    ours, theirs = [2.0, 3.0, 40.0, 5.0, 6.0], [1.0, 2.0, 10.0, 5.0, 4.0]  # ratios 2, 1.5, 4, 1, 1.5
    figure = measure.paired_ratio(ours, theirs)
    assert figure.median == 1.5
    assert 1.0 <= figure.low < 1.5 < figure.high <= 4.0
    assert measure.paired_ratio(ours, ours) == measure.exact(1.0)


def test_arms_take_turns_in_an_order_that_rotates() -> None:
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "abc"}
    seconds = measure.take_turns(arms, rounds=2, warmup=1)
    assert "".join(order) == "cab" + "abc" + "bca"
    assert seconds == {"a": [4.0, 9.0], "b": [5.0, 7.0], "c": [6.0, 8.0]}


def test_table_of_kernels_shows_the_rows_of_the_results() -> None:
    assert kernel_table.split()[1] == kernel_table.render()
