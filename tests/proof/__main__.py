"""``python -m tests.proof``: run every measurement, then print each bar with its figure. Exit code 1 if one is missed.

Rows carry the commit that they were measured on, so a checkout with changes is refused; ``--dirty`` allows one while
a bar is worked on. ``--only NAME`` takes the measurements whose command contains the name.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.benchmarks import measure
from tests.proof.bars import BARS, Bar

DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Outcome:
    """A bar with what was measured.

    Attributes:
        bar: the promise.
        figure: the number as text, with its interval where the row has one.
        verdict: "pass", "fail", or why there is no number.
    """

    bar: Bar
    figure: str
    verdict: str


def run(command: tuple[str, ...]) -> str:
    """Run one measurement in a process of its own; returns "" or why it failed."""
    environment = {**os.environ, "PYTHONPATH": str(measure.ROOT)}
    print(f"--- python {' '.join(command)}", flush=True)
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command], cwd=measure.ROOT, env=environment, start_new_session=True
    ) as process:
        try:
            code = process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            return f"took more than {DEADLINE_S:g} s"
    print(f"--- exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return "" if code == 0 else f"exit code {code}"


def judge(bar: Bar) -> Outcome:
    """Read the bar's row and compare."""
    try:
        with (measure.RESULTS / bar.csv).open(newline="") as file:
            row = [line for line in csv.DictReader(file) if line["name"].startswith(bar.row)][-1]
        value = float(row[bar.column])
    except (FileNotFoundError, IndexError, KeyError, ValueError) as error:
        return Outcome(bar, "", f"no number: {type(error).__name__} in {bar.csv}, row {bar.row!r}")
    if not row["commit"].startswith(measure.short_commit().removesuffix("-dirty")):
        return Outcome(bar, f"{value:.4g}", f"measured on {row['commit']}, not on this commit")
    figure = f"{value:.4g}" + (f" ({row['low']} .. {row['high']})" if row.get("low") != row.get("high") else "")
    return Outcome(bar, figure, "pass" if bar.holds(value) else "fail")


def print_table(outcomes: list[Outcome]) -> None:
    """One line per bar."""
    for o in outcomes:
        print(f"{o.bar.name:52} {o.bar.comparison} {o.bar.bound:<7.4g} {o.figure:28} {o.verdict}")


def main() -> int:
    """Measure, judge, tell; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dirty", action="store_true", help="measure a checkout that differs from its commit")
    parser.add_argument("--only", default="", metavar="NAME", help="measurements whose command contains NAME")
    arguments = parser.parse_args()
    if measure.is_dirty() and not arguments.dirty:
        print("This checkout differs from its commit, which the rows would name. Commit first, or add --dirty.")
        return 2
    bars = [bar for bar in BARS if arguments.only in " ".join(bar.command)]
    failed = {command: run(command) for command in dict.fromkeys(bar.command for bar in bars)}
    outcomes = [Outcome(bar, "", failed[bar.command]) if failed[bar.command] else judge(bar) for bar in bars]
    print_table(outcomes)
    return 0 if outcomes and all(outcome.verdict == "pass" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
