"""The plan: which ranks reduce each parameter, by what it is divided, and in which bucket it travels.

Made once when the optimizers exist, equal on all ranks, and only read afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_moeclip.parallel.mesh import Axis, Mesh
from lightning_moeclip.parallel.roles import ParamRole

__all__ = ["BucketPlan", "PlannedParameter", "SyncPlan", "build_plan", "plan_parameter"]

# a model smaller than a bucket would otherwise wait for its last gradient before anything travels
_BUCKETS_PER_MODEL = 4
_MIN_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class PlannedParameter:
    """How one trainable parameter is reduced.

    Attributes:
        name: path in the module, or ``optimizer{i}.group{j}.{k}`` for one that only an optimizer holds.
        role: tower and kind.
        shape: shape on this rank.
        dtype: dtype of the gradient.
        axis: replica axis: ``dp`` for one that every rank holds, ``edp`` for a spread expert.
        is_in_module: False for a parameter that only an optimizer holds.
        is_listed: an expert of a list that another library has shared out: no slice of a whole, but a parameter that
            the ranks of its replica axis have and no others.
    """

    name: str
    role: ParamRole
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: Axis
    is_in_module: bool
    is_listed: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the gradient on this rank."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def describe(self) -> str:
        """One line for the comparison over ranks: name, shape, dtype, kind, axis."""
        return f"{self.name} {list(self.shape)} {self.dtype} {self.role.kind} over {self.axis}"


@dataclass(frozen=True)
class BucketPlan:
    """Parameters that are reduced in one collective: same replica axis, dtype and device."""

    axis: Axis
    dtype: torch.dtype
    device: torch.device
    parameters: tuple[PlannedParameter, ...]


@dataclass(frozen=True)
class SyncPlan:
    """Reduction plan of a model: buckets in launch order.

    Attributes:
        buckets: in the order in which backward fills them.
        divisor: number that every summed gradient is divided by, the size of the ``dp`` axis.
        replicas: ranks that hold the same copy as this one, by axis.
    """

    buckets: tuple[BucketPlan, ...]
    divisor: int
    replicas: Mapping[Axis, tuple[int, ...]]

    @property
    def parameters(self) -> tuple[PlannedParameter, ...]:
        """All planned parameters, bucket by bucket."""
        return tuple(parameter for bucket in self.buckets for parameter in bucket.parameters)

    def __getitem__(self, name: str) -> PlannedParameter:
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    def counting_ranks(self) -> dict[str, int]:
        """Of the ranks that hold a replica of a parameter the one that counts it, by name.

        They take turns, so that the work of a sum over all logical parameters is shared.
        """
        return {
            planned.name: self.replicas[planned.axis][index % len(self.replicas[planned.axis])]
            for index, planned in enumerate(self.parameters)
        }

    def fingerprint(self) -> list[str]:
        """Lines that have to be equal on all ranks."""
        return [f"bucket {i}: {p.describe()}" for i, b in enumerate(self.buckets) for p in b.parameters]


def plan_parameter(
    name: str,
    parameter: nn.Parameter,
    role: ParamRole,
    *,
    is_spread: bool,
    is_in_module: bool,
    is_listed: bool = False,
) -> PlannedParameter:
    """How ``parameter`` would be reduced if it is trained.

    Args:
        name: see ``PlannedParameter``.
        parameter: as this rank holds it.
        role: tower and kind.
        is_spread: this rank holds a slice.
        is_in_module: the module has it.
        is_listed: it is of an expert that other ranks do not have, by their own list.
    """
    return PlannedParameter(
        name=name,
        role=role,
        shape=tuple(parameter.shape),
        dtype=parameter.grad_dtype or parameter.dtype,  # float32 for a 16-bit parameter with a master
        axis="edp" if is_spread or is_listed else "dp",
        is_in_module=is_in_module,
        is_listed=is_listed,
    )


def build_plan(
    parameters: Mapping[str, nn.Parameter],
    roles: Mapping[str, ParamRole],
    mesh: Mesh,
    *,
    spread: frozenset[str] = frozenset(),
    listed: frozenset[str] = frozenset(),
    optimizer_only: frozenset[str] = frozenset(),
    bucket_size_mb: float = 25.0,
) -> SyncPlan:
    """Lay out the reduction of all trainable parameters.

    Buckets are filled in reverse order of ``parameters``, which is about the order of backward. Experts travel apart
    from dense parameters: which of them get a gradient may depend on the batch.

    Args:
        parameters: trainable parameters by name, one entry for tied ones.
        roles: role by name.
        mesh: axes and groups.
        spread: names of expert parameters of which this rank holds a slice.
        listed: names of those of experts that another library has shared out.
        optimizer_only: names of parameters that the module does not have.
        bucket_size_mb: upper bound of a bucket in MiB.
    """
    total = sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in parameters.values())
    limit = min(bucket_size_mb * 2**20, max(_MIN_BUCKET_BYTES, total / _BUCKETS_PER_MODEL))
    buckets: list[list[PlannedParameter]] = []
    devices: list[torch.device] = []
    open_buckets: dict[tuple, int] = {}
    for name, parameter in reversed(list(parameters.items())):
        planned = plan_parameter(
            name,
            parameter,
            roles[name],
            is_spread=name in spread,
            is_in_module=name not in optimizer_only,
            is_listed=name in listed,
        )
        key = (planned.axis, planned.role.kind == "expert", planned.dtype, parameter.device)
        index = open_buckets.get(key)
        if index is None or sum(p.num_bytes for p in buckets[index]) + planned.num_bytes > limit:
            index = open_buckets[key] = len(buckets)
            buckets.append([])
            devices.append(parameter.device)
        buckets[index].append(planned)
    return SyncPlan(
        buckets=tuple(
            BucketPlan(bucket[0].axis, bucket[0].dtype, device, tuple(bucket))
            for bucket, device in zip(buckets, devices, strict=True)
        ),
        divisor=mesh.divisor,
        replicas={"dp": mesh.replicas("dp"), "edp": mesh.replicas("edp")},
    )
