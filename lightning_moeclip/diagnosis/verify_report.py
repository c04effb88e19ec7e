"""What ``verify`` found, as a value that prints and goes to JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_moeclip.diagnosis.deadlock import Waiting

__all__ = ["Finding", "RankFailure", "VerifyReport"]

_NUM_WORST = 10
_NUM_NAMES = 12  # per cause that are printed; all are in the JSON
_LINES_OF_ERROR = 12


@dataclass(frozen=True)
class Finding:
    """Something that is not what one process has.

    Attributes:
        name: of the parameter; empty for the loss and the clip norm.
        quantity: "loss", "gradient", "clip norm" or "parameter".
        step: in which it was first so, from 1; 0 is before the first.
        error: relative, the largest of all ranks; infinite where it is missing on one side or not finite.
        code: the likely cause in one word.
        cause: the likely cause as a sentence.
        is_in_step: the module or its training step does it, so that another strategy does not help.
    """

    name: str
    quantity: str
    step: int
    error: float
    code: str
    cause: str
    is_in_step: bool = False

    def told(self) -> str:
        """One line, with the cause as one word."""
        of = f" of {self.name}" if self.name else ""
        return f"{self.error:<9.3g} {self.quantity}{of}, step {self.step}: {self.code}"


@dataclass(frozen=True)
class RankFailure:
    """An error that ended a rank.

    Attributes:
        rank: which one; None for the one process that ranks are compared with.
        error: type and message.
        parameters: names that the message has, or to whose numbers it refers.
        traceback: as Python prints it.
    """

    rank: int | None
    error: str
    parameters: tuple[str, ...] = ()
    traceback: str = ""

    def told(self) -> str:
        """The message, cut after some lines."""
        who = "one process" if self.rank is None else f"rank {self.rank}"
        lines = self.error.strip().splitlines()
        cut = [*lines[:_LINES_OF_ERROR], "..."] if len(lines) > _LINES_OF_ERROR else lines
        named = f"\n  parameters: {', '.join(self.parameters)}" if self.parameters else ""
        return f"{who} failed: " + "\n  ".join(cut) + named


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of ``verify``.

    Attributes:
        strategy: what was tested.
        world_size: W.
        expert_parallel_size: ranks that share out the experts.
        steps: optimizer steps.
        tolerance: largest relative error that passes.
        loss: largest relative error of the mean loss of the ranks; NaN where nothing was compared, as below.
        gradients: of any gradient.
        clip_norm: of the gradient norm that clipping uses.
        parameters: of any parameter after a step.
        findings: all that is above the tolerance, causes before consequences, larger errors first.
        failures: errors that ended ranks.
        deadlock: where each rank waits, if they wait for each other.
        notes: what was changed or left out, and what could not be compared.
    """

    strategy: str
    world_size: int
    expert_parallel_size: int
    steps: int
    tolerance: float
    loss: float
    gradients: float
    clip_norm: float
    parameters: float
    findings: tuple[Finding, ...] = ()
    failures: tuple[RankFailure, ...] = ()
    deadlock: tuple[Waiting, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether ranks and one process agree."""
        return not (self.findings or self.failures or self.deadlock)

    @property
    def worst(self) -> tuple[Finding, ...]:
        """The ten findings to look at first."""
        return self.findings[:_NUM_WORST]

    def to_json(self) -> str:
        """Everything as JSON; numbers that are not finite are strings."""
        worst = [asdict(finding) for finding in self.worst]
        return json.dumps(_plain({"ok": self.ok, **asdict(self), "worst": worst}), indent=2)

    def __str__(self) -> str:
        spread = f", expert_parallel_size={self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        verdict = "passed" if self.ok else "FAILED"
        head = (
            f"verify {self.strategy}: {self.world_size} ranks{spread}, {self.steps} steps in float64 against one "
            f"process: {verdict}"
        )
        lines = [head, f"largest relative errors (bound {self.tolerance:.0e})"]
        for name in ("loss", "gradients", "clip_norm", "parameters"):
            value = getattr(self, name)
            told = "not compared" if math.isnan(value) else f"{value:.2e}"
            lines.append(f"  {name.replace('_', ' '):12}{told}")
        lines += self._told_deadlock() + [failure.told() for failure in self.failures] + self._told_findings()
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _told_deadlock(self) -> list[str]:
        if not self.deadlock:
            return []
        return ["DEADLOCK: no rank computes, each waits for another", *(f"  {w.told()}" for w in self.deadlock)]

    def _told_findings(self) -> list[str]:
        if not self.findings:
            return []
        lines = ["worst"] + [f"  {finding.told()}" for finding in self.worst]
        lines.append("likely causes")
        for cause in dict.fromkeys(f.cause for f in self.findings):
            same = [f for f in self.findings if f.cause == cause]
            names = _listed([f.name or f"the {f.quantity}" for f in same])
            lines += [f"  {same[0].code}: {names}", f"    {cause}"]
        return lines


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - _NUM_NAMES
    return ", ".join(distinct[:_NUM_NAMES]) + (f" and {more} more" if more > 0 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
