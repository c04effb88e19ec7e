"""Snapshots of a run in host memory, the last few of them, to go back to without a file."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_moeclip.parallel.rules import warn_on_first_rank
from lightning_moeclip.state.finite import checked_names, not_finite
from lightning_moeclip.state.host_copy import HostCopy, enough_memory, num_bytes_of, places_of, summed_in_copy
from lightning_moeclip.state.live import LiveState, live_state

__all__ = ["LiveState", "NotFinite", "SnapshotRing", "difference", "live_state", "memory_bytes", "share_of_memory"]

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class NotFinite(RuntimeError):
    """What was to be kept is damaged already.

    Attributes:
        names: of the tensors that are.
    """

    def __init__(self, names: Sequence[str], *, step: int) -> None:
        super().__init__(
            f"No snapshot of step {step}: {', '.join(names)} not finite. It would bring that back; the one from before "
            "is kept."
        )
        self.names = tuple(names)


@dataclass
class _Snapshot:
    step: int
    values: HostCopy
    objects: Mapping[str, Any]
    layout: tuple[str, ...]


class SnapshotRing:
    """The last snapshots of this rank's own state, in buffers that are used again.

    Each is complete: a ``take`` that fails leaves none of its own. Restoring one leaves it as it is.

    Args:
        max_bytes: bound of all snapshots together; None takes half of the machine's memory, shared out to its ranks.
        depth: number of snapshots; fewer are kept when no more fit the bound.
        ranks_per_node: ranks on this machine.

    Raises:
        ValueError: a number below 1, or a machine that does not tell its memory.
    """

    def __init__(self, *, max_bytes: int | None = None, depth: int = 2, ranks_per_node: int = 1) -> None:
        given = {"max_bytes": max_bytes, "depth": depth, "ranks_per_node": ranks_per_node}
        for name, value in given.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"SnapshotRing({name}={value!r}) must be an integer from 1. Leave it out for the default."
                )
        self.max_bytes = share_of_memory(ranks_per_node) if max_bytes is None else max_bytes
        self.depth = depth
        self._snapshots: list[_Snapshot] = []  # oldest first
        self._has_warned = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the snapshots, oldest first; on other ranks, which may hold more bytes, there may be fewer."""
        return tuple(snapshot.step for snapshot in self._snapshots)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return _total_bytes(self._snapshots)

    def take(self, live: LiveState, *, step: int) -> None:
        """Keep the state as it is now, in the place of the oldest snapshot when the ring is full.

        Snapshots of another layout (parameters that were added or removed since) are dropped.

        Args:
            live: of the run.
            step: it is called by; an earlier snapshot of the same step is dropped.

        Raises:
            NotFinite: a parameter is not finite, or another tensor but optimizer state is NaN; the last snapshot is
                still there.
            ValueError: one snapshot is larger than ``max_bytes``; the ring is unchanged.
            MemoryError: there is no memory for it; what there was room to leave is still there.
        """
        # first, since masters settle and a scaler decides here
        objects = {name: copy.deepcopy(get()) for name, (get, _) in live.objects.items()}
        tensors = live.current()
        layout, places = live.layout_lines(tensors), places_of(tensors)
        size = num_bytes_of(places)
        self._check_size(size, tensors)
        kept, free = self._survivors([s for s in self._snapshots if s.layout == layout and s.step != step], size)
        checked, in_copy = checked_names(tensors), summed_in_copy(tensors, places)
        # large tensors are looked at while they are copied, unless that is into the only snapshot
        is_first_look = bool(self._snapshots) and not kept
        with enough_memory(size):
            _refuse(not_finite(tensors, [n for n in checked if is_first_look or n not in in_copy]), step)
            self._snapshots = kept
            if free is not None and free.places != places:
                free = None  # its memory goes before other is asked for
            values = HostCopy(tensors, places) if free is None else free
            suspects = values.fill(tensors, checked=in_copy.intersection(checked))
            _refuse(not_finite(tensors, suspects), step)
        self._snapshots.append(_Snapshot(step, values, objects, layout))

    def restore(self, live: LiveState, *, step: int | None = None) -> int:
        """Put a snapshot back in place; one that memory has damaged is dropped, and an older one is taken.

        Args:
            live: of the same run; every tensor keeps its storage.
            step: of the snapshot to begin with; None begins with the newest.

        Returns:
            Step of the snapshot that was restored.

        Raises:
            ValueError: there is no snapshot of ``step``.
            RuntimeError: there is none, or none can be restored; unless the message says otherwise nothing was changed.
        """
        if step is not None and step not in self.steps:
            raise ValueError(f"step={step} has no snapshot. Restore one of {list(self.steps)}, or leave step out.")
        lines, story = live.layout_lines(live.current()), []
        for snapshot in [kept for kept in reversed(self._snapshots) if step is None or kept.step <= step]:
            reason = difference(snapshot.layout, lines) or self._put_back(snapshot, live)
            if not reason:
                return snapshot.step
            self.drop(snapshot.step)
            story.append(f"that of step {snapshot.step} {reason}")
        told = "; ".join(story) if story else "none was taken"
        raise RuntimeError(f"There is no snapshot to go back to: {told}. Resume from a checkpoint, or go on without.")

    def verify(self) -> tuple[int, ...]:
        """Read all snapshots, drop the damaged ones, and return the steps of the others, for ranks to agree on one."""
        self._snapshots = [snapshot for snapshot in self._snapshots if not snapshot.values.damaged()]
        return self.steps

    def drop(self, step: int) -> None:
        """Let go of the snapshot of a step, if there is one."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.step != step]

    def _put_back(self, snapshot: _Snapshot, live: LiveState) -> str:
        """Restore one snapshot, or say why not."""
        if damaged := snapshot.values.damaged():
            return f"was damaged in memory ({', '.join(damaged)})"
        for name, (_, put) in live.objects.items():
            put(copy.deepcopy(snapshot.objects[name]))
        if wrong := snapshot.values.restore(live.current()):
            return f"was not what the tensors hold after it was copied back ({', '.join(wrong)})"
        return ""

    def _survivors(self, usable: list[_Snapshot], size: int) -> tuple[list[_Snapshot], HostCopy | None]:
        """The newest of ``usable`` that leave room for ``size`` bytes, and what the last one to go was kept in."""
        free: HostCopy | None = None
        while len(usable) >= self.depth or _total_bytes(usable) + size > self.max_bytes:
            free = usable.pop(0).values
        return usable, free

    def _check_size(self, size: int, tensors: Mapping[str, Tensor]) -> None:
        if size * self.depth <= self.max_bytes:
            return
        by_kind: dict[str, int] = {}
        for name, tensor in tensors.items():
            kind = name.partition("/")[0]
            by_kind[kind] = by_kind.get(kind, 0) + num_bytes_of(places_of({name: tensor}))
        told = ", ".join(f"{kind} {number:,}" for kind, number in by_kind.items())
        needs = f"One snapshot of this rank takes {size:,} bytes of host memory ({told})"
        if size > self.max_bytes:
            raise ValueError(
                f"{needs}, and max_bytes={self.max_bytes:,} allows less. Write "
                f"CosineRollback(max_snapshot_bytes={size}) for one snapshot, {self.depth * size} for {self.depth}, or "
                "leave the callback out."
            )
        if not self._has_warned:
            self._has_warned = True
            warn_on_first_rank(
                f"{needs}, and max_bytes={self.max_bytes:,} allows {self.max_bytes // size} of the {self.depth} "
                f"that were asked for. Write CosineRollback(max_snapshot_bytes={self.depth * size}) to keep all."
            )


def _total_bytes(snapshots: Sequence[_Snapshot]) -> int:
    return sum(len(snapshot.values.buffer) for snapshot in snapshots)


def _refuse(names: Sequence[str], step: int) -> None:
    if names:
        raise NotFinite(names, step=step)


def difference(kept: Sequence[str], found: Sequence[str]) -> str:
    """How the layout differs from that of a snapshot; empty when it does not."""
    if tuple(kept) == tuple(found):
        return ""
    gone, new = [line for line in kept if line not in found], [line for line in found if line not in kept]
    changes = [f"without {line}" for line in new[:1]] + [f"with {line}" for line in gone[:1]]
    return f"was taken {' and '.join(changes) or 'in another order'}"


def share_of_memory(ranks_per_node: int) -> int:
    """Bytes that the snapshots of one rank may take together: half of the memory, shared out to the machine's ranks.

    Raises:
        ValueError: the machine does not tell its memory.
    """
    return memory_bytes() // 2 // ranks_per_node


def memory_bytes() -> int:
    """Memory of this machine, or of the container that this runs in.

    Raises:
        ValueError: the machine does not tell it.
    """
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise ValueError(
            "This system does not tell how much memory it has, of which snapshots would take half. Write "
            "CosineRollback(max_snapshot_bytes=...)."
        ) from None
    for path in map(Path, _CGROUP_LIMITS):
        limit = path.read_text().strip() if path.is_file() else ""
        if limit.isdigit():
            total = min(total, int(limit))
    return total
