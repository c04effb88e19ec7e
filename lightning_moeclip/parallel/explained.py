"""Rows of an explanation: parameters with one fate, under one name."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_moeclip.parallel.fates import FROZEN, Fate
from lightning_moeclip.parallel.tables import collapsed
from lightning_moeclip.parallel.traffic import Ring

__all__ = ["ExplainedGroup", "Findings", "grouped"]


@dataclass(frozen=True)
class ExplainedGroup:
    """Parameters with one fate: a row of the table.

    Attributes:
        pattern: their names, with ``*`` for the numbers in which they differ.
        names: all of them.
        tower: that they belong to; None for none or several.
        kind: see ``ParamRole``.
        shape: of each, on a rank.
        operation: see ``Fate``, as the following.
        replicas: see ``Fate``.
        divisor: see ``Fate``.
        dtype: of the gradient, as in "float32".
        wire_dtype: see ``Fate``.
        region: see ``Fate``.
        buckets: numbers of the buckets that they travel in.
        num_bytes: of all their gradients on a rank, per step; 0 for frozen ones.
        is_in_module: False for what only an optimizer or nobody registered holds.
        is_reduced: see ``Fate``.
        is_sound: see ``Fate``.
        is_conditional: see ``Fate``.
        is_known: see ``Fate``.
        why: see ``Fate``.
    """

    pattern: str
    names: tuple[str, ...]
    tower: str | None
    kind: str
    shape: tuple[int, ...]
    operation: str
    replicas: tuple[tuple[int, ...], ...]
    divisor: int | None
    dtype: str
    wire_dtype: str | None
    region: str | None
    buckets: tuple[int, ...]
    num_bytes: int
    is_in_module: bool
    is_reduced: bool
    is_sound: bool
    is_conditional: bool
    is_known: bool
    why: str

    @property
    def count(self) -> int:
        """Number of parameters in the row."""
        return len(self.names)


@dataclass(frozen=True)
class Findings:
    """What an explanation has to tell.

    Attributes:
        strategy: name of the strategy.
        world_size: W.
        expert_parallel_size: ranks that share out experts.
        groups: rows, in the order of the module.
        rings: traffic of gradients by axis.
        ranks_per_node: links between ranks of different nodes are told apart.
        notes: what was taken for granted, or could not be looked at.
        is_complete: False where parts of the module could not be made, or where it has no parameters at all.
    """

    strategy: str
    world_size: int
    expert_parallel_size: int
    groups: tuple[ExplainedGroup, ...]
    rings: tuple[Ring, ...]
    ranks_per_node: int
    notes: tuple[str, ...] = ()
    is_complete: bool = True

    @cached_property
    def unreduced(self) -> tuple[str, ...]:
        """Names of what is trained, or asks to be, and whose gradients nobody reduces, or not in every step."""
        return tuple(n for group in self.groups if group.is_known and not group.is_reduced for n in group.names)

    @cached_property
    def conditional(self) -> tuple[str, ...]:
        """Those of ``unreduced`` that are reduced in steps that meet a condition, which is in the row's reason."""
        unreduced = frozenset(self.unreduced)
        return tuple(n for group in self.groups if group.is_conditional for n in group.names if n in unreduced)

    @cached_property
    def unknown(self) -> tuple[str, ...]:
        """Names of what may be reduced or not, since optimizers are not known."""
        return tuple(name for group in self.groups if not group.is_known for name in group.names)

    @cached_property
    def unsound(self) -> tuple[str, ...]:
        """Names of what is reduced to a wrong result, or refused."""
        return tuple(n for group in self.groups if group.is_reduced and not group.is_sound for n in group.names)

    @property
    def is_ok(self) -> bool:
        """Whether it is known that every gradient is reduced, and rightly."""
        return self.is_complete and not (self.unreduced or self.unsound or self.unknown)

    @property
    def gradient_bytes(self) -> int:
        """Size of all gradients on a rank."""
        return sum(group.num_bytes for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "strategy": self.strategy,
            "world_size": self.world_size,
            "expert_parallel_size": self.expert_parallel_size,
            "groups": [{**asdict(group), "count": group.count} for group in self.groups],
            "totals_per_rank": {
                "gradient_bytes": self.gradient_bytes,
                "sent_bytes": {ring.axis: ring.bytes_per_rank for ring in self.rings},
            },
            "links": [
                {**asdict(link), "axis": ring.axis, "bytes": ring.bytes_per_rank}
                for ring in self.rings
                for link in ring.links(self.ranks_per_node)
            ],
            "unreduced": list(self.unreduced),
            "unsound": list(self.unsound),
            "conditional": list(self.conditional),
            "unknown": list(self.unknown),
            "is_complete": self.is_complete,
            "notes": list(self.notes),
        }


def grouped(fates: Sequence[Fate]) -> tuple[ExplainedGroup, ...]:
    """Rows, in the order of their first parameter."""
    rows: dict[tuple, list[Fate]] = {}
    for fate in fates:
        planned = fate.parameter
        key = (
            collapsed(planned.name),
            planned.role,
            planned.shape,
            planned.dtype,
            planned.axis,
            planned.is_in_module,
            *(fate.operation, fate.replicas, fate.divisor, fate.wire_dtype, fate.region),
            *(fate.is_reduced, fate.is_sound, fate.is_conditional, fate.is_known, fate.why),
        )
        rows.setdefault(key, []).append(fate)
    return tuple(map(_row, rows.values()))


def _row(members: Sequence[Fate]) -> ExplainedGroup:
    fate, planned = members[0], members[0].parameter
    names = tuple(member.parameter.name for member in members)
    is_trained = fate.operation != FROZEN
    return ExplainedGroup(
        pattern=_pattern(names),
        names=names,
        tower=planned.role.tower,
        kind=planned.role.kind,
        shape=planned.shape,
        operation=fate.operation,
        replicas=fate.replicas,
        divisor=fate.divisor,
        dtype=_spell(planned.dtype),
        wire_dtype=None if fate.wire_dtype is None else _spell(fate.wire_dtype),
        region=fate.region,
        buckets=tuple(sorted({member.bucket for member in members if member.bucket is not None})),
        num_bytes=sum(member.parameter.num_bytes for member in members) if is_trained else 0,
        is_in_module=planned.is_in_module,
        is_reduced=fate.is_reduced,
        is_sound=fate.is_sound,
        is_conditional=fate.is_conditional,
        is_known=fate.is_known,
        why=fate.why,
    )


def _pattern(names: Sequence[str]) -> str:
    """The names' common spelling, with ``*`` for the numbers in which they differ."""
    parts = [name.replace("[", ".[").split(".") for name in names]
    common = [own[0] if len(set(own)) == 1 else collapsed(own[0]) for own in zip(*parts, strict=True)]
    return ".".join(common).replace(".[", "[")


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
