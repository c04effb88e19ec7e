"""What gradients cost on the way: bytes that each rank sends, and the links that they go over.

A ring of R ranks that sums n bytes sends n (R-1)/R of them from each rank to the next, and as much again to give
everybody the sum (Patarasuk & Yuan 2009). What a backend really does may be a tree, or go through a switch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_moeclip.parallel.mesh import Axis, Mesh

__all__ = ["Link", "Ring", "rings_of"]


@dataclass(frozen=True)
class Link:
    """From one rank to the next of its ring.

    Attributes:
        source: rank that sends.
        target: rank that receives.
        crosses_nodes: whether they are on different nodes.
    """

    source: int
    target: int
    crosses_nodes: bool


@dataclass(frozen=True)
class Ring:
    """The sums of one axis.

    Attributes:
        axis: ``dp`` or ``edp``.
        members: ranks of each ring, in order; sets of one rank have no ring.
        bytes_per_rank: what each rank sends to the next in one step.
    """

    axis: Axis
    members: tuple[tuple[int, ...], ...]
    bytes_per_rank: float

    def links(self, ranks_per_node: int) -> tuple[Link, ...]:
        """All links, ring by ring.

        Args:
            ranks_per_node: ranks that are neighbours in number share a node.
        """
        return tuple(
            Link(source, target, source // ranks_per_node != target // ranks_per_node)
            for ring in self.members
            for source, target in zip(ring, [*ring[1:], ring[0]], strict=True)
        )


def rings_of(mesh: Mesh, passing: Mapping[Axis, float]) -> tuple[Ring, ...]:
    """The rings of a mesh that have anything to send.

    Args:
        mesh: axes.
        passing: bytes that go round once, by axis; what goes round twice counts twice.
    """
    rings = []
    for axis, size in passing.items():
        members = tuple(ring for ring in mesh.replica_sets(axis) if len(ring) > 1)
        if members and size:
            num_ranks = len(members[0])
            rings.append(Ring(axis, members, size * (num_ranks - 1) / num_ranks))
    return tuple(rings)
