"""Tables of text: aligned for a terminal, or in Markdown."""

import os
import re
import sys
from collections.abc import Sequence

__all__ = ["collapsed", "in_red", "markdown_table", "spell_bytes", "spell_runs", "text_table", "wants_colour"]

_RED, _PLAIN = "\x1b[31m", "\x1b[0m"
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)|(?<=\[)\d+(?=\])")


def collapsed(path: str) -> str:
    """A path with ``*`` for every number in it: ``blocks.3.weight`` becomes ``blocks.*.weight``."""
    return _NUMBER.sub("*", path)


def spell_bytes(size: float) -> str:
    """Bytes in the largest binary unit of which there is one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit is returned")


def spell_runs(numbers: Sequence[int]) -> str:
    """Sorted numbers with runs of neighbours put together: ``0-3, 7``; a dash for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


def wants_colour() -> bool:
    """Whether what is printed goes to a terminal whose user has not said NO_COLOR (no-color.org)."""
    return not os.environ.get("NO_COLOR") and sys.stdout is not None and sys.stdout.isatty()


def in_red(text: str, *, is_coloured: bool) -> str:
    """``text``, in red where there are colours."""
    return f"{_RED}{text}{_PLAIN}" if is_coloured else text


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    is_number: Sequence[bool],
    is_red: Sequence[bool],
    is_coloured: bool,
) -> list[str]:
    """Lines with aligned columns.

    Args:
        head: of the columns.
        rows: as many cells each.
        is_number: for each column; numbers stand on the right.
        is_red: for each row.
        is_coloured: whether colours are wanted at all.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        sides = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ]
        return "  ".join(sides).rstrip()

    body = [in_red(line(row), is_coloured=is_coloured and red) for row, red in zip(rows, is_red, strict=True)]
    return [line(head), "  ".join("-" * width for width in widths), *body]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar in a cell is escaped."""
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in [head, ["---"] * len(head), *rows]
    ]
