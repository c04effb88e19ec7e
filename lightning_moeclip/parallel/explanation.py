"""What becomes of the gradient of every parameter, as a value that prints as a table.

Nothing here is a collective, and nothing needs a process group: a plan for any number of ranks can be explained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moeclip.parallel.explained import ExplainedGroup, Findings, grouped
from lightning_moeclip.parallel.explanation_text import told, told_in_markdown
from lightning_moeclip.parallel.fates import Fate, fates_in_plan, fates_of_strays
from lightning_moeclip.parallel.mesh import Axis, Mesh
from lightning_moeclip.parallel.plan import PlannedParameter, SyncPlan
from lightning_moeclip.parallel.traffic import rings_of

__all__ = ["ExplainedGroup", "Explanation", "explain_plan", "explanation_of"]


@dataclass(frozen=True)
class Explanation(Findings):
    """Who reduces what; prints as a table. See ``Findings`` for what it holds."""

    @override
    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, is_coloured: bool | None = None) -> str:
        """A table with aligned columns, totals, and a sentence on what nobody reduces.

        Args:
            is_coloured: with what is wrong in red; None: when it goes to a terminal.
        """
        return told(self, is_coloured=is_coloured)

    def to_markdown(self) -> str:
        """The same for what shows Markdown, such as TensorBoard."""
        return told_in_markdown(self)

    def to_json(self) -> str:
        """The same for programs: an object with groups, totals, what is unreduced, unsound or not known, and notes."""
        return json.dumps(self.to_dict(), indent=2)


def explain_plan(
    plan: SyncPlan,
    parameters: Sequence[PlannedParameter],
    mesh: Mesh,
    *,
    strays: Mapping[str, Tensor],
    held: Mapping[int, str],
    regions: Mapping[str, str],
    wire_dtype: torch.dtype | None = None,
    ranks_per_node: int | None = None,
    notes: Sequence[str] = (),
    error: str = "",
) -> Explanation:
    """What a plan does with the gradients of a module.

    Args:
        plan: of the trainable parameters.
        parameters: all of them, frozen ones too, in the order of the rows.
        mesh: axes.
        strays: see ``stray_tensors``.
        held: names in the plan by id, of parameters that only an optimizer holds.
        regions: names by name of the parameter, of those in a region.
        wire_dtype: dtype in which gradients travel; None for their own.
        ranks_per_node: None for one node.
        notes: see ``Explanation``.
        error: see ``fates_of_strays``.
    """
    hidden = {held[id(tensor)]: path for path, tensor in strays.items() if id(tensor) in held}
    fates = fates_in_plan(plan, parameters, mesh, regions=regions, wire_dtype=wire_dtype, hidden=hidden)
    lost = {path: tensor for path, tensor in strays.items() if id(tensor) not in held}
    fates += fates_of_strays(lost, error=error)
    return explanation_of(fates, mesh, strategy="moeclip", ranks_per_node=ranks_per_node, notes=notes)


def explanation_of(
    fates: Sequence[Fate],
    mesh: Mesh,
    *,
    strategy: str,
    ranks_per_node: int | None = None,
    notes: Sequence[str] = (),
) -> Explanation:
    """Put parameters of one fate into one row, and add up what travels.

    Args:
        fates: of all parameters.
        mesh: axes.
        strategy: its name.
        ranks_per_node: None for one node.
        notes: see ``Explanation``.
    """
    sent: dict[Axis, float] = {"dp": 0, "edp": 0}
    for fate in fates:
        if fate.divisor is not None:
            sent[fate.parameter.axis] += fate.num_wire_bytes * fate.num_passes
    return Explanation(
        strategy=strategy,
        world_size=mesh.world_size,
        expert_parallel_size=mesh.expert_parallel_size,
        groups=grouped(fates),
        rings=rings_of(mesh, sent),
        ranks_per_node=mesh.world_size if ranks_per_node is None else ranks_per_node,
        notes=tuple(notes),
        is_complete=bool(fates),
    )
