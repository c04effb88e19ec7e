"""The likely cause of a wrong gradient, from a few numbers of each rank. Pure functions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_moeclip.diagnosis.observations import GradientSeen, Sketch

__all__ = ["UNDECIDED", "Cause", "Evidence", "World", "cause_of_gradient", "cause_of_loss", "tied"]

_EQUAL = 1e-6  # relative: far above what float64 rounds, far below a factor of W, ep or K
_FLOAT32 = 1e-5  # a few times the rounding of float32
_TIE = 1e-9  # relative gap of two logits that summation in another order may turn round
UNDECIDED = ("step", "uncorrelated")  # codes of which further runs of one process may tell more
_NO_MEND = "No strategy can mend that."


@dataclass(frozen=True)
class Cause:
    """Why something differs from one process.

    Attributes:
        code: one word, the same in every version.
        text: a sentence for the user.
        is_in_step: the training step or the module does it: another strategy does not help.
    """

    code: str
    text: str
    is_in_step: bool = False


@dataclass(frozen=True)
class World:
    """What is the same for all parameters.

    Attributes:
        world_size: W.
        expert_parallel_size: ranks that share out the experts.
        accumulate: micro-batches of a step.
        kinds: of the parameters, by name.
        outside: names of parameters that only an optimizer holds.
        loss_ratio: mean loss of the ranks over that of one process; NaN where it is not known.
        batch_norms: layers that normalise with the rows of their own rank.
        ties: routers two of whose logits are as good as equal for some token.
        is_repeatable: two runs of one process agree; None where nobody looked.
        is_random: two runs of one process with other random numbers differ; None where nobody looked.
        has_other_batches: ranks were given other batches than one process.
    """

    world_size: int
    expert_parallel_size: int = 1
    accumulate: int = 1
    kinds: Mapping[str, str] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    loss_ratio: float = float("nan")
    batch_norms: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()
    is_repeatable: bool | None = None
    is_random: bool | None = None
    has_other_batches: bool = False


@dataclass(frozen=True)
class Evidence:
    """One parameter in one step.

    Attributes:
        name: of the parameter.
        one: of one process.
        ranks: of the ranks that came to the optimizer's step.
        unfinished: local sketches of the ranks that were ended before; empty where no gradient had arrived.
        frozen: ranks, finished or not, on which it requires no gradient.
        has_other_weights: its values differed before the step.
    """

    name: str
    one: GradientSeen
    ranks: Mapping[int, GradientSeen]
    unfinished: Mapping[int, Sketch] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    has_other_weights: bool = False

    @property
    def locals(self) -> dict[int, Sketch]:
        """Local sketches by rank, empty ones where no gradient arrived."""
        return {r: seen.local for r, seen in self.ranks.items()} | dict(self.unfinished)

    @property
    def error(self) -> float:
        """Largest of the ranks."""
        return max((seen.error for seen in self.ranks.values()), default=float("inf"))


def cause_of_gradient(evidence: Evidence, world: World) -> Cause:
    """The likely cause of a gradient that is not that of one process."""
    for judge in (_input, _not_finite, _frozen, _presence, _unreduced, _factor, _reduction, _step):
        cause = judge(evidence, world)
        if cause is not None:
            return cause
    return Cause("unknown", "the gradient differs, and what the ranks saw does not tell why")


def cause_of_loss(ratio: float, world: World) -> Cause:
    """The likely cause of a mean loss that is not that of one process."""
    if not math.isfinite(ratio):
        return Cause("nan", f"the loss of a rank is not finite. {_NO_MEND}", is_in_step=True)
    if is_close(ratio, world.world_size):
        return _scaled_loss(ratio, world)
    return _step_cause(world, f"the mean of the ranks' losses is {ratio:.6g} times the loss of one process")


def _input(evidence: Evidence, world: World) -> Cause | None:
    if world.has_other_batches:
        return Cause(
            "batches_differ",
            "the factory makes other batches in each process: draw them from torch, numpy or random, which are seeded "
            "before it is called, or from a generator with a seed",
            is_in_step=True,
        )
    if evidence.has_other_weights:
        return Cause(
            "weights_differ",
            "the values differ from those of one process before the first step: the factory or the strategy gives "
            "other weights",
            is_in_step=True,
        )
    return None


def _not_finite(evidence: Evidence, world: World) -> Cause | None:
    bad = sorted(r for r, seen in evidence.ranks.items() if seen.num_nonfinite)
    if not bad:
        return None
    if evidence.one.num_nonfinite:
        return Cause("nan", f"NaN or infinite in one process too. {_NO_MEND}", is_in_step=True)
    origin = sorted(r for r, local in evidence.locals.items() if not all(map(math.isfinite, local)))
    if origin:
        return Cause("nan", f"NaN or infinite on {_ranks(origin)} before any reduction. {_NO_MEND}", is_in_step=True)
    return Cause("nan", f"NaN or infinite on {_ranks(bad)}, though what autograd brought was finite")


def _frozen(evidence: Evidence, world: World) -> Cause | None:
    if not evidence.frozen or not evidence.one.is_trainable:
        return None
    return Cause(
        "frozen",
        f"frozen on {_ranks(evidence.frozen)} and trained elsewhere: requires_grad must be the same on every rank",
        is_in_step=True,
    )


def _presence(evidence: Evidence, world: World) -> Cause | None:
    present = sorted(r for r, local in evidence.locals.items() if local)
    absent = sorted(r for r, local in evidence.locals.items() if not local)
    missing = [r for r, seen in evidence.ranks.items() if seen.is_missing]
    if evidence.one.is_missing:
        is_zero = all(seen.norm == 0.0 for seen in evidence.ranks.values())
        what = "zeros" if is_zero else "a gradient"
        return Cause("extra", f"{what} where one process has none: momentum and weight decay move it")
    if not present and missing:
        return Cause(
            "missing",
            "no gradient arrives on any rank, and in one process one does: the step cuts the graph on several ranks, as "
            "all_gather without sync_grads=True does. Use modules.ContrastiveLoss, or all_gather(..., sync_grads=True). "
            f"{_NO_MEND}",
            is_in_step=True,
        )
    if present and absent and (missing or _keeps_local(evidence)):
        return Cause(
            "missing_on_ranks",
            f"no gradient arrives on {_ranks(absent)} (of an expert: no token went there), and the strategy does not "
            f"reduce what {_ranks(present)} had. MoEClipStrategy counts it as zeros",
        )
    return None


def _unreduced(evidence: Evidence, world: World) -> Cause | None:
    if not evidence.ranks or not _keeps_local(evidence):
        return None
    place = ": it is in the optimizer and not in the LightningModule" if evidence.name in world.outside else ""
    if _mean_ratio(evidence, world) is not None and is_close(_mean_ratio(evidence, world) or 0.0, 1.0):
        text = f"not reduced: each rank steps with its own gradient, whose mean is right{place}. MoEClipStrategy reduces it"
        return Cause("not_reduced", text)
    if _mean(evidence, world) is None or world.world_size == 1:
        return Cause("not_reduced", f"not reduced: each rank steps with its own gradient{place}")
    return None


def _factor(evidence: Evidence, world: World) -> Cause | None:
    ratios = [seen.ratio for seen in evidence.ranks.values()]
    if not ratios or not all(math.isfinite(r) and r != 0.0 for r in ratios):
        return None
    is_multiple = all(seen.residual < _EQUAL for seen in evidence.ranks.values())
    ratio = ratios[0]
    if not is_multiple or not all(is_close(r, ratio) for r in ratios) or is_close(ratio, 1.0):
        return None
    mean = _mean_ratio(evidence, world)
    if mean is not None and is_close(mean, 1.0):
        return _wrong_divisor(evidence.name, ratio, world)
    if is_close(world.loss_ratio, ratio):
        return _scaled_loss(ratio, world)
    if mean is not None and not is_close(mean, ratio):
        return None
    return _wrong_count(evidence.name, ratio, world)


def _reduction(evidence: Evidence, world: World) -> Cause | None:
    mean = _mean_ratio(evidence, world)
    if mean is None or not is_close(mean, 1.0):
        return None
    return Cause(
        "reduced_wrongly",
        "the ranks' own gradients have the right mean, and the strategy makes something else of them: reduced over "
        "other ranks, twice, or mixed with another parameter",
    )


def _step(evidence: Evidence, world: World) -> Cause | None:
    if evidence.error < _FLOAT32:
        return Cause(
            "float32",
            f"off by {evidence.error:.1e}, about the rounding of float32: a part of the step computes in it. Give a "
            "larger tolerance",
            is_in_step=True,
        )
    cosines = [_cosine(seen) for seen in evidence.ranks.values()]
    known = [c for c in cosines if math.isfinite(c)]
    if known and max(map(abs, known)) < 0.1:
        found = "uncorrelated with the gradient of one process"
        cause = _step_cause(world, found)
        return Cause("uncorrelated", cause.text, is_in_step=True) if cause.code == "step" else cause
    return _step_cause(world, "the ranks' own gradients do not have the gradient of one process as their mean")


def _step_cause(world: World, found: str) -> Cause:
    """Why the step itself gives something else on ranks."""
    if world.is_repeatable is False:
        return Cause(
            "not_deterministic",
            f"two runs of one process with one seed differ: the module is not deterministic. {_NO_MEND}",
            is_in_step=True,
        )
    if world.is_random:
        return Cause(
            "random",
            f"the step draws random numbers, which fall on other rows on ranks: {found}. Switch them off in the "
            "factory to compare",
            is_in_step=True,
        )
    if world.batch_norms:
        return Cause(
            "batch_norm",
            f"BatchNorm ({', '.join(world.batch_norms[:3])}) normalises with the rows of its own rank: {found}. "
            "Trainer(sync_batchnorm=True) has it take those of all ranks",
            is_in_step=True,
        )
    if world.ties:
        return Cause(
            "routing_tie",
            f"a routing tie: two logits of a token are as good as equal in {', '.join(world.ties[:3])}, and rounding "
            f"decides which expert it takes: {found}",
            is_in_step=True,
        )
    return Cause(
        "step",
        f"{found}: the loss of a share of the rows must be that share of the whole loss, so a contrastive loss needs "
        f"the features of all ranks, with their gradient (modules.ContrastiveLoss). {_NO_MEND}",
        is_in_step=True,
    )


def _scaled_loss(ratio: float, world: World) -> Cause:
    what = f"{ratio:.6g}" + (f" = world_size = {world.world_size}" if is_close(ratio, world.world_size) else "")
    return Cause(
        "loss_scaled",
        f"the loss is {what} times that of one process: ranks' losses are averaged, so leave out the factor. {_NO_MEND}",
        is_in_step=True,
    )


def _wrong_divisor(name: str, ratio: float, world: World) -> Cause:
    """The ranks' own gradients are right, and the strategy divides by something else than W."""
    w, ep = world.world_size, world.expert_parallel_size
    is_expert = world.kinds.get(name) == "expert"
    if is_expert and ep > 1 and is_close(ratio, ep):
        also = f" ({ep} is world_size as well: it may not be divided at all)" if ep == w else ""
        text = (
            f"{ep} = expert_parallel_size times too large: averaged over the {w // ep} rank(s) that hold the expert "
            f"instead of divided by world_size={w}{also}"
        )
        return Cause("times_expert_parallel_size", text)
    if is_close(ratio, w):
        return Cause("times_world_size", f"{w} = world_size times too large: summed over the ranks and not divided")
    if is_close(ratio, 1 / w):
        return Cause("over_world_size", f"{w} = world_size times too small: divided twice, or not summed")
    if ep > 1 and is_close(ratio, 1 / ep):
        return Cause("over_expert_parallel_size", f"{ep} = expert_parallel_size times too small: divided once more")
    return Cause("wrong_divisor", f"{ratio:.6g} times too large, though the ranks' own gradients have the right mean")


def _wrong_count(name: str, ratio: float, world: World) -> Cause:
    """The step gives a multiple on every rank, and its loss is right."""
    w, k = world.world_size, world.accumulate
    whole = round(ratio)
    if whole >= 2 and is_close(ratio, whole):
        fits = [told for told, n in (("world_size", w), ("accumulate_grad_batches", k)) if n == whole]
        also = f" ({whole} is {' and '.join(fits)})" if fits else ""
        return Cause(
            "counted_times", f"the step counts it {whole} times{also}, and its loss is right. {_NO_MEND}", is_in_step=True
        )
    if is_close(ratio, 1 / w):
        return Cause(
            "own_rows",
            f"{w} = world_size times too small: the gradient comes through the rank's own features alone, as when they "
            f"are gathered without gradient. Use modules.ContrastiveLoss. {_NO_MEND}",
            is_in_step=True,
        )
    return Cause("multiple", f"the step gives {ratio:.6g} times the gradient on every rank. {_NO_MEND}", is_in_step=True)


def is_close(value: float, wanted: float) -> bool:
    """Whether two factors are the same but for rounding."""
    return math.isfinite(value) and abs(value - wanted) <= _EQUAL * abs(wanted)


def _keeps_local(evidence: Evidence) -> bool:
    """Whether every rank that came to the step has there what autograd brought, with something on some rank."""
    seen = list(evidence.ranks.values())
    return bool(seen) and any(s.final for s in seen) and all(_same(s.local, s.final) for s in seen)


def _same(a: Sketch, b: Sketch) -> bool:
    if len(a) != len(b):
        return False
    return _norm(x - y for x, y in zip(a, b, strict=True)) <= _EQUAL * _norm(b)


def _mean(evidence: Evidence, world: World) -> Sketch | None:
    """Sketch of the mean of the local gradients, missing ones as zeros; None where some are not known."""
    locals_ = evidence.locals
    if len(locals_) < world.world_size or not any(locals_.values()):
        return None
    parts = [local for local in locals_.values() if local]
    return tuple(sum(values) / world.world_size for values in zip(*parts, strict=True))


def _mean_ratio(evidence: Evidence, world: World) -> float | None:
    """By which factor that mean is the gradient of one process; None where it is no multiple of it."""
    mean, wanted = _mean(evidence, world), evidence.one.final
    square = sum(x * x for x in wanted)
    if mean is None or square == 0.0:
        return None
    ratio = sum(x * y for x, y in zip(mean, wanted, strict=True)) / square
    rest = _norm(x - ratio * y for x, y in zip(mean, wanted, strict=True))
    return ratio if rest <= _EQUAL * _norm(mean) else None


def _cosine(seen: GradientSeen) -> float:
    # the residual is the sine of the angle
    return math.sqrt(max(0.0, 1 - seen.residual**2)) if math.isfinite(seen.residual) else float("nan")


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(x * x for x in values))


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"


def tied(gaps: Mapping[str, float]) -> tuple[str, ...]:
    """Routers whose logits come so near to each other that rounding may turn them round."""
    return tuple(path for path, gap in gaps.items() if gap <= _TIE)
