"""The few numbers that a step is judged by, equal on all ranks. Waits for the device once per optimizer step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_moeclip.callbacks.world import World

__all__ = ["CotangentSums", "DirectionalLoss", "StepNumbers", "losses_of", "reduce_step_numbers"]


@runtime_checkable
class DirectionalLoss(Protocol):
    """A loss that can tell how far its two halves agree."""

    wants_directions: bool

    def pop_direction_sums(self) -> Tensor | None:
        """[a.b, a.a, b.b] of this rank since the last call, [3] float64."""


@dataclass(frozen=True)
class StepNumbers:
    """What all ranks know of a step before it is taken.

    Attributes:
        loss: mean over ranks; NaN or infinite when that of any rank is.
        grad_norm: of the reduced gradients, each logical parameter once; 0 where there are none. Of a step with fewer
            micro-batches than others, such as the last of an epoch, that of their mean.
        cosine: directional; None where it is unknown or undefined.
        has_directions: some loss told of its directions.
        is_whole: every rank had a loss, in each of as many micro-batches.
    """

    loss: float
    grad_norm: float
    cosine: float | None
    has_directions: bool
    is_whole: bool


class CotangentSums:
    """Sums over cotangents that losses tell of and a user hands in, until they are taken."""

    def __init__(self) -> None:
        self._before: Tensor | None = None  # of backwards that are over
        self._new: Tensor | None = None

    def settle(self, told: Iterable[Tensor | None]) -> None:
        """Behind a backward, and before a batch: what there is belongs to gradients that are there.

        Args:
            told: sums of losses since the last call, [3] each.
        """
        self._before = _total(self._before, self._new, *told)
        self._new = None

    def forget(self) -> None:
        """Those gradients were dropped; what came since belongs to the backward at hand."""
        self._before = None

    def add(self, first: Tensor | Sequence[Tensor], second: Tensor | Sequence[Tensor]) -> None:
        """Add the sums of two cotangents of the same features, or of several features in the same order.

        Raises:
            ValueError: they do not have the same shapes.
            TypeError: one is no tensor.
        """
        firsts, seconds = _tensors("first", first), _tensors("second", second)
        shapes = [[list(x.shape) for x in tensors] for tensors in (firsts, seconds)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"hand_in(first, second) takes two cotangents of the same features, but their shapes are {shapes[0]} "
                f"and {shapes[1]}. Give torch.autograd.grad(half, features) of each half of the loss."
            )
        for a, b in zip(firsts, seconds, strict=True):
            wide = torch.float32 if a.device.type == "mps" else torch.float64
            x, y = (t.detach().flatten().to(wide) for t in (a, b))
            sums = torch.stack([x @ y, x @ x, y @ y])
            self._new = _total(self._new, sums)

    def pop(self, told: Iterable[Tensor | None]) -> Tensor | None:
        """The sums of the step at hand, [3]; None where there are none.

        Args:
            told: see ``settle``.
        """
        self.settle(told)
        sums, self._before = self._before, None
        return sums


def _total(*sums: Tensor | None) -> Tensor | None:
    known = [part for part in sums if part is not None]
    return torch.stack([part.to(known[0]) for part in known]).sum(0) if known else None


def _tensors(name: str, given: object) -> list[Tensor]:
    """One tensor or several, as a list."""
    is_several = isinstance(given, Iterable) and not isinstance(given, Tensor)
    members: Iterable[object] = given if is_several else [given]  # type: ignore[assignment]
    tensors = []
    for index, tensor in enumerate(members):
        if not isinstance(tensor, Tensor):
            which = f"{name}[{index}]" if is_several else name
            raise TypeError(
                f"hand_in(first, second) takes tensors, and {which} is {tensor!r}. A half of the loss that does not "
                "use a feature sends it zeros: write torch.autograd.grad(half, features, materialize_grads=True)."
            )
        tensors.append(tensor)
    return tensors


def losses_of(module: nn.Module) -> list[DirectionalLoss]:
    """Layers of a module that can tell of their directions."""
    return [layer for layer in module.modules() if isinstance(layer, DirectionalLoss)]


def reduce_step_numbers(world: World, sums: Tensor | None, *, micro_batches: int | None) -> StepNumbers:
    """Sum what each rank knows of the step; a collective.

    Every number has an entry of its own: one that is not finite spoils no other.

    Args:
        world: the strategy.
        sums: over directions of this rank, [3]; None where no loss tells of them.
        micro_batches: by whose number each loss was divided; None in manual optimization.
    """
    square = world.gradient_square()
    device = square.device
    directions = torch.zeros(4, dtype=square.dtype, device=device)
    if sums is not None:
        directions[:3], directions[3] = sums.to(directions), 1.0
    loss = world.step_loss.detach().to(directions).reshape(1)
    number = float(world.num_losses)
    numbers = torch.tensor([number, number * number], dtype=square.dtype, device=device)
    total, norm_square, losses, losses_square, ab, aa, bb, num_told = world.reduce_sums(
        torch.cat([loss, square.reshape(1), numbers, directions])
    ).tolist()
    grad_norm = math.sqrt(norm_square) if norm_square >= 0 else math.nan
    attendance = world.report.attendance
    is_whole = attendance is None or attendance.num_live_ranks == world.world_size
    if micro_batches is not None:
        is_whole = is_whole and losses > 0 and losses_square * world.world_size == losses * losses
        grad_norm *= micro_batches * world.world_size / losses if losses else 1.0
    return StepNumbers(
        total / world.world_size, grad_norm, _cosine(ab, aa, bb) if num_told else None, num_told > 0, is_whole
    )


def _cosine(ab: float, aa: float, bb: float) -> float | None:
    """None where it is not defined: a half sends nothing, or more than numbers hold."""
    lengths = math.sqrt(aa) * math.sqrt(bb) if aa > 0 and bb > 0 else 0.0
    if not (0 < lengths < math.inf and math.isfinite(ab)):
        return None
    return max(-1.0, min(1.0, ab / lengths))
