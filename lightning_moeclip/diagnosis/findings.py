"""What ``doctor`` found, one value per thing it looked at, and how it is told."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

__all__ = ["Diagnosis", "Finding", "Status", "line_of", "within"]

Status = Literal["ok", "note", "warning", "error"]
Value = TypeVar("Value")
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"
_COLORS = {"error": _RED, "warning": _YELLOW}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        status: "note" is worth knowing, "warning" may cost time or a run, "error" will.
        found: what it is.
        advice: what to write or do; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which they were made."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.status != "error" for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(line_of(finding) for finding in self.findings)

    def to_json(self) -> str:
        """``{"ok": bool, "findings": [{"name", "status", "found", "advice"}]}``."""
        return json.dumps({"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}, indent=2)


def line_of(finding: Finding, *, color: bool = False) -> str:
    """A finding as text: a line for what was found, another for the advice."""
    before = _COLORS.get(finding.status, "") if color else ""
    after = _PLAIN if before else ""
    lines = f"{before}{finding.status:8}{after}{finding.name:24}{finding.found}"
    return f"{lines}\n{'':32}-> {finding.advice}" if finding.advice else lines


def within(seconds: float, function: Callable[[], Value]) -> Value:
    """What ``function`` returns or raises; it goes on in a thread of its own when it takes longer.

    Raises:
        TimeoutError: it takes longer.
    """
    results: list[Value] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
