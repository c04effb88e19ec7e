"""How near ranks are to each other, and which of them should share out experts.

An expert-parallel group exchanges tokens in every layer, so its ranks should be where links are fast; the other axes
exchange gradients, once per step.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

__all__ = ["Level", "Links", "Placement", "place_experts", "rank_groups", "read_links", "told_ranks"]

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header, also in a pipe


class Level(IntEnum):
    """Kind of the link between two GPUs of a machine, fastest first."""

    SELF = 0
    NVLINK = 1
    SWITCH = 2  # PCIe bridges, past no CPU
    HOST = 3  # a PCIe host bridge, or several of one NUMA node
    SOCKETS = 4  # between NUMA nodes

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Level.SELF: "itself",
    Level.NVLINK: "NVLink",
    Level.SWITCH: "a PCIe switch",
    Level.HOST: "the PCIe host bridge",
    Level.SOCKETS: "the link between CPUs",
}
_LEVELS = {
    "X": Level.SELF,
    "PIX": Level.SWITCH,
    "PXB": Level.SWITCH,
    "PHB": Level.HOST,
    "NODE": Level.HOST,
    "SYS": Level.SOCKETS,
    "SOC": Level.SOCKETS,  # older drivers
}


@dataclass(frozen=True)
class Links:
    """Links between the GPUs of one machine.

    Attributes:
        gpus: their indices as nvidia-smi counts them, in the order of the PCI bus.
        levels: [gpus, gpus], symmetric.
    """

    gpus: tuple[int, ...]
    levels: tuple[tuple[Level, ...], ...]

    def between(self, a: int, b: int) -> Level:
        """Level of the link between two GPUs, by nvidia-smi's index."""
        return self.levels[self.gpus.index(a)][self.gpus.index(b)]

    def only(self, gpus: Sequence[int]) -> "Links":
        """The links of some of the GPUs, in the order given.

        Raises:
            ValueError: one is not there.
        """
        missing = [gpu for gpu in gpus if gpu not in self.gpus]
        if missing:
            raise ValueError(f"There is no GPU {missing[0]}: nvidia-smi counts {list(self.gpus)}.")
        return Links(tuple(gpus), tuple(tuple(self.between(a, b) for b in gpus) for a in gpus))


def read_links(matrix: str) -> Links:
    """Read what ``nvidia-smi topo -m`` prints; columns and rows of network cards are passed over.

    Raises:
        ValueError: it is no such matrix.
    """
    lines = [_ESCAPES.sub("", line).split() for line in matrix.splitlines()]
    header = next((words for words in lines if words and words[0] == "GPU0"), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    rows = {}
    for words in lines:
        # the row of a GPU repeats its name once, the header has it as its first word
        if words and re.fullmatch(r"GPU\d+", words[0]) and words is not header and len(words) > len(columns):
            rows[int(words[0][3:])] = [_level(word) for word in words[1 : len(columns) + 1]]
    if not columns or sorted(rows) != sorted(columns):
        raise ValueError(
            f"This is no matrix of `nvidia-smi topo -m`: {len(columns)} GPUs in its header, {len(rows)} rows of GPUs. "
            f"It begins with {matrix.strip()[:60]!r}."
        )
    return Links(tuple(columns), tuple(tuple(rows[gpu]) for gpu in columns))


def _level(word: str) -> Level:
    if re.fullmatch(r"NV\d+", word):
        return Level.NVLINK
    if word not in _LEVELS:
        raise ValueError(f"{word!r} is no link that is known; known are NV1, NV2, ... and {', '.join(_LEVELS)}.")
    return _LEVELS[word]


@dataclass(frozen=True)
class Placement:
    """Where experts should be shared out.

    Attributes:
        expert_parallel_size: most ranks that can share out experts over fast links alone; a divisor of it does too.
        order: GPUs by local rank, so that the ranks of a group are neighbours.
        slowest: link within a group.
    """

    expert_parallel_size: int
    order: tuple[int, ...]
    slowest: Level

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each expert-parallel group of the machine."""
        size = self.expert_parallel_size
        return tuple(self.order[first : first + size] for first in range(0, len(self.order), size))


def place_experts(links: Links) -> Placement:
    """The largest groups of equal size whose GPUs all have the fastest kind of link to each other.

    Where nothing is gained by the fastest kind, since only some GPUs have it, the next kind counts too.

    Args:
        links: of the GPUs that a machine's ranks use; each machine of a job has as many.
    """
    num_gpus = len(links.gpus)
    kinds = sorted({level for row in links.levels for level in row} - {Level.SELF})
    for slowest in kinds:
        for size in range(num_gpus, 1, -1):
            if num_gpus % size == 0 and (groups := _partition(links, list(links.gpus), size, slowest)) is not None:
                return Placement(size, tuple(gpu for group in groups for gpu in group), slowest)
    return Placement(1, links.gpus, Level.SELF)


def _chunks(gpus: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(gpus[first : first + size]) for first in range(0, len(gpus), size)]


def _partition(links: Links, gpus: list[int], size: int, slowest: Level) -> list[list[int]] | None:
    """Split ``gpus`` into groups whose members all reach each other, or None."""
    if not gpus:
        return []
    for group in _groups_of(links, [gpus[0]], gpus[1:], size, slowest):
        rest = _partition(links, [gpu for gpu in gpus if gpu not in group], size, slowest)
        if rest is not None:
            return [group, *rest]
    return None


def _groups_of(links: Links, group: list[int], others: list[int], size: int, slowest: Level) -> Iterator[list[int]]:
    """Every way to fill ``group`` up from ``others``, neighbours first; machines have 16 GPUs at most."""
    if len(group) == size:
        yield group
        return
    for index, gpu in enumerate(others):
        if all(links.between(gpu, member) <= slowest for member in group):
            yield from _groups_of(links, [*group, gpu], others[index + 1 :], size, slowest)


def rank_groups(world_size: int, expert_parallel_size: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The ranks of every process group that ``Mesh.build`` makes, by axis; groups of one rank are not made.

    Args:
        world_size: number of ranks, at least 1.
        expert_parallel_size: divides it.
    """
    ranks = range(world_size)
    groups = {
        "dp": [tuple(ranks)],
        "ep": _chunks(ranks, expert_parallel_size),
        "edp": [tuple(ranks[offset::expert_parallel_size]) for offset in range(expert_parallel_size)],
    }
    if expert_parallel_size == 1:
        groups["edp"] = []  # the groups of dp
    return {axis: tuple(group for group in found if len(group) > 1) for axis, found in groups.items()}


def told_ranks(ranks: Sequence[int]) -> str:
    """``0-3`` for neighbours, ``0, 4, 8`` for others, with the middle left out where there are many."""
    if len(ranks) > 2 and all(b - a == 1 for a, b in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])
