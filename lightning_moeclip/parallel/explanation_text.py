"""An explanation in words: the table, what it adds up to, and what nobody reduces."""

from collections.abc import Sequence

from lightning_moeclip.parallel.explained import ExplainedGroup, Findings
from lightning_moeclip.parallel.tables import (
    in_red,
    markdown_table,
    spell_bytes,
    spell_runs,
    text_table,
    wants_colour,
)
from lightning_moeclip.parallel.traffic import Ring

__all__ = ["told", "told_in_markdown"]

_HEAD = (
    "parameter", "tower", "kind", "shape", "count", "ranks", "operation", "divisor", "gradient", "scale", "bucket",
    "per step",
)  # fmt: skip
_IS_NUMBER = tuple(name in ("count", "divisor", "per step") for name in _HEAD)
_MOST_LINKS = 6


def told(found: Findings, *, is_coloured: bool | None) -> str:
    """See ``Explanation.to_text``."""
    coloured = wants_colour() if is_coloured is None else is_coloured
    groups = found.groups
    table = text_table(
        _HEAD,
        [_cells(group, found.world_size) for group in groups],
        is_number=_IS_NUMBER,
        is_red=[_is_bad(group) for group in groups],
        is_coloured=coloured,
    )
    reasons = [
        in_red(f"{group.pattern}: {group.why}.", is_coloured=coloured and _is_bad(group))
        for group in groups
        if group.why
    ]
    verdict = [in_red(line, is_coloured=coloured and not found.is_ok) for line in _verdict(found)]
    parts = [[_title(found)], table, reasons, _totals(found), _notes(found), verdict]
    return "\n\n".join("\n".join(part) for part in parts if part)


def told_in_markdown(found: Findings) -> str:
    """See ``Explanation.to_markdown``."""
    rows = []
    for group in found.groups:
        name, *others = _cells(group, found.world_size)
        cells = [f"`{name}`", *others]  # a bare * would begin an emphasis
        rows.append([f"**{cell}**" for cell in cells] if _is_bad(group) else cells)
    reasons = [f"* `{group.pattern}`: {group.why}." for group in found.groups if group.why]
    totals = [f"* {line}" for line in [*_totals(found), *_notes(found)]]
    verdict = [line if found.is_ok else f"**{line}**" for line in _verdict(found)]
    parts = [[_title(found)], markdown_table(_HEAD, rows), reasons, totals, verdict]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _is_bad(group: ExplainedGroup) -> bool:
    return not (group.is_reduced and group.is_sound and group.is_known)


def _title(found: Findings) -> str:
    size = found.expert_parallel_size
    spread = f", experts spread over {size}" if size > 1 else ""
    return f"Gradients under {found.strategy} on {_counted(found.world_size, 'rank')}{spread}"


def _cells(group: ExplainedGroup, world_size: int) -> list[str]:
    return [
        group.pattern,
        group.tower or "-",
        group.kind,
        " x ".join(map(str, group.shape)) or "0-d",
        str(group.count),
        _ranks(group.replicas, world_size),
        group.operation,
        "-" if group.divisor is None else str(group.divisor),
        group.dtype if group.wire_dtype is None else f"{group.dtype}, sent as {group.wire_dtype}",
        group.region or "-",
        spell_runs(group.buckets),
        spell_bytes(group.num_bytes) if group.num_bytes else "-",
    ]


def _ranks(replicas: tuple[tuple[int, ...], ...], world_size: int) -> str:
    """``all 8``, or the set that rank r belongs to: ``{r, r+4}`` modulo the number of ranks."""
    if not replicas:
        return "-"
    if len(replicas) == 1:
        return f"all {world_size}" if world_size > 1 else "1"
    offsets = [rank - replicas[0][0] for rank in replicas[0]]
    spelled = ["r" if offset == 0 else f"r+{offset}" for offset in offsets]
    if len(spelled) > 3:
        spelled = [*spelled[:2], "...", spelled[-1]]
    return f"{{{', '.join(spelled)}}}"


def _totals(found: Findings) -> list[str]:
    lines = [f"Each rank holds {spell_bytes(found.gradient_bytes)} of gradients."]
    lines += [_told_ring(ring, found.ranks_per_node) for ring in found.rings]
    if found.rings:
        lines.append(
            "Not counted: tokens and features that layers and losses exchange, and one small sum at the end of each "
            "backward."
        )
    return lines


def _told_ring(ring: Ring, ranks_per_node: int) -> str:
    num_ranks, links = len(ring.members[0]), ring.links(ranks_per_node)
    crossing = [f"{link.source}->{link.target}" for link in links if link.crosses_nodes]
    shown = ", ".join(crossing[:_MOST_LINKS]) + (", ..." if len(crossing) > _MOST_LINKS else "")
    between = f"{len(crossing)} of them between nodes: {shown}" if crossing else "none of them between nodes"
    return (
        f"{ring.axis}: {_counted(len(ring.members), 'ring')} of {num_ranks} ranks; each rank sends "
        f"{spell_bytes(ring.bytes_per_rank)} per step, over {_counted(len(links), 'link')}, {between}."
    )


def _notes(found: Findings) -> list[str]:
    return [f"Note: {note}" for note in found.notes]


def _verdict(found: Findings) -> list[str]:
    if found.is_ok:
        return ["Nothing is left unreduced: every trainable parameter is reduced over all ranks that hold it."]
    lines = []
    conditional = frozenset(found.conditional)
    if never := [name for name in found.unreduced if name not in conditional]:
        lines.append(f"NOBODY REDUCES {_listed(never)}.")
    if found.conditional:
        lines.append(
            f"MAY BE LEFT UNREDUCED, in a step in which a rank has no token for it: {_listed(found.conditional)}. If "
            "every rank calls every expert in every step it is sound: python -m lightning_moeclip verify tells."
        )
    if found.unsound:
        lines.append(f"REDUCED TO SOMETHING WRONG, OR REFUSED: {_listed(found.unsound)}.")
    if found.unknown:
        lines.append(f"NOT KNOWN, since configure_optimizers() failed: {_listed(found.unknown)}.")
    if not found.groups:
        lines.append("NOT KNOWN: the module has no parameters.")
    elif not found.is_complete:
        lines.append("NOT ALL IS KNOWN: parts of the module could not be made, and are not in the table.")
    return lines


def _listed(names: Sequence[str]) -> str:
    most = 20
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
