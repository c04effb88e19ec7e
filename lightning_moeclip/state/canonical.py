"""Canonical state: whole experts, as one process would hold them, whatever the layout of the ranks.

Experts are spread while a fit runs and whole otherwise. A checkpoint holds whole experts and whole optimizer moments,
so one process or any other ``expert_parallel_size`` can load it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.parallel import ledger
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.interop import listed_names
from lightning_moeclip.parallel.mesh import ExpertAxis
from lightning_moeclip.parallel.roles import spreadable_layers
from lightning_moeclip.state.rank_experts import RankExperts

__all__ = ["SpreadExperts", "gather_experts", "own_expert_names", "spread_names"]


def own_expert_names(module: nn.Module) -> frozenset[str]:
    """Names of what this rank shares with its ``edp`` group alone: slices of experts, and lists of other libraries."""
    return frozenset(spread_names(module)) | listed_names(module)


def spread_names(module: nn.Module) -> dict[str, int]:
    """Names of the parameters of which this rank holds a slice, with the number of experts of the whole."""
    num_experts = {
        id(parameter): layer.num_experts
        for _, layer in spreadable_layers(module)
        if layer.expert_axis is not None
        for parameter in layer.expert_parameters().values()
    }
    return {
        name: num_experts[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in num_experts
    }


@torch.no_grad()
def gather_experts(part: Tensor, axis: ExpertAxis) -> Tensor:
    """Whole tensor from the slices of all ranks of ``axis``, which must all call this.

    Args:
        part: [num_experts / axis.size, ...].
        axis: ranks that share out the experts.

    Returns:
        [num_experts, ...], the same on every rank.
    """
    return torch.cat(_gather_parts(part, axis))


@torch.no_grad()
def _gather_parts(part: Tensor, axis: ExpertAxis) -> list[Tensor]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, part.detach().contiguous(), group=axis.group)
    return parts


def _gather_values(value: Any, axis: ExpertAxis) -> list[Any]:
    first = dist.get_rank() - axis.rank  # ranks that share experts out are neighbours
    return gather_objects(value)[first : first + axis.size]


class SpreadExperts:
    """The modules whose experts are spread over one axis, and the way between slices and whole experts.

    Methods that gather are collectives over the axis: every rank calls them at the same point.
    """

    def __init__(self, axis: ExpertAxis) -> None:
        self.axis = axis
        self._roots: list[nn.Module] = []
        self._num_experts: dict[int, int] = {}  # by id of the parameter, kept after the experts are whole again
        self._lists = RankExperts(
            axis.rank, lambda part: _gather_parts(part, axis), lambda value: _gather_values(value, axis)
        )
        self._hooks: list[RemovableHandle] = []

    def spread(self, root: nn.Module) -> None:
        """Keep this rank's slice in every layer under ``root``; layers that are spread already stay as they are.

        Raises:
            ValueError: a layer's experts cannot be shared out evenly.
        """
        layers = [(path, layer) for path, layer in spreadable_layers(root) if layer.expert_axis is None]
        for _, layer in layers:
            layer.shard_experts(self.axis)
        for _, layer in spreadable_layers(root):
            self._num_experts |= {id(p): layer.num_experts for p in layer.expert_parameters().values()}
        lists = self._lists.learn(root)
        if all(root is not other for other in self._roots):
            self._roots.append(root)
            self._hooks += [e.layer.register_forward_hook(_enter) for e in lists if e.layer is not None]

    def gather(self, *, masters: MasterWeights | None = None) -> None:
        """Make the experts of every spread module whole again, and their masters with them.

        Lists of other libraries stay: each rank has no place for more than its own.
        """
        for root in self._roots:
            for _, layer in spreadable_layers(root):
                if layer.expert_axis is not None:
                    parts = layer.expert_parameters()
                    for part in parts.values():
                        part.grad = None  # of the slice alone
                    held = [None if masters is None else masters.master_of(part) for part in parts.values()]
                    whole_masters = [(m, gather_experts(m, self.axis)) for m in held if m is not None]
                    layer.restore_experts({name: gather_experts(part, self.axis) for name, part in parts.items()})
                    for master, whole in whole_masters:
                        master.become(whole)
        self._roots.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def whole_model_state(self, state: Mapping[str, Any], root: nn.Module) -> dict[str, Any]:
        """``state`` of ``root`` with whole experts.

        Args:
            state: values by parameter name; entries that are whole already are left alone.
            root: module of which this is a state dict.
        """
        names = spread_names(root)
        whole = dict(state)
        for name, num_experts in names.items():
            value = whole.get(name)
            if isinstance(value, Tensor) and value.shape[0] * self.axis.size == num_experts:
                whole[name] = gather_experts(value, self.axis)
        return self._lists.whole_model_state(whole, root)

    def own_model_state(self, state: Mapping[str, Any], root: nn.Module) -> dict[str, Any]:
        """``state`` with this rank's experts in the lists of other libraries; a ``MoE`` takes its own from the whole.

        Raises:
            ValueError: ``state`` has some of the experts of such a list and not all.
        """
        return self._lists.own_model_state(state, root)

    def whole_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """State dict of ``optimizer`` with whole moments for every spread expert."""
        return self._lists.whole_optimizer_state(optimizer, self._map_moments(optimizer, state, is_whole=False))

    def own_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """State dict of ``optimizer`` with this rank's slice of the moments of every spread expert."""
        return self._map_moments(optimizer, self._lists.own_optimizer_state(optimizer, state), is_whole=True)

    def _map_moments(self, optimizer: Optimizer, state: Mapping[str, Any], *, is_whole: bool) -> dict[str, Any]:
        moments = dict(state["state"])
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                num_experts = self._num_experts.get(id(model_parameter(parameter)))
                if num_experts is None or index not in moments:
                    continue
                rows = num_experts if is_whole else num_experts // self.axis.size
                moments[index] = {
                    name: self._convert(value, is_whole=is_whole) if _has_rows(value, rows) else value
                    for name, value in moments[index].items()
                }
        return {**state, "state": moments}

    def _convert(self, value: Tensor, *, is_whole: bool) -> Tensor:
        if is_whole:
            return value.chunk(self.axis.size)[self.axis.rank].clone()
        return gather_experts(value, self.axis)


def _enter(layer: nn.Module, given: Any, output: Any) -> None:
    """A rank whose step returns no loss has to take part in the layer's backward too."""
    for value in output if isinstance(output, tuple) else (output,):
        if isinstance(value, Tensor):
            ledger.enter(value)


def _has_rows(value: object, rows: int) -> bool:
    """Whether an entry of an optimizer's state is laid out by expert; a step count is not."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows
