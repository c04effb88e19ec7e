"""Every rule has a page, a row in the index and a check that calls it, and none of these is without a rule."""

import ast
import re
from pathlib import Path

import pytest

from lightning_moeclip.parallel import rules
from lightning_moeclip.parallel.rules import RULES, Rule

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "checks"
SECTIONS = ["What it means", "Why", "What to write instead", "Example"]


def test_rules_pages_and_index_are_the_same_list() -> None:
    index = re.findall(r"^\| \[(MOE\d{3})\]\((\S+)\) \| (.+) \| (\w+) \|$", (PAGES / "README.md").read_text(), re.M)
    assert index == [(r.code, Path(r.page).name, r.title, r.severity) for r in RULES.values()]
    assert {path.name for path in PAGES.glob("*.md")} == {"README.md", *(name for _, name, _, _ in index)}


def test_codes_are_unique_and_in_order() -> None:
    declared = [value for value in vars(rules).values() if isinstance(value, Rule)]
    assert list(RULES.values()) == declared
    codes = [rule.code for rule in declared]
    assert codes == sorted({*codes})
    assert all(re.fullmatch(r"MOE[1-5]\d{2}", code) for code in codes)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_page_says_what_why_and_what_instead(rule: Rule) -> None:
    text = (ROOT / rule.page).read_text()
    assert text.startswith(f"# {rule.code}: {rule.title}\n\nSeverity: {rule.severity}\n")
    headers = re.split(r"^## (.+)\n", text, flags=re.M)
    assert headers[1::2] == SECTIONS
    assert all(body.strip() for body in headers[2::2])
    assert re.fullmatch(rf"```text\n.+ \[{rule.code}: {rule.page}\]\n```", headers[-1].strip())


def called_rules() -> dict[str, set[str]]:
    """What the files of the package do with each rule: "told", "warn", or hand it on."""
    calls: dict[str, set[str]] = {}
    for path in (ROOT / "lightning_moeclip").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rules":
                calls.setdefault(node.attr, set())
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                owner = node.value
                if isinstance(owner.value, ast.Name) and owner.value.id == "rules":
                    calls.setdefault(owner.attr, set()).add(node.attr)
    return calls


def test_every_rule_has_a_check_of_its_severity() -> None:
    names = {name: value for name, value in vars(rules).items() if isinstance(value, Rule)}
    calls = called_rules()
    assert {*names} == {*calls} - {"Rule"}
    for name, rule in names.items():
        assert calls[name] <= {"told" if rule.severity == "error" else "warn"}, name


def test_message_ends_with_code_and_page() -> None:
    assert rules.SPARSE.told("Wrong.") == "Wrong. [MOE106: docs/checks/moe106.md]"
    with pytest.warns(UserWarning, match=r"^Odd\. \[MOE110: docs/checks/moe110\.md\]$"):
        rules.BATCH_NORM.warn("Odd.")


def test_a_warning_is_no_error_and_the_other_way_round() -> None:
    with pytest.raises(AssertionError, match="MOE110 is a warning"):
        rules.BATCH_NORM.told("Wrong.")
    with pytest.raises(AssertionError, match="MOE106 is an error"):
        rules.SPARSE.warn("Wrong.")
