"""The table of ``cases/README.md`` names tests and bars that exist, and leaves no case out."""

import ast
import re
from pathlib import Path

import pytest

from tests.proof.bars import BARS

TESTS = Path(__file__).parent
CASES = {*range(1, 13), *range(15, 35)}


def rows() -> list[list[str]]:
    """Cells of every row that is neither a header nor the line below it."""
    lines = (TESTS / "cases" / "README.md").read_text().splitlines()
    below = {i for i, line in enumerate(lines) if re.fullmatch(r"\|[-|]+\|", line)}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for i, line in enumerate(lines)
        if line.startswith("|") and i not in below and i + 1 not in below
    ]


@pytest.mark.parametrize("cells", rows(), ids=lambda cells: " ".join(cells[:-1])[:60])
def test_row_names_tests_and_bars_that_exist(cells: list[str]) -> None:
    where = cells[-1]
    parts = where.split("`, ")
    found = re.findall(r"(bar )?`([^`]+)`", where)
    assert len(found) == len(parts) >= 1, "one name in backticks after the other"
    for is_bar, name in found:
        if is_bar:
            assert name in {bar.name for bar in BARS}, name
            continue
        path, _, function = name.partition("::")
        assert function in functions_of(TESTS / path), name


def functions_of(path: Path) -> set[str]:
    """Functions of a file that pytest collects."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_case_has_a_row() -> None:
    assert sorted(int(cells[0]) for cells in rows() if len(cells) == 3) == sorted(CASES)


def test_every_test_that_names_one_of_these_cases_is_in_the_row_of_that_case() -> None:
    listed = {int(cells[0]): cells[-1] for cells in rows() if len(cells) == 3}
    for path in TESTS.rglob("test_*.py"):
        for function in functions_of(path):
            named = re.match(r"test_case_(\d+)_", function)
            if named and int(named[1]) in CASES:
                assert f"{path.relative_to(TESTS)}::{function}`" in listed[int(named[1])], function
