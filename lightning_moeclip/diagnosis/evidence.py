"""What is known of one wrong gradient, and what follows from the sketches of it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_moeclip.diagnosis.observations import GradientSeen, Sketch

__all__ = ["EQUAL", "Cause", "Evidence", "World", "cosine", "is_close", "keeps_local", "mean_of_locals", "mean_ratio"]

EQUAL = 1e-6  # relative: far above what float64 rounds, far below a factor of W, ep or K


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
        skipped: who had no loss in this step, though others had: "one process" or "rank 0".
        nan_losses: ranks whose loss is not finite.
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
    skipped: tuple[str, ...] = ()
    nan_losses: tuple[int, ...] = ()
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

    @property
    def is_scalar(self) -> bool:
        """Whether the parameter has one number, which is a multiple of any other."""
        return sum(x != 0.0 for x in self.one.final) <= 1


def is_close(value: float, wanted: float) -> bool:
    """Whether two factors are the same but for rounding."""
    return math.isfinite(value) and abs(value - wanted) <= EQUAL * abs(wanted)


def keeps_local(evidence: Evidence) -> bool:
    """Whether every rank that came to the step has there what autograd brought, with something on some rank."""
    seen = list(evidence.ranks.values())
    return bool(seen) and any(s.final for s in seen) and all(_same(s.local, s.final) for s in seen)


def _same(a: Sketch, b: Sketch) -> bool:
    if len(a) != len(b):
        return False
    return _norm(x - y for x, y in zip(a, b, strict=True)) <= EQUAL * _norm(b)


def mean_of_locals(evidence: Evidence, world: World) -> Sketch | None:
    """Sketch of the mean of the local gradients, missing ones as zeros; None where some are not known."""
    locals_ = evidence.locals
    if len(locals_) < world.world_size or not any(locals_.values()):
        return None
    parts = [local for local in locals_.values() if local]
    return tuple(sum(values) / world.world_size for values in zip(*parts, strict=True))


def mean_ratio(evidence: Evidence, world: World) -> float | None:
    """By which factor that mean is the gradient of one process; None where it is no multiple of it."""
    mean, wanted = mean_of_locals(evidence, world), evidence.one.final
    square = sum(x * x for x in wanted)
    if mean is None or square == 0.0:
        return None
    ratio = sum(x * y for x, y in zip(mean, wanted, strict=True)) / square
    rest = _norm(x - ratio * y for x, y in zip(mean, wanted, strict=True))
    return ratio if rest <= EQUAL * _norm(mean) else None


def cosine(seen: GradientSeen) -> float:
    """Between the gradient of a rank and that of one process, without its sign; NaN where there is none."""
    # the residual is the sine of the angle
    return math.sqrt(max(0.0, 1 - seen.residual**2)) if math.isfinite(seen.residual) else float("nan")


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(sum(x * x for x in values))
