"""``python -m tests.proof.readme`` writes the README's table of figures from the rows of the results."""

import csv

from tests.benchmarks import measure
from tests.proof.bars import BARS, BESIDE, Bar

__all__ = ["render", "write"]

README = measure.ROOT / "README.md"
BEGIN, END = "<!-- figures: make proof -->\n", "<!-- end of figures -->\n"
_SIGNS = {"<=": "≤", "<": "<", ">=": "≥"}


def find_row(bar: Bar, name: str) -> dict[str, str]:
    """The last row of the bar's file whose name begins like that."""
    with (measure.RESULTS / bar.csv).open(newline="") as file:
        return [line for line in csv.DictReader(file) if line["name"].startswith(name)][-1]


def figure(row: dict[str, str], column: str = "median_ratio") -> str:
    """A number to three digits, with the interval of the row where it has one."""
    low, high = row.get("low"), row.get("high")
    text = f"{float(row[column]):.3g}"
    return f"{text} ({float(low):.3g} to {float(high):.3g})" if low and high and low != high else text


def render() -> str:
    """The table: every bar with its figure, commit and command, then the figures beside them."""
    lines = ["| what | bar | measured | commit | command: `python …` |", "|---|---|---|---|---|"]
    for bar in BARS:
        row = find_row(bar, bar.row)
        bound = f"{_SIGNS[bar.comparison]} {bar.bound:.3g}"
        lines.append(
            f"| {bar.name} | {bound} | {figure(row, bar.column)} | {row['commit']} | `{' '.join(bar.command)}` |"
        )
    for name, bar, begins in BESIDE:
        row = find_row(bar, begins)
        lines.append(f"| {name} | | {figure(row)} | {row['commit']} | `{' '.join(bar.command)}` |")
    return "\n".join(lines) + "\n"


def split() -> tuple[str, str, str]:
    """The README before its table, the table, and what follows."""
    before, _, rest = README.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


def write() -> None:
    """Put the rendered table between the README's marks."""
    before, _, after = split()
    README.write_text(before + BEGIN + render() + END + after)


if __name__ == "__main__":
    write()
