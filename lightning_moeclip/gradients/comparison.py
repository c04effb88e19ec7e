"""What replicas were found to hold, as frozen values for those who look on."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_moeclip.parallel.mesh import Axis

__all__ = ["Category", "Comparison", "Difference"]

Category = Literal["gradients", "parameters", "optimizer", "scaler"]


@dataclass(frozen=True)
class Difference:
    """A tensor, or a plain value, that some ranks of a replica group hold in another form than most of them.

    Attributes:
        category: what it belongs to.
        name: of the parameter; ``optimizer{i}.group{j}`` for an option of an optimizer, "loss scale" for the scaler.
        entry: which value of that parameter or group, such as "exp_avg", "lr" or "master"; empty for the parameter
            itself, its gradient, and the scaler.
        axis: replica axis.
        replicas: ranks of the group.
        ranks: those that differ from the majority.
        source: lowest rank of the majority, which is that of the lowest rank where several are equally large.
        num_elements: number of its elements, or of its plain values.
        num_different: how many of them differ, on the rank with most of them; None where the ranks do not hold the
            same kind of value, so that nothing can be subtracted.
        largest: largest absolute difference; NaN where a value is none, None like ``num_different``.
        is_absent: the majority does not hold it at all.
        content: what the majority holds, as ``state.consistency`` describes it to itself.
    """

    category: Category
    name: str
    entry: str
    axis: Axis
    replicas: tuple[int, ...]
    ranks: tuple[int, ...]
    source: int
    num_elements: int = 0
    num_different: int | None = None
    largest: float | None = None
    is_absent: bool = False
    content: object = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[Category, str, str]:
        """What tells it from others, whichever ranks it differs on."""
        return self.category, self.name, self.entry


@dataclass(frozen=True)
class Comparison:
    """Outcome of comparing replicas, the same on all ranks, but for ``unwatched``.

    Attributes:
        differences: everything that differs inside its replica group, in one order on all ranks.
        unwatched: parameters of this rank that have no other replica to be compared with.
    """

    differences: tuple[Difference, ...] = ()
    unwatched: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all replicas hold the same bits."""
        return not self.differences
