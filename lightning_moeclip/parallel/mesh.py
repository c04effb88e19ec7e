"""The mesh: which ranks hold the same parameter, and the process groups they meet on.

The ``dp`` axis has all W ranks; ``ep`` groups are contiguous ranks [k*ep, (k+1)*ep) that share out the
experts; ``edp`` groups stride by ``ep`` and hold the same experts. This is the only file that makes groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

__all__ = ["Axis", "ExpertAxis", "Mesh"]

Axis = Literal["dp", "edp"]


@dataclass
class ExpertAxis:
    """The ranks that share out the experts of a layer, as a layer's forward sees them.

    A forward with spread experts is a collective over these ranks. ``is_open`` says that all of them are inside
    the same step; elsewhere a layer raises instead of waiting for ranks that may never come.

    Attributes:
        group: process group of this rank's ``ep`` axis.
        rank: place of this rank in the group.
        size: number of ranks in the group, at least 2.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    is_open: bool = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Declare that every rank of the group runs the body."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before


@dataclass(frozen=True)
class Mesh:
    """Place of one rank on the dp, ep and edp axes, with its process groups.

    Attributes:
        world_size: W, the ranks that take part in the batch.
        rank: this rank, in [0, W).
        expert_parallel_size: number of ranks that share out the experts of a layer.
        experts: the ``ep`` axis for the forward of MoE layers; None when experts are not spread.
        gradient_groups: one group per replica axis, used by gradient buckets and nothing else. None when the
            replica axis has one rank.
    """

    world_size: int
    rank: int
    expert_parallel_size: int
    experts: ExpertAxis | None
    gradient_groups: dict[Axis, dist.ProcessGroup | None]

    def replicas(self, axis: Axis) -> tuple[int, ...]:
        """Ranks that hold the same copy as this one: R(theta) of the parameters on ``axis``."""
        if axis == "dp":
            return tuple(range(self.world_size))
        return tuple(range(self.rank % self.expert_parallel_size, self.world_size, self.expert_parallel_size))

    def replica_sets(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All sets of ranks that hold the same copy on ``axis``, by their first rank."""
        ep = 1 if axis == "dp" else self.expert_parallel_size
        return tuple(tuple(range(first, self.world_size, ep)) for first in range(ep))

    @property
    def divisor(self) -> int:
        """Number by which every summed gradient is divided: W, whatever its replica axis.

        The loss is a mean over the ranks that took part in the batch, and the backward of an activation exchange
        sums cotangents, so an expert's gradient already holds the part of all ranks that sent it tokens.
        """
        return self.world_size

    @classmethod
    def imagined(cls, world_size: int, expert_parallel_size: int = 1) -> "Mesh":
        """The mesh that rank 0 of such a world would build, without groups: to lay out a plan that nobody runs.

        Args:
            world_size: W.
            expert_parallel_size: ranks per ``ep`` group; divides the world size.

        Raises:
            ValueError: there is no such mesh.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1. Write the number of ranks, such as 8.")
        check_divides(world_size, expert_parallel_size)
        return cls(world_size, 0, expert_parallel_size, None, {"dp": None, "edp": None})

    @classmethod
    def build(cls, expert_parallel_size: int = 1) -> "Mesh":
        """Make the groups on the default process group; every rank must call this at the same time.

        Args:
            expert_parallel_size: ranks per ``ep`` group; divides the world size.

        Raises:
            ValueError: ``expert_parallel_size`` does not divide the world size.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        check_divides(world_size, expert_parallel_size)
        if world_size == 1:
            return cls(1, 0, 1, None, {"dp": None, "edp": None})
        ep = expert_parallel_size
        # every rank makes every group, in the same order
        dp_group = dist.new_group(list(range(world_size)), group_desc="moeclip_gradients_dp")
        edp_group = dp_group if ep == 1 else None
        experts = None
        if ep > 1:
            for first in range(0, world_size, ep):
                group = dist.new_group(list(range(first, first + ep)), group_desc="moeclip_ep")
                if first <= rank < first + ep:
                    experts = ExpertAxis(group, rank - first, ep)
            for offset in range(ep):
                ranks = list(range(offset, world_size, ep))
                group = dist.new_group(ranks, group_desc="moeclip_gradients_edp") if len(ranks) > 1 else None
                if rank in ranks:
                    edp_group = group
        return cls(world_size, rank, ep, experts, {"dp": dp_group, "edp": edp_group})


def check_divides(world_size: int, expert_parallel_size: int) -> None:
    """Refuse an expert_parallel_size that does not divide the world.

    Raises:
        ValueError: it does not, or is below 1.
    """
    if expert_parallel_size < 1 or world_size % expert_parallel_size:
        fits = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} does not divide the world of {world_size} ranks. "
            f"Use MoEClipStrategy(expert_parallel_size=...) with one of {fits}."
        )
