"""From what one process and the ranks saw to errors and findings. Pure functions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_moeclip.diagnosis.causes import cause_of_gradient, cause_of_loss, frozen_on, skipped_by
from lightning_moeclip.diagnosis.evidence import Cause, Evidence, World
from lightning_moeclip.diagnosis.observations import GradientSeen, NormSeen, StepSeen, Unfinished
from lightning_moeclip.diagnosis.verify_report import Finding

__all__ = ["Seen", "first_wrong_step", "judge", "largest_errors", "loss_ratio", "uncounted_steps"]

# causes that a rank's own numbers prove, whatever went wrong in steps before
_PROVEN = ("frozen", "missing_on_ranks", "nan", "missing", "weights_differ", "batches_differ", "skipped")
_FLOOR = 1e-6  # of the norm of all gradients: a loss below that is noise of what cancels within it
_ROUNDING = 1e-9
_FOLLOWS = Cause("follows", "follows from what went wrong before")


@dataclass(frozen=True)
class Seen:
    """All that was seen.

    Attributes:
        one: steps of one process, by number.
        ranks: steps of each rank, by rank and number.
        unfinished: of the ranks that were ended.
        tolerance: largest error that passes.
        has_failed: an error ended ranks: what not all of them came to says nothing of the strategy.
        frozen: ranks on which a parameter that one process trains is frozen when the run ends, by name.
    """

    one: Mapping[int, StepSeen]
    ranks: Mapping[int, Mapping[int, StepSeen]]
    unfinished: Mapping[int, Unfinished]
    tolerance: float
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_failed: bool = False

    def at(self, step: int) -> dict[int, StepSeen]:
        """That step of each rank that came to it."""
        return {rank: steps[step] for rank, steps in self.ranks.items() if step in steps}


def judge(seen: Seen, world: World) -> tuple[Finding, ...]:
    """All that is above the tolerance, causes before consequences, larger errors first."""
    first = first_wrong_step(seen)
    if first:
        world = replace(world, loss_ratio=loss_ratio(seen, first), nan_losses=_nan_losses(seen, first))
    found: dict[tuple[str, str], Finding] = {}
    for step in sorted(seen.one):
        for finding in _of_step(seen, step, world):
            key = (finding.name, finding.quantity)
            # a wrong gradient makes a wrong parameter: one of them is enough
            if key not in found and (finding.quantity != "parameter" or (finding.name, "gradient") not in found):
                found[key] = finding
    for name, ranks in seen.frozen.items():
        found.setdefault((name, "gradient"), _finding(name, "gradient", 1, float("inf"), frozen_on(ranks)))
    return tuple(sorted(found.values(), key=lambda f: (f.code == "follows", -f.error)))


def first_wrong_step(seen: Seen) -> int:
    """The first step with a wrong gradient, loss or parameter; 0 when there is none or the start is wrong."""
    for step in sorted(seen.one):
        if step and (_wrong_gradients(seen, step) or _loss_error(seen, step) > seen.tolerance):
            return step
    return 0


def loss_ratio(seen: Seen, step: int) -> float:
    """Mean loss of the ranks over that of one process; NaN where it is not known."""
    losses = _losses(seen, step)
    return losses[0].ratio if losses else float("nan")


def _nan_losses(seen: Seen, step: int) -> tuple[int, ...]:
    return tuple(rank for rank, s in sorted(seen.at(step).items()) if not all(map(math.isfinite, s.losses)))


def largest_errors(seen: Seen) -> dict[str, float]:
    """Largest relative error of loss, gradients, clip norm and parameters; NaN where nothing was compared."""
    told = {n: seen.at(n) for n in {n for steps in seen.ranks.values() for n in steps}}
    steps = [s for at in told.values() if not seen.has_failed or len(at) == len(seen.ranks) for s in at.values()]
    numbers = sorted(n for n in seen.one if n)
    return {
        "loss": _largest(e for n in numbers if _losses(seen, n) for e in [_loss_error(seen, n)]),
        "gradients": _largest(
            g.error for step in steps for g in step.gradients if not (g.is_missing and g.is_missing_in_one)
        ),
        "clip_norm": _largest(e for n in numbers for e in _norm_errors(seen, n)),
        "parameters": _largest(p.error for step in steps for p in step.parameters),
    }


def uncounted_steps(seen: Seen) -> tuple[Finding, ...]:
    """What says that ranks took other optimizer steps than one process, or that nobody took one."""
    wanted = sum(bool(step.norms) for step in seen.one.values())
    found = {rank: sum(bool(step.norms) for step in steps.values()) for rank, steps in seen.ranks.items()}
    if not wanted:
        text = "no optimizer step was seen, so that nothing was compared: step what self.optimizers() returns"
        return (_finding("", "gradient", 1, float("inf"), Cause("no_step", text, is_in_step=True)),)
    everybody = [*seen.one.values(), *(step for steps in seen.ranks.values() for step in steps.values())]
    if all(g.is_missing for step in everybody for g in step.gradients):
        text = (
            "no gradient was there in any step, so that nothing was compared: training_step returns None, or the loss "
            "reaches no parameter that an optimizer holds"
        )
        return (_finding("", "gradient", 1, float("inf"), Cause("no_step", text, is_in_step=True)),)
    other = {rank: num for rank, num in found.items() if num != wanted}
    if not other:
        return ()
    told = ", ".join(f"rank {rank}: {num}" for rank, num in other.items())
    cause = Cause("other_steps", f"one process took {wanted} optimizer steps, {told}", is_in_step=True)
    return (_finding("", "gradient", 1, float("inf"), cause),)


def _of_step(seen: Seen, step: int, world: World) -> list[Finding]:
    found = [] if step else _starts(seen)
    has_drifted = _has_drifted(seen, step - 1)
    world = replace(world, skipped=_skipped(seen, step))
    error = _loss_error(seen, step)
    if step and world.skipped:
        found.append(_finding("", "loss", step, float("inf"), skipped_by(world.skipped)))
    elif step and error > seen.tolerance:
        cause = _FOLLOWS if has_drifted else cause_of_loss(loss_ratio(seen, step), world)
        found.append(_finding("", "loss", step, error, cause))
    wrong = _wrong_gradients(seen, step)
    first_call = min((evidence.one.call for evidence in wrong), default=0)
    stepped = {g.name for g in seen.one[step].gradients if g.call == first_call} if step in seen.one else set()
    for evidence in wrong:
        cause = cause_of_gradient(evidence, world)
        # an optimizer that steps again does so from weights that the wrong step before has moved
        is_later = evidence.one.call > first_call and evidence.name in stepped
        if (has_drifted or is_later) and cause.code not in _PROVEN:
            cause = _FOLLOWS
        found.append(_finding(evidence.name, "gradient", step, evidence.error, cause))
    for error in _norm_errors(seen, step):
        if error > seen.tolerance:
            found.append(_finding("", "clip norm", step, error, _norm_cause(seen, step, found)))
    if step:
        found += _wrong_parameters(seen, step)
    return found


def _starts(seen: Seen) -> list[Finding]:
    text = "other values than one process before the first step: the factory or the strategy gives other weights"
    cause = Cause("weights_differ", text, is_in_step=True)
    errors = _parameter_errors(seen, 0)
    return [_finding(n, "parameter", 0, e, cause) for n, e in errors.items() if not e <= seen.tolerance]


def _wrong_parameters(seen: Seen, step: int) -> list[Finding]:
    cause = Cause(
        "step_of_optimizer",
        "its gradient was right before the step: clipped by another factor, or stepped by another optimizer",
    )
    wrong = {n: e for n, e in _parameter_errors(seen, step).items() if not e <= seen.tolerance}
    return [_finding(name, "parameter", step, error, cause) for name, error in wrong.items()]


def _wrong_gradients(seen: Seen, step: int) -> list[Evidence]:
    if step not in seen.one:
        return []
    at = {rank: {(g.call, g.name): g for g in s.gradients} for rank, s in seen.at(step).items()}
    stuck = {rank: u for rank, u in seen.unfinished.items() if u.step == step}
    evidence = [_gather(one, at, stuck, seen) for one in seen.one[step].gradients]
    if seen.has_failed:
        evidence = [e for e in evidence if len(e.ranks) == len(seen.ranks)]
    # where every rank was ended within the step, only who had a gradient at all is known
    differs = [e for e in evidence if not e.ranks and len({bool(local) for local in e.locals.values()}) > 1]
    wrong = [e for e in evidence if e.ranks and not e.error <= seen.tolerance]
    return wrong or differs


def _gather(
    one: GradientSeen,
    at: Mapping[int, Mapping[tuple[int, str], GradientSeen]],
    stuck: Mapping[int, Unfinished],
    seen: Seen,
) -> Evidence:
    name = one.name
    key = (one.call, name)
    ranks = {rank: by_key[key] for rank, by_key in at.items() if key in by_key}
    unfinished = {rank: u.locals.get(name, ()) for rank, u in stuck.items() if rank not in ranks}
    frozen = [rank for rank, g in ranks.items() if not g.is_trainable]
    frozen += [rank for rank in unfinished if name not in stuck[rank].trainable]
    start = _parameter_errors(seen, 0).get(name, 0.0)
    return Evidence(name, one, ranks, unfinished, tuple(sorted(frozen)), not start <= seen.tolerance)


def _parameter_errors(seen: Seen, step: int) -> dict[str, float]:
    errors: dict[str, float] = {}
    for state in seen.at(step).values():
        for parameter in state.parameters:
            errors[parameter.name] = max(parameter.error, errors.get(parameter.name, 0.0))
    return errors


def _has_drifted(seen: Seen, step: int) -> bool:
    return any(not error <= seen.tolerance for error in _parameter_errors(seen, step).values())


@dataclass(frozen=True)
class _Loss:
    """One loss of one step.

    Attributes:
        found: mean over the ranks.
        wanted: of one process.
        floor: of the size that an error is a part of. A loss may be zero where its gradients are not: the losses of
            the ranks cancel, or terms within it do.
    """

    found: float
    wanted: float
    floor: float

    @property
    def error(self) -> float:
        return _relative(self.found, self.wanted, self.floor)

    @property
    def ratio(self) -> float:
        """NaN where the loss of one process is zero but for rounding."""
        is_zero = abs(self.wanted) <= _ROUNDING * self.floor
        return float("nan") if is_zero or self.wanted == 0.0 else self.found / self.wanted


def _losses(seen: Seen, step: int) -> list[_Loss]:
    """Each loss of a step; empty unless all ranks came to it."""
    at = seen.at(step)
    if step not in seen.one or not at or len(at) < len(seen.ranks):
        return []
    of_gradients = _FLOOR * math.sqrt(sum(g.norm**2 for g in seen.one[step].gradients))
    losses = []
    for wanted, *values in zip(seen.one[step].losses, *(s.losses for s in at.values()), strict=False):
        found = mean(values)
        losses.append(_Loss(found, wanted, max(of_gradients, *(abs(value - found) for value in values))))
    return losses


def _skipped(seen: Seen, step: int) -> tuple[str, ...]:
    """Who stepped without a loss where others had one, or came to wait in the middle of it."""
    if step not in seen.one:
        return ()
    who = {"one process": seen.one[step]} | {f"rank {rank}": s for rank, s in sorted(seen.at(step).items())}
    # a loss that goes backward past Lightning is not seen, its gradients are; MoEClipStrategy puts a zero without any
    has_loss = {name: any(s.losses) or any(g.local for g in s.gradients) for name, s in who.items()}
    without = tuple(name for name, state in who.items() if state.norms and not has_loss[name])
    is_stuck = any(u.step == step and rank not in seen.at(step) for rank, u in seen.unfinished.items())
    return without if any(has_loss.values()) or is_stuck else ()


def mean(values: Sequence[float]) -> float:
    """Their sum over their number."""
    return sum(values) / len(values)


def _loss_error(seen: Seen, step: int) -> float:
    return max((loss.error for loss in _losses(seen, step)), default=0.0)


def _norm_errors(seen: Seen, step: int) -> list[float]:
    if step not in seen.one:
        return []
    at = seen.at(step)
    errors = []
    for call, wanted in enumerate(seen.one[step].norms):
        told = [s.norms[call] for s in at.values() if call < len(s.norms)]
        found = _norms(told, len(seen.ranks), is_partial_unknown=seen.has_failed)
        errors += [_relative(value, wanted.value) for value in found if wanted.value > 0]
    return errors


def _norms(told: Sequence[NormSeen], num_ranks: int, *, is_partial_unknown: bool) -> list[float]:
    if any(norm.problem for norm in told) or (is_partial_unknown and len(told) < num_ranks):
        return []
    parts = [norm.value for norm in told if norm.is_square_part]
    if parts:
        return [math.sqrt(sum(parts))] if len(parts) == num_ranks else []
    return [norm.value for norm in told]


def _norm_cause(seen: Seen, step: int, found: Iterable[Finding]) -> Cause:
    if any(finding.quantity == "gradient" for finding in found) or _has_drifted(seen, step - 1):
        return _FOLLOWS
    return Cause("norm", "the gradients are right, and the norm counts a part of them never or more than once")


def _relative(found: float, wanted: float, floor: float = 0.0) -> float:
    if found == wanted:
        return 0.0
    size = max(abs(wanted), floor)
    error = abs(found - wanted) / size if size else float("inf")
    return error if math.isfinite(error) else float("inf")


def _largest(errors: Iterable[float]) -> float:
    return max(errors, default=float("nan"))


def _finding(name: str, quantity: str, step: int, error: float, cause: Cause) -> Finding:
    return Finding(name, quantity, step, error, cause.code, cause.text, cause.is_in_step)
