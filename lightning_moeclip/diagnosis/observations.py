"""What a rank saw in the steps of ``verify``: numbers, small enough to be sent."""

from dataclasses import dataclass, field

__all__ = ["GradientSeen", "NormSeen", "ParameterSeen", "RankFacts", "StepSeen", "Unfinished"]

Sketch = tuple[float, ...]


@dataclass(frozen=True)
class GradientSeen:
    """Gradient of one parameter on one rank, where an optimizer is about to step.

    Attributes:
        name: of the parameter.
        is_trainable: it requires a gradient on this rank.
        is_missing: ``grad`` is None on this rank.
        is_missing_in_one: ``grad`` is None in one process.
        error: ||g - ref|| / max(||ref||, 1e-6 ||all ref||), of this rank's part; infinite where only one is None.
        ratio: <g, ref> / <ref, ref>; NaN where either is None or zero.
        residual: ||g - ratio * ref|| / ||g||; 0 for a multiple of the reference.
        norm: ||g|| of this rank's part.
        num_nonfinite: elements of g that are NaN or infinite.
        arrivals: how often autograd brought a gradient to this rank since the last step.
        local: sketch of what it brought, before any reduction; empty where nothing came.
        final: sketch of ``grad``; empty where it is None.
        call: which step of an optimizer between two batches, from 0.
    """

    name: str
    is_trainable: bool
    is_missing: bool
    is_missing_in_one: bool
    error: float
    ratio: float
    residual: float
    norm: float
    num_nonfinite: int
    arrivals: int
    local: Sketch = ()
    final: Sketch = ()
    call: int = 0


@dataclass(frozen=True)
class NormSeen:
    """Gradient norm that clipping would use for one optimizer step.

    Attributes:
        value: the norm, or this rank's part of its square; NaN where it cannot be had.
        is_square_part: ``value`` is one of the parts, one per rank, that add up to the square.
        problem: why there is no norm; empty where there is one.
    """

    value: float
    is_square_part: bool = False
    problem: str = ""


@dataclass(frozen=True)
class ParameterSeen:
    """A parameter after a step, or before the first one.

    Attributes:
        name: of the parameter.
        error: like that of a gradient.
        num_nonfinite: elements that are NaN or infinite.
    """

    name: str
    error: float
    num_nonfinite: int


@dataclass(frozen=True)
class StepSeen:
    """One optimizer step of one rank.

    Attributes:
        step: from 1; 0 is the state before the first one, with parameters alone.
        losses: that went backward since the last step, in order.
        norms: of each optimizer that stepped.
        gradients: of the parameters of each optimizer that stepped.
        parameters: after the step; empty when the rank did not come so far.
    """

    step: int
    losses: tuple[float, ...] = ()
    norms: tuple[NormSeen, ...] = ()
    gradients: tuple[GradientSeen, ...] = ()
    parameters: tuple[ParameterSeen, ...] = ()


@dataclass(frozen=True)
class Unfinished:
    """The step in which a rank was when it was ended.

    Attributes:
        step: from 1.
        trainable: names of the parameters that require a gradient.
        locals: sketches of the gradients that had arrived, by name.
    """

    step: int
    trainable: tuple[str, ...] = ()
    locals: dict[str, Sketch] = field(default_factory=dict)


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells about the module that it trains.

    Attributes:
        strategy: class of the strategy.
        expert_parallel_size: of the strategy; 1 where it has none.
        kinds: of the parameters, as the strategy reads them, by name.
        trainable: names of the parameters of the module that require a gradient.
        outside: names of parameters that an optimizer holds and the module does not.
        silenced: modules whose dropout was set to zero.
        batch_norms: modules that normalise with the rows of their own rank.
        num_rows: of the global batches, as the factory made them.
        batches: sketch of the batches that the factory made on this rank.
        notes: what was left out or switched off, as sentences.
    """

    strategy: str = ""
    expert_parallel_size: int = 1
    kinds: dict[str, str] = field(default_factory=dict)
    trainable: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    silenced: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    num_rows: tuple[int, ...] = ()
    batches: Sketch = ()
    notes: tuple[str, ...] = ()
