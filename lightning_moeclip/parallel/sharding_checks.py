"""Checks of parameters that FSDP or a DTensor shards, and of experts that lie on another device.

Gradients of this package are summed over the ranks that hold the same parameter. Whoever shards a parameter sums its
gradient as well, over ranks of his own: over all of them where the experts of each are others, or a second time.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_moeclip.parallel import rules
from lightning_moeclip.parallel.interop import Kind, recognise_kind
from lightning_moeclip.parallel.roles import ParamRole, read_roles, spreadable_layers

__all__ = [
    "ShardedParameter",
    "check_expert_devices",
    "check_scalars_before_sharding",
    "check_sharded_parameters",
    "sharded_parameters",
]

_WRAPPED = "_fsdp_wrapped_module."
_HOW = {"fsdp1": "FullyShardedDataParallel", "fsdp2": "fully_shard", "dtensor": "a DTensor"}


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter that is not whole on this rank, and who sees to that.

    Attributes:
        name: path in the module, without wrappers.
        kind: what it is.
        how: "fsdp1" for FullyShardedDataParallel, "fsdp2" for fully_shard, "dtensor" for any other DTensor.
        ranks: over which it is sharded or replicated, and its gradient summed.
        compute_dtype: of the unit's mixed precision; None where there is none.
        is_replicated: every rank holds all of it, as under ``NO_SHARD``.
    """

    name: str
    kind: Kind
    how: Literal["fsdp1", "fsdp2", "dtensor"]
    ranks: tuple[int, ...]
    compute_dtype: torch.dtype | None = None
    is_replicated: bool = False


def sharded_parameters(module: nn.Module) -> list[ShardedParameter]:
    """Parameters of ``module`` under FSDP, of either kind, or in a DTensor; no communication."""
    return [*_in_flat_units(module), *_in_dtensors(module)]


def check_sharded_parameters(
    parameters: Sequence[ShardedParameter], *, replicas: Collection[int], expert_parallel_size: int
) -> None:
    """Refuse what FSDP or a DTensor shards, with the reason that weighs most for each.

    Args:
        parameters: of ``sharded_parameters``.
        replicas: ranks that hold the same experts as this one.
        expert_parallel_size: ranks that share out the experts.

    Raises:
        ValueError: there are some; one line for each rule that is broken.
    """
    found: dict[rules.Rule, list[str]] = {}
    for parameter in parameters:
        is_spread = parameter.kind == "expert" and expert_parallel_size > 1 and not {*parameter.ranks} <= {*replicas}
        if is_spread:
            rule = rules.NO_SHARD if parameter.is_replicated and parameter.how == "fsdp1" else rules.SHARDED_EXPERTS
            found.setdefault(rule, []).append(_told_of_experts(parameter, replicas))
        elif parameter.kind in ("logit_scale", "router") and _is_narrow(parameter.compute_dtype):
            found.setdefault(rules.NARROW_POLICY, []).append(_told_of_policy(parameter))
        else:
            found.setdefault(rules.SHARDED, []).append(_told_of_any(parameter))
    if found:
        # several parameters of a unit break the same rule in the same way: the first one stands for them
        raise ValueError("\n".join(rule.told(messages[0]) for rule, messages in found.items()))


def check_scalars_before_sharding(
    module: nn.Module, *, kind: Literal["fsdp1", "fsdp2"] = "fsdp2", ignored: Collection[nn.Parameter] = ()
) -> None:
    """Refuse 0-d parameters in a module that is about to be sharded, with what to write.

    Args:
        module: to be given to ``fully_shard`` or FullyShardedDataParallel.
        kind: "fsdp2" for the first, "fsdp1" for the second.
        ignored: parameters that are left out of it, as by ``ignored_params`` or ``ignored_states``.

    Raises:
        ValueError: there is one.
    """
    left_out = {id(parameter) for parameter in ignored}
    argument = "ignored_params={...}" if kind == "fsdp2" else "ignored_states=[...]"
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0 and id(parameter) not in left_out:
            raise ValueError(
                rules.SHARDED_SCALAR.told(
                    f"{name} has no dimension that {_HOW[kind]} could shard, and it refuses such a parameter. Make it "
                    f"nn.Parameter(torch.tensor([...])) of shape [1], or leave it out with {argument} and sum its "
                    "gradient over the ranks yourself."
                )
            )


def check_expert_devices(
    devices: Mapping[str, torch.device], roles: Mapping[str, ParamRole], *, run_device: torch.device
) -> None:
    """Refuse experts that do not lie where their tokens are.

    Args:
        devices: of the parameters that are trained, by name.
        roles: role by name; a name without one is left out.
        run_device: of this rank, where batches are brought.

    Raises:
        ValueError: an expert is on another device.
    """
    for name, device in devices.items():
        if name in roles and roles[name].kind == "expert" and not _is_same_device(device, run_device):
            raise ValueError(
                rules.EXPERT_DEVICE.told(
                    f"{name} is an expert on {device}, while tokens are on {run_device}: every token would have to "
                    "cross over and back in each layer, and its gradient could not be summed with the others. Leave "
                    "it where the strategy put it; to save memory, raise expert_parallel_size."
                )
            )


def _is_same_device(one: torch.device, other: torch.device) -> bool:
    is_indexed = one.index is not None and other.index is not None
    return one.type == other.type and (not is_indexed or one.index == other.index)


def _is_narrow(dtype: torch.dtype | None) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _told_of_experts(parameter: ShardedParameter, replicas: Collection[int]) -> str:
    held = f"{parameter.name} is an expert under {_HOW[parameter.how]} over ranks {list(parameter.ranks)}"
    same = f"of which only ranks {sorted(replicas)} hold the same experts"
    if parameter.is_replicated and parameter.how == "fsdp1":
        return (
            f"{held} with NO_SHARD, {same}: it averages the gradients of different experts. Leave FSDP out: "
            f"MoEClipStrategy(expert_parallel_size=...) spreads experts and sums each over its own ranks."
        )
    return (
        f"{held}, {same}: slices and gradients of different experts would be put together, without an error. Keep "
        "them out of the unit (ignored_params, ignored_states), or shard them over the ranks that hold the same "
        "experts; under MoEClipStrategy leave the wrapping out."
    )


def _told_of_policy(parameter: ShardedParameter) -> str:
    dtype = parameter.compute_dtype
    assert dtype is not None, "asked of a narrow one"
    return (
        f"{parameter.name} is a {parameter.kind} that {_HOW[parameter.how]} computes in {dtype}: near ln 100 that "
        f"moves in steps of {4 * torch.finfo(dtype).eps:.1%}, and near-ties of router logits fall to another expert. "
        "Keep it in a unit without param_dtype, or out of all units; under MoEClipStrategy leave the wrapping out."
    )


def _told_of_any(parameter: ShardedParameter) -> str:
    return (
        f"{parameter.name} is sharded by {_HOW[parameter.how]} over ranks {list(parameter.ranks)}, which keeps slices "
        "and sums their gradients by itself, and MoEClipStrategy would copy and sum them as whole parameters. Leave "
        "the wrapping out under this strategy, or train with Lightning's FSDPStrategy or ModelParallelStrategy."
    )


def _in_flat_units(module: nn.Module) -> Iterator[ShardedParameter]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody wraps a module without having imported it
    if fsdp is None:
        return
    experts = {f"{path}.{name}" for path, layer in spreadable_layers(module) for name in layer.expert_parameters()}
    experts = {name.replace(_WRAPPED, "") for name in experts}
    for path, unit in module.named_modules():
        handle = unit._handle if isinstance(unit, fsdp.FullyShardedDataParallel) else None
        if handle is None:
            continue
        ranks = tuple(dist.get_process_group_ranks(unit.process_group))
        prefix = f"{path}.{_WRAPPED}" if path else _WRAPPED
        for name, shape in zip(handle.flat_param._fqns, handle.flat_param._shapes, strict=True):
            whole = (prefix + name).replace(_WRAPPED, "")
            yield ShardedParameter(
                whole,
                "expert" if whole in experts else recognise_kind(module, whole, shape),
                "fsdp1",
                ranks,
                unit.mixed_precision.param_dtype,
                unit.sharding_strategy is fsdp.ShardingStrategy.NO_SHARD,
            )


def _in_dtensors(module: nn.Module) -> Iterator[ShardedParameter]:
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    held = {n: p for n, p in module.named_parameters() if isinstance(p, tensor.DTensor)}
    if not held:
        return
    roles, policies = read_roles(module), _policies(module)
    for name, parameter in held.items():
        yield ShardedParameter(
            name,
            roles[name].kind,
            "fsdp2" if id(parameter) in policies else "dtensor",
            tuple(parameter.device_mesh.mesh.flatten().tolist()),
            policies.get(id(parameter)),
            all(placement.is_replicate() for placement in parameter.placements),
        )


def _policies(module: nn.Module) -> dict[int, torch.dtype | None]:
    """Dtype in which ``fully_shard`` computes, by id of each parameter that it shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    units = [m for m in module.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]
    policies = {}
    for unit in units:
        state = unit._get_fsdp_state()
        # torch 2.13 has several groups where 2.11 had one
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for held in [] if group is None else group.fsdp_params:
                policies[id(held.sharded_param)] = group.mp_policy.param_dtype
    return policies
