"""Whether replicas hold the same bits, and how those that do not get those of the majority.

A healthy comparison is one collective of a few numbers, from which every rank learns the same verdict for all replica
groups. Only after a mismatch do the ranks tell each other what they hold, and every later collective follows from what
all have been told: no rank can wait for one that another does not enter.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip.gradients.comparison import Category, Comparison, Difference
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.mesh import Axis, Mesh
from lightning_moeclip.state.digest import joint_digest
from lightning_moeclip.state.layouts import Layout, Opaque, TensorLayout, build, leaf_layouts, plain_values, take_apart
from lightning_moeclip.state.replicated import Entry, Key, ReplicatedState

__all__ = ["compare_replicas", "resync_replicas"]

_AXES: tuple[Axis, ...] = ("dp", "edp")
# places in the table that the ranks exchange
_CELLS = {(category, axis): i for i, (category, axis) in enumerate((c, a) for c in get_args(Category) for a in _AXES)}


@dataclass(frozen=True)
class _Told:
    """What one rank holds under a key: everything but the elements of its tensors, of which it gives the digest."""

    axis: Axis
    layout: Layout
    plain: tuple[object, ...]
    digest: int

    @property
    def identity(self) -> tuple[str, str, int]:
        """Equal for equal bits; by what is printed, since NaN does not equal itself."""
        return repr(self.layout), repr(self.plain), self.digest


def compare_replicas(
    state: ReplicatedState, mesh: Mesh, what: Collection[Category], *, device: torch.device
) -> Comparison:
    """Compare what replicas hold; every rank calls this at the same point, with the same ``what``.

    One all-gather of eight numbers when all is well.

    Args:
        state: of this rank.
        mesh: axes and groups.
        what: categories to compare.
        device: where collectives find their tensors.
    """
    unwatched = tuple(name for name, axis in state.axes.items() if len(mesh.replicas(axis)) == 1)
    if mesh.world_size == 1:
        return Comparison(unwatched=unwatched)
    entries = list(state.entries(what))
    own = _combined(entries, device)
    table = [torch.empty_like(own) for _ in range(mesh.world_size)]
    dist.all_gather(table, own, group=mesh.gradient_groups["dp"])
    rows = torch.stack(table).tolist()
    bad = [
        cell for cell, i in _CELLS.items() if any(rows[r][i] != rows[g[0]][i] for g in _groups(mesh, cell) for r in g)
    ]
    if not bad:
        return Comparison(unwatched=unwatched)
    suspects = {entry.key: entry for entry in entries if (entry.key[0], entry.axis) in bad}
    found = _find(gather_objects({key: _tell(entry) for key, entry in suspects.items()}), mesh)
    return Comparison(tuple(_measure(found, suspects, mesh, device)), unwatched)


def resync_replicas(state: ReplicatedState, mesh: Mesh, comparison: Comparison, *, device: torch.device) -> None:
    """Give ranks that differ what the majority of their replicas holds; never gradients.

    Every rank calls this at the same point. What the majority does not hold is dropped.

    Args:
        state: of this rank.
        mesh: axes and groups.
        comparison: of ``compare_replicas``, with nothing changed since.
        device: where collectives find their tensors.

    Raises:
        RuntimeError: on every rank, when a parameter has another shape or dtype on some ranks.
    """
    differences = [d for d in comparison.differences if d.category != "gradients"]
    for difference in differences:
        if difference.category == "parameters" and difference.num_different is None:
            raise RuntimeError(
                f"{difference.name} has another shape or dtype on ranks {list(difference.ranks)} than on rank "
                f"{difference.source}, which no copy can mend. Change parameters on all ranks alike."
            )
    if not differences:
        return
    entries = {entry.key: entry for entry in state.entries({d.category for d in differences})}
    for difference in differences:
        if mesh.rank not in difference.replicas:
            continue
        is_off = mesh.rank in difference.ranks
        if difference.is_absent:
            if is_off:
                state.drop(difference.key)
            continue
        content = difference.content
        assert isinstance(content, _Told), "made by compare_replicas"
        if any(isinstance(leaf, Opaque) for leaf in leaf_layouts(content.layout)):
            continue  # it cannot be sent, and will be found again
        tensors = _received(difference, entries.get(difference.key), mesh, device)
        if is_off:
            value = build(content.layout, _leaves(content, tensors))
            state.put(entries.get(difference.key), difference.key, value)
    state.settle()


def _groups(mesh: Mesh, cell: tuple[Category, Axis]) -> list[tuple[int, ...]]:
    """All replica groups of an axis, each rank in one."""
    if cell[1] == "dp":
        return [tuple(range(mesh.world_size))]
    ep = mesh.expert_parallel_size
    return [tuple(range(first, mesh.world_size, ep)) for first in range(ep)]


def _combined(entries: Iterable[Entry], device: torch.device) -> Tensor:
    """One digest for each category and axis, [8] int64."""
    tensors: dict[int, list[Tensor]] = {i: [] for i in _CELLS.values()}
    told = [0] * len(_CELLS)
    # a state dict is in the order in which it was filled, which is each rank's own
    for entry in sorted(entries, key=lambda entry: entry.key):
        cell = _CELLS[entry.key[0], entry.axis]
        layout, leaves = take_apart(entry.value)
        told[cell] += _number(entry.key, layout, plain_values(leaves))
        tensors[cell] += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    wrapped = [(number + 2**63) % 2**64 - 2**63 for number in told]
    digests = torch.stack([joint_digest(tensors[i], device=device) for i in _CELLS.values()])
    return digests + torch.tensor(wrapped, device=device)


def _number(*values: object) -> int:
    """An int64 that stands for values by what is printed of them, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little", signed=True)


def _tell(entry: Entry) -> _Told:
    layout, leaves = take_apart(entry.value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    digest = joint_digest(tensors, device=torch.device("cpu"))
    return _Told(entry.axis, layout, plain_values(leaves), int(digest))


def _find(told: list[dict[Key, _Told]], mesh: Mesh) -> list[Difference]:
    """What differs inside its replica group, and whose value counts; the same list on every rank."""
    found = []
    for key in sorted({key for of_rank in told for key in of_rank}):
        axis = next(of_rank[key].axis for of_rank in told if key in of_rank)
        for group in _groups(mesh, (key[0], axis)):
            held = {rank: told[rank].get(key) for rank in group}
            identities = {rank: None if value is None else value.identity for rank, value in held.items()}
            votes = Counter(identities.values())  # in the order of ranks: of two equally large sides the first wins
            winner, number = votes.most_common(1)[0]
            if number == len(group):
                continue
            source = next(rank for rank in group if identities[rank] == winner)
            ranks = tuple(rank for rank in group if identities[rank] != winner)
            content = held[source]
            one = content or next(value for value in held.values() if value is not None)
            size = sum(
                math.prod(leaf.shape) if isinstance(leaf, TensorLayout) else 1 for leaf in leaf_layouts(one.layout)
            )
            found.append(
                Difference(*key, axis, group, ranks, source, size, is_absent=content is None, content=content or one)
            )
    return found


def _measure(
    found: list[Difference], entries: Mapping[Key, Entry], mesh: Mesh, device: torch.device
) -> Iterator[Difference]:
    """The differences with how many elements differ and by how much, as their ranks find against the source."""
    measured: dict[int, tuple[int, float]] = {}
    for index, difference in enumerate(found):
        content = difference.content
        if mesh.rank not in difference.replicas or difference.is_absent:
            continue
        assert isinstance(content, _Told), "made above"
        tensors = _received(difference, entries.get(difference.key), mesh, device)
        if mesh.rank in difference.ranks and difference.key in entries:
            layout, leaves = take_apart(entries[difference.key].value)
            if layout == content.layout:
                pairs = zip(leaves, _leaves(content, tensors), strict=True)
                counts, distances = zip(*(_distance(own, right) for own, right in pairs), strict=True)
                measured[index] = sum(counts), max(distances, key=lambda d: (math.isnan(d), d))
    by_rank = gather_objects(measured)
    for index, difference in enumerate(found):
        told = [of_rank.get(index) for of_rank in by_rank]
        known = [numbers for numbers in told if numbers is not None]
        if len(known) < len(difference.ranks):
            yield difference
            continue
        largest = max((distance for _, distance in known), key=lambda d: (math.isnan(d), d))
        yield replace(difference, num_different=max(count for count, _ in known), largest=largest)


def _received(difference: Difference, entry: Entry | None, mesh: Mesh, device: torch.device) -> list[Tensor]:
    """The source's tensors, on ``device``; every rank of the replica group calls this."""
    content = difference.content
    assert isinstance(content, _Told), "made above"
    own: list[Tensor] = []
    if mesh.rank == difference.source:
        assert entry is not None, "the source holds it"
        own = [leaf.detach() for leaf in take_apart(entry.value)[1] if isinstance(leaf, Tensor)]
    layouts = [leaf for leaf in leaf_layouts(content.layout) if isinstance(leaf, TensorLayout)]
    tensors = []
    for index, layout in enumerate(layouts):
        if mesh.rank == difference.source:
            tensor = own[index].to(device).contiguous()
        else:
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device=device)
        if tensor.numel():
            # as bytes, which every backend takes whatever they mean
            group = mesh.gradient_groups[difference.axis]
            dist.broadcast(tensor.view(-1).view(torch.uint8), difference.source, group=group)
        tensors.append(tensor)
    return tensors


def _leaves(content: _Told, tensors: Iterable[Tensor]) -> Iterator[object]:
    """Leaves of the majority's value in order, its tensors where it keeps them."""
    remaining, plain = iter(tensors), iter(content.plain)
    for leaf in leaf_layouts(content.layout):
        if isinstance(leaf, TensorLayout):
            tensor = next(remaining)
            yield tensor.cpu() if leaf.is_on_host else tensor
        elif not isinstance(leaf, Opaque):
            yield next(plain)


def _distance(own: object, right: object) -> tuple[int, float]:
    """How many elements differ in their bits, and the largest absolute difference."""
    if not isinstance(own, Tensor) or not isinstance(right, Tensor):
        if repr(own) == repr(right):
            return 0, 0.0
        is_number = isinstance(own, int | float | complex) and isinstance(right, int | float | complex)
        return 1, float(abs(own - right)) if is_number else math.nan  # type: ignore[operator]
    a, b = own.detach().contiguous().view(-1), right.to(own.device).contiguous().view(-1)
    raw = [t.view(torch.uint8).view(len(t), t.element_size()) for t in (a, b)]
    is_other = (raw[0] != raw[1]).any(1)
    number = int(is_other.sum())
    if not number:
        return 0, 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    return number, float((a[is_other].to(wide) - b[is_other].to(wide)).abs().max())
