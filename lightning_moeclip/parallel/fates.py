"""What becomes of the gradient of each parameter: who sums it, over which ranks, and by what it is divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import PlannedParameter, SyncPlan
from lightning_moeclip.parallel.roles import ParamRole
from lightning_moeclip.parallel.tables import collapsed

__all__ = ["FROZEN", "NOBODY", "UNKNOWN", "Fate", "fates_in_plan", "fates_of_strays", "role_outside"]

FROZEN, NOBODY, UNKNOWN = "none: frozen", "NONE: nobody", "not known"


@dataclass(frozen=True)
class Fate:
    """What becomes of the gradient of one parameter.

    Attributes:
        parameter: name, role, shape on a rank, dtype of the gradient.
        operation: what the ranks do with it, such as "sum over dp".
        replicas: the sets of ranks that do it, each among themselves; they hold the same copy.
        divisor: what the sum is divided by; None where there is no sum.
        wire_dtype: dtype in which it travels, where that is another one.
        region: whose loss scale it has; None for one without a gradient.
        bucket: number of the bucket that it travels in; None where there is none or nobody knows.
        num_passes: how often a ring sends the whole of it round: 2 for a sum that every rank gets, 1 for one of which
            each rank gets its part.
        is_reduced: False where nobody reduces it and somebody should, or where nobody may.
        is_conditional: of one that is not reduced: it is in a step that meets the condition that ``why`` names.
        is_known: False where it cannot be told whether it is reduced.
        is_sound: False where it is reduced and the result is wrong, or where the run is refused.
        why: reason of all this where it is not the plain case.
    """

    parameter: PlannedParameter
    operation: str
    replicas: tuple[tuple[int, ...], ...]
    divisor: int | None
    wire_dtype: torch.dtype | None = None
    region: str | None = "model"
    bucket: int | None = None
    num_passes: int = 2
    is_reduced: bool = True
    is_sound: bool = True
    is_conditional: bool = False
    is_known: bool = True
    why: str = ""

    @property
    def num_wire_bytes(self) -> int:
        """Size of what travels."""
        size = int(torch.Size(self.parameter.shape).numel())
        return size * (self.wire_dtype or self.parameter.dtype).itemsize


def fates_in_plan(
    plan: SyncPlan,
    parameters: Sequence[PlannedParameter],
    mesh: Mesh,
    *,
    regions: Mapping[str, str],
    wire_dtype: torch.dtype | None = None,
    hidden: Mapping[str, str],
) -> list[Fate]:
    """What a plan does with each parameter.

    Args:
        plan: of the trainable parameters.
        parameters: all of them, frozen ones too.
        mesh: axes.
        regions: names by name of the parameter, of those in a region.
        wire_dtype: dtype in which gradients travel; None for their own.
        hidden: paths of parameters that only an optimizer holds, by their name in the plan.
    """
    buckets = {planned.name: index for index, bucket in enumerate(plan.buckets) for planned in bucket.parameters}
    fates = []
    for planned in parameters:
        is_trained = planned.name in buckets
        why = ""
        if not planned.is_in_module:
            place = f", as {collapsed(hidden[planned.name])}" if planned.name in hidden else ""
            why = f"only an optimizer holds it{place}: no module registers it, so load_from_checkpoint will not see it"
        fates.append(
            Fate(
                planned,
                f"sum over {planned.axis}" if is_trained else FROZEN,
                mesh.replica_sets(planned.axis),
                plan.divisor if is_trained else None,
                wire_dtype=None if wire_dtype == planned.dtype else wire_dtype,
                region=regions.get(planned.name, "model") if is_trained else None,
                bucket=buckets.get(planned.name),
                num_passes=2 if is_trained else 0,
                why=why,
            )
        )
    return fates


def fates_of_strays(strays: Mapping[str, Tensor], *, error: str = "") -> list[Fate]:
    """What becomes of tensors that nobody registers: nothing, unless an optimizer that is not known holds them.

    Args:
        strays: see ``stray_tensors``.
        error: with which ``configure_optimizers()`` failed, where an optimizer that holds them would be enough; empty
            where it did not.
    """
    remedy = "Make it an attribute of a module, as an nn.Parameter or in an nn.ModuleList"
    why = (
        "it asks for a gradient, no module registers it and no known optimizer holds it: it is neither reduced nor "
        f"saved. {remedy}, or do not let it require a gradient"
    )
    if error:
        why = (
            f"not known: configure_optimizers failed with {error}. No module registers it: it is reduced where an "
            f"optimizer holds it, and nobody reduces it where none does. {remedy}"
        )
    return [
        Fate(
            PlannedParameter(path, role_outside(t), tuple(t.shape), t.dtype, axis="dp", is_in_module=False),
            UNKNOWN if error else NOBODY,
            (),
            None,
            region=None,
            num_passes=0,
            is_reduced=False,
            is_known=not error,
            why=why,
        )
        for path, t in strays.items()
    ]


def role_outside(tensor: Tensor) -> ParamRole:
    """Role of what is in no module: its path says nothing, its shape a little."""
    return ParamRole(None, "logit_scale" if tensor.ndim == 0 else "dense")
