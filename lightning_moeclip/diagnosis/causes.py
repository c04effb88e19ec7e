"""The likely cause of a wrong gradient, from a few numbers of each rank. Pure functions."""

import math
from collections.abc import Iterable, Mapping

from lightning_moeclip.diagnosis.evidence import (
    EQUAL,
    Cause,
    Evidence,
    World,
    cosine,
    is_close,
    keeps_local,
    mean_of_locals,
    mean_ratio,
)
from lightning_moeclip.diagnosis.factors import NO_MEND, scaled_loss, wrong_count, wrong_divisor

__all__ = ["UNDECIDED", "cause_of_gradient", "cause_of_loss", "frozen_on", "skipped_by", "tied"]

_FLOAT32 = 1e-5  # a few times the rounding of float32
_TIE = 1e-9  # relative gap of two logits that summation in another order may turn round
UNDECIDED = ("step", "uncorrelated")  # codes of which further runs of one process may tell more


def cause_of_gradient(evidence: Evidence, world: World) -> Cause:
    """The likely cause of a gradient that is not that of one process."""
    for judge in (_input, _skipped, _not_finite, _frozen, _presence, _rounding, _factor, _unreduced, _reduction, _step):
        cause = judge(evidence, world)
        if cause is not None:
            return cause
    return Cause("unknown", "the gradient differs, and what the ranks saw does not tell why")


def cause_of_loss(ratio: float, world: World) -> Cause:
    """The likely cause of a mean loss that is not that of one process."""
    if world.nan_losses:
        return Cause("nan", _nan_loss(world), is_in_step=True)
    if is_close(ratio, world.world_size) or is_close(ratio, 1 / world.world_size):
        return scaled_loss(ratio, world)
    told = f"is {ratio:.6g} times the loss of one process" if math.isfinite(ratio) else "is not the loss of one process"
    return _step_cause(world, f"the mean of the ranks' losses {told}")


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


def _skipped(evidence: Evidence, world: World) -> Cause | None:
    return skipped_by(world.skipped) if world.skipped else None


def skipped_by(who: Iterable[str]) -> Cause:
    """Some have no loss in a step in which others have one."""
    return Cause(
        "skipped",
        f"no loss in {', '.join(who)}, and one elsewhere: training_step returned None there, as a guard against NaN "
        f"does that looks at the rows of its own batch. Decide on the rows of all ranks. {NO_MEND}",
        is_in_step=True,
    )


def _not_finite(evidence: Evidence, world: World) -> Cause | None:
    bad = sorted(r for r, seen in evidence.ranks.items() if seen.num_nonfinite)
    if not bad:
        return None
    if evidence.one.num_nonfinite:
        return Cause("nan", f"NaN or infinite in one process too. {NO_MEND}", is_in_step=True)
    if world.nan_losses:
        return Cause("nan", _nan_loss(world), is_in_step=True)
    origin = sorted(r for r, local in evidence.locals.items() if not all(map(math.isfinite, local)))
    if origin:
        return Cause("nan", f"NaN or infinite on {_ranks(origin)} before any reduction. {NO_MEND}", is_in_step=True)
    return Cause("nan", f"NaN or infinite on {_ranks(bad)}, though what autograd brought was finite")


def _nan_loss(world: World) -> str:
    return f"the loss is NaN or infinite on {_ranks(world.nan_losses)}. {NO_MEND}"


def _frozen(evidence: Evidence, world: World) -> Cause | None:
    return frozen_on(evidence.frozen) if evidence.frozen and evidence.one.is_trainable else None


def frozen_on(ranks: Iterable[int]) -> Cause:
    """Some ranks freeze a parameter that others train."""
    text = f"frozen on {_ranks(ranks)} and trained elsewhere: requires_grad must be the same on every rank"
    return Cause("frozen", text, is_in_step=True)


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
            "no gradient arrives on any rank, and in one process one does: the step cuts the graph on several ranks, "
            "as all_gather without sync_grads=True does. Use modules.ContrastiveLoss, or "
            f"all_gather(..., sync_grads=True). {NO_MEND}",
            is_in_step=True,
        )
    if present and absent and (missing or keeps_local(evidence)):
        return Cause(
            "missing_on_ranks",
            f"no gradient arrives on {_ranks(absent)} (of an expert: no token went there), and the strategy does not "
            f"reduce what {_ranks(present)} had. MoEClipStrategy counts it as zeros",
        )
    return None


def _unreduced(evidence: Evidence, world: World) -> Cause | None:
    if not evidence.ranks or not keeps_local(evidence):
        return None
    place = ": it is in the optimizer and not in the LightningModule" if evidence.name in world.outside else ""
    mean = mean_ratio(evidence, world)
    if mean is not None and is_close(mean, 1.0):
        text = f"not reduced: each rank steps with its own gradient, whose mean is right{place}"
        return Cause("not_reduced", f"{text}. MoEClipStrategy reduces it")
    if mean_of_locals(evidence, world) is None or world.world_size == 1:
        return Cause("not_reduced", f"not reduced: each rank steps with its own gradient{place}")
    return None


def _factor(evidence: Evidence, world: World) -> Cause | None:
    ratios = [seen.ratio for seen in evidence.ranks.values()]
    if not ratios or not all(math.isfinite(r) and r != 0.0 for r in ratios):
        return None
    is_multiple = all(seen.residual < EQUAL for seen in evidence.ranks.values())
    ratio = ratios[0]
    if not is_multiple or not all(is_close(r, ratio) for r in ratios) or is_close(ratio, 1.0):
        return None
    mean = mean_ratio(evidence, world)
    if mean is not None and is_close(mean, 1.0):
        # of one rank alone, as others were ended, any number is a multiple
        is_own = evidence.is_scalar and keeps_local(evidence)
        return None if is_own else wrong_divisor(evidence.name, ratio, world)
    if is_close(world.loss_ratio, ratio):
        return scaled_loss(ratio, world)
    if mean is not None and not is_close(mean, ratio):
        return None
    return wrong_count(evidence, ratio, world)


def _reduction(evidence: Evidence, world: World) -> Cause | None:
    mean = mean_ratio(evidence, world)
    if mean is None or not is_close(mean, 1.0):
        return None
    return Cause(
        "reduced_wrongly",
        "the ranks' own gradients have the right mean, and the strategy makes something else of them: reduced over "
        "other ranks, twice, or mixed with another parameter",
    )


def _rounding(evidence: Evidence, world: World) -> Cause | None:
    if evidence.error >= _FLOAT32:
        return None
    return Cause(
        "float32",
        f"off by {evidence.error:.1e}, about the rounding of float32: a part of the step computes in it. Give a larger "
        "tolerance",
        is_in_step=True,
    )


def _step(evidence: Evidence, world: World) -> Cause | None:
    cosines = [cosine(seen) for seen in evidence.ranks.values()]
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
            f"two runs of one process with one seed differ: the module is not deterministic. {NO_MEND}",
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
        f"{found}: the loss of a share of the rows must be that share of the whole loss. A contrastive loss needs the "
        "features of all ranks, with their gradient (modules.ContrastiveLoss). Others that fail: a loss that means "
        "over different numbers of elements on each rank (ignore_index, a mask), and a buffer that each rank makes "
        f"from its own rows. {NO_MEND}",
        is_in_step=True,
    )


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"


def tied(gaps: Mapping[str, float]) -> tuple[str, ...]:
    """Routers whose logits come so near to each other that rounding may turn them round."""
    return tuple(path for path, gap in gaps.items() if gap <= _TIE)
