"""Sums over gradients by layer, as they leave autograd and as the optimizer sees them.

Nothing is taken in a step for which nobody asked. In one for which somebody did, each gradient is read once before the
reduction and the reduced ones are shared out: a rank reads those of which it is the one that counts. Publishing is one
small all-reduce and one read on the host.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.report import GradStatistics, GradSums, LayerKey
from lightning_moeclip.kernels.grad_statistics import (
    ABSOLUTE,
    MAXIMUM,
    NUM_COLUMNS,
    NUM_NONFINITE,
    SIZE,
    SQUARE,
    TOTAL,
    grad_statistics,
)
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import SyncPlan
from lightning_moeclip.parallel.roles import ParamRole, Towers, read_roles

__all__ = ["LayerStatistics", "keys_of", "layer_keys", "sums_of"]

_CONTAINERS = {"block", "blocks", "layer", "layers", "resblocks"}


def keys_of(module: nn.Module, towers: Towers | None = None) -> dict[str, LayerKey]:
    """Row of every parameter of ``module`` by its path.

    Args:
        module: the user's module.
        towers: module paths by tower; None recognises known layouts.
    """
    return layer_keys(read_roles(module, towers))


def layer_keys(roles: Mapping[str, ParamRole]) -> dict[str, LayerKey]:
    """Row of every parameter by its path: the block it lies in, else its module, without what its tower has in common.

    Args:
        roles: role by path.
    """
    layers = {path: _layer_of(path.split("."), role.kind) for path, role in roles.items()}
    shared = {}
    for tower in {role.tower for role in roles.values()}:
        members = [layers[path] for path, role in roles.items() if role.tower == tower]
        shared[tower] = 0 if tower is None else _common_prefix(members)
    return {
        path: LayerKey(role.tower, ".".join(layers[path][shared[role.tower] :]), role.kind)
        for path, role in roles.items()
    }


def _layer_of(segments: Sequence[str], kind: str) -> Sequence[str]:
    for index, segment in enumerate(segments[:-1]):
        if segment.isdigit():
            # stages of blocks: layers.1.blocks.0
            inner = segments[index + 1 : index + 3]
            is_stage = len(inner) == 2 and inner[0] in _CONTAINERS and inner[1].isdigit()
            return segments[: index + 3] if is_stage else segments[: index + 1]
        if index and segment in ("experts", "router"):
            return segments[:index]
    is_part = kind == "expert" or segments[-1].endswith(("weight", "bias"))
    return segments[:-1] if is_part and len(segments) > 1 else segments


def _common_prefix(paths: Sequence[Sequence[str]]) -> int:
    """Number of leading segments that all paths share, each keeping one of its own at least."""
    longest = min(len(path) for path in paths) - 1
    return next((i for i in range(longest) if len({path[i] for path in paths}) > 1), longest)


def sums_of(gradients: Iterable[tuple[LayerKey, Tensor]]) -> tuple[tuple[LayerKey, ...], GradSums]:
    """Sums by row of gradients of this rank alone, for strategies that do not keep them.

    Args:
        gradients: row and gradient of each parameter that has one.
    """
    members = list(gradients)
    groups: dict[LayerKey, list[int]] = {}
    for index, (key, _) in enumerate(members):
        groups.setdefault(key, []).append(index)
    rows = _statistics_of([gradient for _, gradient in members], torch.device("cpu"))
    return tuple(groups), _as_sums(_added(rows, list(groups.values())))


def _statistics_of(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """[n, NUM_COLUMNS] on ``device``; one call for all gradients of a device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, gradient in enumerate(gradients):
        by_device.setdefault(gradient.device, []).append(index)
    rows = torch.zeros(len(gradients), NUM_COLUMNS, dtype=torch.float64, device=device)
    for members in by_device.values():
        found = grad_statistics([gradients[index] for index in members]).to(device)
        if len(by_device) == 1:
            return found
        rows[torch.tensor(members, device=device)] = found
    return rows


def _added(rows: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """[groups, NUM_COLUMNS]: rows added up by group, in the order that is given and in few launches.

    Args:
        rows: [n, NUM_COLUMNS].
        groups: indices of rows.
    """
    longest = max(map(len, groups), default=0)
    # the last row is empty: groups are filled up with it, since ``index_add_`` has no fixed order on a GPU
    padded = torch.cat([rows, rows.new_zeros(1, NUM_COLUMNS)])
    filled = [[*group, *[len(rows)] * (longest - len(group))] for group in groups]
    parts = padded[torch.tensor(filled, dtype=torch.int64, device=rows.device).view(len(groups), longest)]
    table = parts.sum(1)
    if longest:
        table[:, MAXIMUM] = parts[..., MAXIMUM].amax(1)
    return table


def _as_sums(table: Tensor) -> GradSums:
    size, total, square, absolute, num_nonfinite, num_zeros, maximum = table.unbind(1)
    return GradSums(size, total, square, absolute, maximum, num_nonfinite, num_zeros)


class LayerStatistics:
    """Takes and publishes the statistics of one plan.

    Attributes:
        is_asked: whether the step at hand is looked at; the same on all ranks.
    """

    def __init__(
        self,
        plan: SyncPlan,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        roles: Mapping[str, ParamRole],
        *,
        is_asked: bool = False,
    ) -> None:
        """Lay out the rows.

        Args:
            plan: of the run.
            parameters: trainable ones by name, in the order of the module.
            mesh: axes and groups.
            roles: of all parameters, also of frozen ones, so that a row keeps its name when a part is unfrozen.
            is_asked: as the attribute.
        """
        self.is_asked = is_asked
        self._mesh = mesh
        self._device = plan.buckets[0].device if plan.buckets else torch.device("cpu")
        key_of = layer_keys(roles)
        self.keys = tuple(dict.fromkeys(key_of[name] for name in parameters))
        self._row = {id(parameters[name]): self.keys.index(key_of[name]) for name in parameters}
        counting = plan.counting_ranks()
        self._counts = {id(parameters[name]) for name in parameters if counting[name] == mesh.rank}
        self._num_replicas = self._replicas_by_row(plan, key_of)
        self._local: dict[int, Tensor] | None = None

    def _replicas_by_row(self, plan: SyncPlan, key_of: Mapping[str, LayerKey]) -> Tensor:
        """|R| of each row, [rows]; NaN where its parameters have different replicas."""
        found: dict[LayerKey, set[int]] = {}
        for planned in plan.parameters:
            found.setdefault(key_of[planned.name], set()).add(len(plan.replicas[planned.axis]))
        sizes = [found[key] for key in self.keys]
        return torch.tensor([float(next(iter(s))) if len(s) == 1 else torch.nan for s in sizes], dtype=torch.float64)

    def begin(self, *, is_asked: bool) -> None:
        """Before a training step."""
        self.is_asked = is_asked
        self._local = None

    def take_local(self, packed: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Take what is known of what this rank gives to the sum; every rank calls this, also one without gradients.

        Args:
            packed: parameters of the module and the sums of their gradients divided by W, still times the loss scale.
        """
        self._local = {id(parameter): sums.to(self._device) for parameter, sums in packed}

    @torch.no_grad()
    def publish(self, stepped: Iterable[nn.Parameter], *, loss_scale: Tensor | None) -> GradStatistics:
        """Statistics of the parameters that an optimizer is about to step; a collective.

        Args:
            stepped: what it holds; their reduced gradients are unscaled.
            loss_scale: 0-d, that of the backward; None where there is none.
        """
        held = {id(p): p for p in map(model_parameter, stepped) if id(p) in self._row}
        counted = [(k, p.grad) for k, p in held.items() if k in self._counts and p.grad is not None]
        rows = _statistics_of([gradient for _, gradient in counted], self._device)
        reduced = self._by_row({key: row for (key, _), row in zip(counted, rows, strict=True)})
        local = self._by_row({key: row for key, row in (self._local or {}).items() if key in held})
        self._rescale(local, loss_scale)
        total_local, total_reduced = self._summed(local, reduced)
        if self._local is None:
            # nothing is packed where nothing is reduced, and a plan that was made anew has seen no packing
            is_known = self._mesh.world_size == 1
            total_local = total_reduced.clone() if is_known else torch.full_like(total_local, torch.nan)
        return GradStatistics(
            self.keys, _as_sums(total_local), _as_sums(total_reduced), self._noise(total_local, total_reduced)
        )

    def _by_row(self, sums: Mapping[int, Tensor]) -> Tensor:
        """[rows, NUM_COLUMNS]: sums by parameter added up by row."""
        groups: list[list[int]] = [[] for _ in self.keys]
        for index, key in enumerate(sums):
            groups[self._row[key]].append(index)
        empty = torch.zeros(0, NUM_COLUMNS, dtype=torch.float64, device=self._device)
        return _added(torch.stack(list(sums.values())) if sums else empty, groups)

    def _summed(self, *tables: Tensor) -> list[Tensor]:
        """Tables of all ranks on the host; maxima travel in a column per rank, since the one collective is a sum."""
        world_size, rank = self._mesh.world_size, self._mesh.rank
        shape = (len(tables), len(self.keys), MAXIMUM + world_size)
        sent = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for part, table in zip(sent, tables, strict=True):
            part[:, :MAXIMUM] = table[:, :MAXIMUM]
            part[:, MAXIMUM + rank] = table[:, MAXIMUM]
        received = sum_over(sent, self._mesh.gradient_groups["dp"]).cpu()
        return [torch.cat([part[:, :MAXIMUM], part[:, MAXIMUM:].amax(1, keepdim=True)], dim=1) for part in received]

    def _rescale(self, table: Tensor, loss_scale: Tensor | None) -> None:
        scale = table.new_ones(()) if loss_scale is None else loss_scale.to(table)
        factor = self._mesh.divisor / scale
        table[:, [TOTAL, ABSOLUTE, MAXIMUM]] *= factor
        table[:, SQUARE] *= factor**2

    def _noise(self, local: Tensor, reduced: Tensor) -> Tensor:
        world_size, replicas = self._mesh.world_size, self._num_replicas
        own = local[:, SQUARE] * (replicas / world_size) ** 2
        spread = (own - replicas * reduced[:, SQUARE]).clamp(min=0.0)
        noise = world_size / replicas * spread / (replicas - 1)
        is_known = (replicas > 1) & (reduced[:, SIZE] > 0) & (local[:, NUM_NONFINITE] == 0)
        return noise.where(is_known, torch.nan)
