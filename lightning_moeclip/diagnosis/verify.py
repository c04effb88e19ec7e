"""``verify``: train the user's module on ranks and in one process, in float64, and compare everything."""

import json
import multiprocessing
import pickle
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_moeclip.diagnosis.causes import UNDECIDED, tied
from lightning_moeclip.diagnosis.deadlock import ENVIRONMENT, Deadlock, Waiting, watch_for_deadlock
from lightning_moeclip.diagnosis.evidence import World
from lightning_moeclip.diagnosis.factory import Factory
from lightning_moeclip.diagnosis.judgement import Seen, judge, largest_errors, uncounted_steps
from lightning_moeclip.diagnosis.observations import RankFacts, StepSeen, Unfinished
from lightning_moeclip.diagnosis.verify_job import VerifyJob, make_strategy
from lightning_moeclip.diagnosis.verify_rank import OneProcess, run_again, run_alone, run_on_rank
from lightning_moeclip.diagnosis.verify_report import Finding, RankFailure, VerifyReport
from lightning_moeclip.parallel.mesh import check_divides
from lightning_moeclip.parallel.watch import is_lost_peer
from lightning_moeclip.testing.on_ranks import RanksFailed, launch_on_ranks

__all__ = ["verify"]

# rounding of float64 is 2e-16; Adam divides a gradient by no less than its eps of 1e-8
TOLERANCE = 1e-8
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")

_ENDED = re.compile(r"RuntimeError: rank \d+ was ended because rank \d+ failed")  # our strategy's words


def verify(
    factory: Factory | str,
    *,
    strategy: Any = "moeclip",
    world_size: int = 2,
    expert_parallel_size: int = 1,
    steps: int = 2,
    gradient_clip_val: float | None = None,
    accumulate_grad_batches: int = 1,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    timeout_s: float = 600.0,
) -> VerifyReport:
    """Train a module on ``world_size`` gloo ranks of this machine's CPUs and in one process, and compare.

    Everything is float64. Rank r takes its W-th share of the rows of each batch; rows that W does not divide are left
    out everywhere. Dropout is switched off, loggers write nothing, callbacks of ``configure_callbacks()`` are left out,
    and there is no validation. The error of a gradient is ||g - ref|| / max(||ref||, 1e-6 ||all ref||).

    Args:
        factory: returns (LightningModule, global batches); a function that other processes can import, or its address
            ``package.module:function``. The same seed is set before each call.
        strategy: name that ``Trainer(strategy=...)`` takes, address of a function that makes a strategy, such a
            function, or a strategy.
        world_size: W, at least 2.
        expert_parallel_size: of ``strategy="moeclip"``; divides W.
        steps: optimizer steps; batches are taken in turn.
        gradient_clip_val: as in the Trainer.
        accumulate_grad_batches: as in the Trainer.
        seed: of all random numbers.
        tolerance: largest relative error that passes.
        timeout_s: seconds after which one process, or the ranks, are ended; a deadlock is found within half a minute.

    Raises:
        ValueError: an argument, or what the factory or the strategy is, cannot be used.
        TypeError: the factory returns something else, or cannot be sent to other processes.
    """
    _check_bounds(tolerance, timeout_s)
    _check(factory, strategy, world_size, expert_parallel_size, steps, accumulate_grad_batches)
    job = VerifyJob(
        factory=factory,
        strategy=strategy,
        world_size=world_size,
        expert_parallel_size=expert_parallel_size,
        steps=steps,
        seed=seed,
        step_seed=seed,
        gradient_clip_val=gradient_clip_val,
        accumulate_grad_batches=accumulate_grad_batches,
    )
    with tempfile.TemporaryDirectory(prefix="moeclip_verify_") as folder:
        return _Verification(job, Path(folder), tolerance, timeout_s).run()


class _Verification:
    """One job with its folder, in which processes leave what they saw."""

    def __init__(self, job: VerifyJob, folder: Path, tolerance: float, timeout_s: float) -> None:
        self.job, self.folder = job, folder
        self.tolerance, self.timeout_s = tolerance, timeout_s

    def run(self) -> VerifyReport:
        try:
            (one,) = self._launch(run_alone, 1)
        except RanksFailed as failed:
            return self._report(None, (self._failure("one", None, failed.failures[0], ()),), ())
        failures: tuple[RankFailure, ...] = ()
        deadlock: tuple[Waiting, ...] = ()
        labels = [str(rank) for rank in range(self.job.world_size)]
        watch = watch_for_deadlock(self.folder, self.job.world_size, has_failed=lambda: self._has_failed(labels))
        try:
            self._launch(run_on_rank, self.job.world_size, watch=watch)
        except Deadlock as found:
            deadlock = found.ranks
        except RanksFailed as failed:
            names = _trainable(one)
            told = {r: self._failure(labels[r], r, why, names) for r, why in failed.failures.items()}
            failures = _causes_first(told)
        return self._report(one, failures, deadlock)

    def _launch(self, function: Any, size: int, *, watch: Any = None, **arguments: Any) -> list[Any]:
        return launch_on_ranks(
            function,
            size,
            arguments={"job": self.job, "folder": self.folder, **arguments},
            timeout_s=self.timeout_s,
            # a rank that computes for long is no failure of those that wait for it
            collective_timeout_s=self.timeout_s + 60.0,
            environment=ENVIRONMENT,
            watch=watch,
        )

    def _has_failed(self, labels: list[str]) -> bool:
        return any((self.folder / f"failure.{label}.json").exists() for label in labels)

    def _failure(self, label: str, rank: int | None, why: str, names: tuple[str, ...]) -> RankFailure:
        """What ended a process, from what it left; raised where it is the user's input."""
        path = self.folder / f"failure.{label}.json"
        if not path.exists():
            return RankFailure(rank, self._told(label, rank, why))
        told = json.loads(path.read_text())
        if told["kind"] == "input":
            raise {"TypeError": TypeError}.get(told["type"], ValueError)(told["message"])
        message = f"{told['type']}: {told['message']}"
        return RankFailure(rank, message, _names_in(message, names), told["traceback"])

    def _told(self, label: str, rank: int | None, why: str) -> str:
        """Why a process left no error of its own."""
        if why.startswith("still running"):
            running = f"still running after {self.timeout_s:g} s"
            return (
                f"{running}: give a larger timeout_s, or smaller batches"
                if rank is None
                else why.replace("still running", running)
            )
        if why.startswith("ended with exit code") and not (self.folder / f"started.{label}").exists():
            return (
                f"{why} before it ran anything: it could not import your factory or strategy (its own message is "
                "above). Put them at the top of a module that other processes can import from this folder, or give "
                "their addresses package.module:function"
            )
        return why

    def _report(
        self, one: OneProcess | None, failures: tuple[RankFailure, ...], deadlock: tuple[Waiting, ...]
    ) -> VerifyReport:
        facts = self._facts()
        rank_facts = facts.get("0") or facts.get("1") or facts.get("one") or RankFacts()
        findings: tuple[Finding, ...] = ()
        errors = dict.fromkeys(("loss", "gradients", "clip_norm", "parameters"), float("nan"))
        notes = self._notes(facts.get("one") or rank_facts)
        if one is not None:
            seen = self._seen(one, facts, has_failed=bool(failures), is_deadlocked=bool(deadlock))
            world = self._world(facts, rank_facts, one)
            findings, errors = judge(seen, world), largest_errors(seen)
            if any(f.code in UNDECIDED for f in findings):
                findings = judge(seen, self._look_closer(world))
            if not (failures or deadlock):
                findings += uncounted_steps(seen)
            notes += _notes_of(seen)
        given = self.job.strategy if isinstance(self.job.strategy, str) else rank_facts.strategy
        return VerifyReport(
            strategy=given,
            world_size=self.job.world_size,
            expert_parallel_size=rank_facts.expert_parallel_size,
            steps=self.job.steps,
            tolerance=self.tolerance,
            **errors,
            findings=findings,
            failures=failures,
            deadlock=deadlock,
            notes=notes,
        )

    def _facts(self) -> dict[str, RankFacts]:
        paths = self.folder.glob("facts.*.pt")
        return {p.name.split(".")[1]: torch.load(p, weights_only=False) for p in paths}

    def _seen(self, one: OneProcess, facts: Mapping[str, RankFacts], *, has_failed: bool, is_deadlocked: bool) -> Seen:
        ranks = {rank: self._steps(str(rank)) for rank in range(self.job.world_size)}
        unfinished: dict[int, Unfinished] = {}
        for rank in range(self.job.world_size):
            path = self.folder / f"unfinished.{rank}.pt"
            if is_deadlocked and path.exists():
                unfinished[rank] = torch.load(path, weights_only=False)
        told = {rank: set(facts[str(rank)].trainable) for rank in ranks if str(rank) in facts}
        trained = set(facts["one"].trainable).intersection(set().union(*told.values()))
        frozen = {name: tuple(r for r, names in told.items() if name not in names) for name in sorted(trained)}
        frozen = {name: where for name, where in frozen.items() if where}
        return Seen({s.step: s for s in one.steps}, ranks, unfinished, self.tolerance, frozen, has_failed)

    def _steps(self, label: str) -> dict[int, StepSeen]:
        steps = [torch.load(p, weights_only=False) for p in self.folder.glob(f"seen.{label}.*.pt")]
        return {step.step: step for step in steps}

    def _world(self, facts: Mapping[str, RankFacts], rank_facts: RankFacts, one: OneProcess) -> World:
        made = [facts[label].batches for label in facts]
        return World(
            world_size=self.job.world_size,
            expert_parallel_size=rank_facts.expert_parallel_size,
            accumulate=self.job.accumulate_grad_batches,
            kinds=facts["one"].kinds,
            outside=frozenset(facts["one"].outside),
            batch_norms=rank_facts.batch_norms,
            ties=tied(one.gaps),
            has_other_batches=any(batches != made[0] for batches in made),
        )

    def _look_closer(self, world: World) -> World:
        """Run one process twice more: with the same random numbers, and with others."""
        is_repeatable = self._agrees("again")
        self.job = replace(self.job, step_seed=self.job.seed + 1)
        return replace(world, is_repeatable=is_repeatable, is_random=is_repeatable and not self._agrees("reseeded"))

    def _agrees(self, label: str) -> bool:
        try:
            self._launch(run_again, 1, label=label)
        except RanksFailed:  # what ran before does not run again
            return False
        steps = self._steps(label).values()
        gradients = [seen.error for step in steps for seen in step.gradients]
        parameters = [seen.error for step in steps for seen in step.parameters]
        return max(gradients + parameters, default=0.0) <= self.tolerance

    def _notes(self, facts: RankFacts) -> tuple[str, ...]:
        notes = []
        dropped = {n: n % self.job.world_size for n in facts.num_rows if n % self.job.world_size}
        for rows, rest in dropped.items():
            notes.append(
                f"the last {rest} of {rows} rows of a batch are left out: {self.job.world_size} ranks share it"
            )
        if facts.silenced:
            notes.append(f"dropout is set to 0 in {', '.join(facts.silenced[:6])}")
        if facts.outside:
            notes.append(f"an optimizer holds {', '.join(facts.outside)}, and the LightningModule does not")
        return (*notes, *facts.notes)


def _check_bounds(tolerance: float, timeout_s: float) -> None:
    if not 0.0 < tolerance < float("inf"):
        raise ValueError(f"tolerance={tolerance} must be a number above 0: write a relative error such as {TOLERANCE}.")
    if not timeout_s > 0.0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0: write how many seconds a process may take.")


def _check(
    factory: Any, strategy: Any, world_size: int, expert_parallel_size: int, steps: int, accumulate: int
) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "verify() was called while one of its own processes imports your script. Put the call under "
            "if __name__ == '__main__':"
        )
    if world_size < 2:
        raise ValueError(f"world_size={world_size} compares nothing with one process. Write 2 or more.")
    if steps < 1 or accumulate < 1:
        raise ValueError(f"steps={steps} and accumulate_grad_batches={accumulate} must both be at least 1.")
    check_divides(world_size, expert_parallel_size)
    main = sys.modules.get("__main__")
    if getattr(factory, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise TypeError(
            f"factory={factory!r} was typed in, or came from standard input, where no other process can import it. "
            "Write it to a file, and call verify() there under if __name__ == '__main__':"
        )
    if isinstance(strategy, str) and ":" not in strategy:
        make_strategy(strategy, expert_parallel_size)
    for name, value in (("factory", factory), ("strategy", strategy)):
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{name}={value!r} cannot be sent to the ranks ({error}). Give a function from the top of a module, or "
                "its address package.module:function."
            ) from error


def _trainable(one: OneProcess) -> tuple[str, ...]:
    return tuple(dict.fromkeys(g.name for step in one.steps for g in step.gradients))


def _names_in(message: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Parameters that an error names, or tells by their index as torch's DDP does."""
    found = [name for name in names if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", message)]
    for match in _INDICES.finditer(message):
        found += [names[int(i)] for i in match.group(1).split() if int(i) < len(names)]
    return tuple(dict.fromkeys(found))


def _causes_first(failures: Mapping[int, RankFailure]) -> tuple[RankFailure, ...]:
    """Failures by rank, without those that only tell that another rank is gone."""
    causes = [f for f in failures.values() if f.traceback and not _is_consequence(f.error)]
    return tuple(causes or failures.values())


def _is_consequence(error: str) -> bool:
    return bool(_ENDED.match(error)) or is_lost_peer(RuntimeError(error))


def _notes_of(seen: Seen) -> tuple[str, ...]:
    problems = {n.problem for steps in seen.ranks.values() for s in steps.values() for n in s.norms if n.problem}
    return tuple(f"no clip norm to compare, gradient_clip_val would fail: {problem}" for problem in sorted(problems))
