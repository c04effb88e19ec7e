"""``README.md`` of this folder is held to the files, and every test here to our strategy."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FILES = sorted(path for path in HERE.glob("test_*.py") if path != Path(__file__))
README = (HERE / "README.md").read_text()


def definitions(path: Path) -> dict[str, ast.AST]:
    """Functions, classes and constants of a file by name."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def names_in(path: Path) -> list[str]:
    return [f"{path.name}::{name}" for name in definitions(path) if name.startswith("test_")]


OWN = [name for path in FILES for name in names_in(path)]


def rows() -> dict[str, list[str]]:
    """By one of Lightning's tests, the tests of ours that answer to it; none where a reason stands instead."""
    found: dict[str, list[str]] = {}
    file = ""
    for line in README.splitlines():
        if heading := re.fullmatch(r"## (?:`([\w/.]+)`|.*)", line):
            file = heading[1] or ""
        row = re.fullmatch(r"\| `([\w/.:]+)` \| (.+) \|", line)
        if row is None:
            continue
        name = f"{file}::{row[1]}" if file else row[1]
        assert name not in found, name
        found[name] = re.findall(r"`(\w+\.py::\w+)`", row[2]) if file else []
        assert found[name] or not file, f"{name}: neither an answer nor a reason"
    return found


def test_every_answer_is_a_test_and_every_test_is_told_of() -> None:
    told = {test for answers in rows().values() for test in answers}
    beyond = set(re.findall(r"^\* `(\w+\.py::\w+)`$", README, re.MULTILINE))
    assert told <= set(OWN)
    assert beyond == set(OWN) - told


def test_the_numbers_of_the_table_are_counted() -> None:
    answers = rows()
    told = {test for tests in answers.values() for test in tests}
    answered = sum(bool(tests) for tests in answers.values())
    told_of = (
        r"(\d+) of Lightning's tests are answered by (\d+) of ours\. (\d+) are not, each with its reason\. (\d+) more"
    )
    for text in (README, (ROOT / "README.md").read_text()):
        numbers = re.findall(told_of, text.replace("\n", " "))
        assert numbers == [tuple(map(str, (answered, len(told), len(answers) - answered, len(OWN) - len(told))))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_test_makes_its_trainer_by_the_function_that_asserts_the_strategy(path: Path) -> None:
    known: dict[str, ast.AST] = {}
    for shared in HERE.glob("*.py"):
        known |= {} if shared.name.startswith("test_") else definitions(shared)
    known |= definitions(path)

    def reaches(name: str, seen: set[str]) -> bool:
        if name == "ours":
            return True
        if name in seen or name not in known:
            return False
        seen.add(name)
        nodes = list(ast.walk(known[name]))
        names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
        return any(reaches(other, seen) for other in sorted(names))

    without = [name for name in known if name.startswith("test_") and not reaches(name, set())]
    assert without == []


def test_that_function_asserts_it() -> None:
    asserts = [n for n in ast.walk(definitions(HERE / "models.py")["ours"]) if isinstance(n, ast.Assert)]
    assert [ast.unparse(a.test) for a in asserts] == ["isinstance(trainer.strategy, MoEClipStrategy)"]
