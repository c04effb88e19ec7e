"""The roll call: what the ranks tell one another at the end of a reduction, in one small sum read on the host.

A parameter without a gradient on any rank must end with ``grad=None``, what arrived late must be reduced by all ranks
or by none, and ranks that are in different steps must not take one another's gradients for their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.rank_flags import flag_fields, flagged_ranks, num_flag_fields
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.step_checks import lone_pause

__all__ = ["NUM_FIELDS", "Answer", "RollCall", "Totals", "presence_fields", "presence_totals"]

# fields before the presence of each parameter; flags of more than 52 ranks take further ones
_STEP, _STEP_SQUARED, _HAS_PAUSED, _LIVE, _SPOILED, _LATE, _UNPLANNED, _TERMINATE, _LAST_BATCH = range(9)
NUM_FIELDS = _LAST_BATCH + 1


@dataclass(frozen=True)
class Answer:
    """What one rank has to say.

    Attributes:
        step: number of training steps that it has begun.
        num_paused: backwards since the last reduction whose gradients it has kept to itself.
        is_live: its loss counts.
        is_spoiled: it gave up a loss that was not finite, after it had sent such values to others.
        num_late: gradients that came after their bucket was launched.
        num_unplanned: trainable parameters that the plan does not know.
        is_termination_requested: it was told to end.
        is_last_batch: its loader ends with the batch at hand.
        num_fired: how often the gradient of each parameter came, 0 for one that it does not have.
    """

    step: int
    num_paused: int
    is_live: bool
    is_spoiled: bool
    num_late: int
    num_unplanned: int
    is_termination_requested: bool
    is_last_batch: bool
    num_fired: Sequence[int]


@dataclass(frozen=True)
class Totals:
    """What all ranks said.

    Attributes:
        num_live: ranks whose loss counts.
        is_spoiled: see ``Answer``; of any rank, as the following three.
        has_late: see ``Answer``.
        has_unplanned: see ``Answer``.
        is_termination_requested: see ``Answer``.
        ending_ranks: whose loader ends.
        is_present: whether any rank has a gradient of a parameter; of one that is listed, any that holds it.
        is_steady: whether that gradient came exactly once on every rank.
    """

    num_live: int
    is_spoiled: bool
    has_late: bool
    has_unplanned: bool
    is_termination_requested: bool
    ending_ranks: tuple[int, ...]
    is_present: tuple[bool, ...]
    is_steady: tuple[bool, ...]


class RollCall:
    """One vector, kept from step to step, that all ranks sum.

    Args:
        mesh: axes and groups.
        is_listed: for each planned parameter, see ``PlannedParameter``.
        device: of the collective.
    """

    def __init__(self, mesh: Mesh, is_listed: Sequence[bool], device: torch.device) -> None:
        self._mesh = mesh
        self._is_listed = tuple(is_listed)
        self._num_fields = _LAST_BATCH + num_flag_fields(mesh.world_size)
        presence = presence_fields([0.0] * len(is_listed), is_listed, mesh)
        self.vector = torch.zeros(self._num_fields + len(presence), dtype=torch.float64, device=device)

    def call(self, answer: Answer) -> Totals:
        """Sum what the ranks say; every rank must call this after the same backward.

        Raises:
            RuntimeError: on every rank, when they are in different steps, or some have kept gradients to themselves and
                others have not.
        """
        world_size = self._mesh.world_size
        self.vector.copy_(torch.tensor(self._written(answer), dtype=torch.float64))
        totals = sum_over(self.vector, self._mesh.gradient_groups["dp"]).tolist()
        ending = flagged_ranks(totals[_LAST_BATCH : self._num_fields])
        # one may keep the gradients of more micro-batches to itself than another, which has fewer rows
        if world_size * totals[_STEP_SQUARED] != totals[_STEP] ** 2 or totals[_HAS_PAUSED] not in (0.0, world_size):
            # all ranks see it in the same sums, so all of them come here
            raise RuntimeError(_told_apart(gather_objects((answer.step, answer.num_paused)), ending))
        presence = presence_totals(totals[self._num_fields :], self._is_listed, self._mesh)
        return Totals(
            num_live=int(totals[_LIVE]),
            is_spoiled=totals[_SPOILED] > 0,
            has_late=totals[_LATE] > 0,
            has_unplanned=totals[_UNPLANNED] > 0,
            is_termination_requested=totals[_TERMINATE] > 0,
            ending_ranks=ending,
            is_present=tuple(held > 0 for held, _ in presence),
            is_steady=tuple(count == world_size for _, count in presence),
        )

    def _written(self, answer: Answer) -> list[float]:
        world_size = self._mesh.world_size
        fields = [0.0] * self._num_fields
        fields[_STEP], fields[_STEP_SQUARED] = float(answer.step), float(answer.step**2)
        fields[_HAS_PAUSED] = float(answer.num_paused > 0)
        fields[_LIVE], fields[_SPOILED] = float(answer.is_live), float(answer.is_spoiled)
        fields[_LATE], fields[_UNPLANNED] = float(answer.num_late), float(answer.num_unplanned)
        fields[_TERMINATE] = float(answer.is_termination_requested)
        fields[_LAST_BATCH:] = flag_fields(answer.is_last_batch, rank=self._mesh.rank, world_size=world_size)
        # one that came several times tells itself apart in the sum
        presence = [float(n and (1 if n == 1 else world_size + 1)) for n in answer.num_fired]
        return fields + presence_fields(presence, self._is_listed, self._mesh)


def presence_fields(values: Sequence[float], is_listed: Sequence[bool], mesh: Mesh) -> list[float]:
    """What this rank puts into a sum over all ranks: one field for a parameter, and one for each place in ``ep`` for
    one that is listed, which under one name is another on each of these places.
    """
    ep = mesh.expert_parallel_size
    fields: list[float] = []
    for value, is_own in zip(values, is_listed, strict=True):
        fields += [value * (place == mesh.rank % ep) for place in range(ep)] if is_own else [value]
    return fields


def presence_totals(fields: Sequence[float], is_listed: Sequence[bool], mesh: Mesh) -> list[tuple[float, float]]:
    """Read the sum of ``presence_fields``: for each parameter, over the ranks that hold it, and over all ranks."""
    ep, remaining = mesh.expert_parallel_size, iter(fields)
    totals = []
    for is_own in is_listed:
        places = [next(remaining) for _ in range(ep if is_own else 1)]
        totals.append((places[mesh.rank % ep if is_own else 0], sum(places)))
    return totals


def _told_apart(by_rank: Sequence[tuple[int, int]], ending: tuple[int, ...]) -> str:
    """What is wrong with ranks that have come to one reduction by different ways.

    Args:
        by_rank: step of each rank, and backwards whose gradients it kept to itself before this reduction.
        ending: ranks whose loaders have ended.
    """
    if not ending and len({num_paused for _, num_paused in by_rank}) > 1:
        return lone_pause(
            ", ".join(
                f"rank {rank}: step {step}, {num_paused} kept since the last reduction"
                for rank, (step, num_paused) in enumerate(by_rank)
            )
        )
    cause = (
        f"The loaders of ranks {list(ending)} have ended. Where gradients accumulate, a rank steps on its last batch "
        "while the others go on: give every rank the same number of batches."
        if ending
        else "A rank has left out a backward. In manual optimization every rank calls backward equally often: let one "
        "that has no loss call it on a zero."
    )
    steps = ", ".join(f"rank {rank} is in step {step}" for rank, (step, _) in enumerate(by_rank))
    return f"The ranks reduce gradients of different steps: {steps}. {cause}"
