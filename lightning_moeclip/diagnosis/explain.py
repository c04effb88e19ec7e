"""``explain``: who would reduce which gradients of a module, for any number of ranks, without any of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_moeclip.diagnosis.configured import Configured, configured_optimizers
from lightning_moeclip.diagnosis.stock import StockParameter, known_strategies, rule_for
from lightning_moeclip.gradients.corridor import CorridorSettings, optimizer_only_parameters
from lightning_moeclip.parallel import checks
from lightning_moeclip.parallel.explanation import Explanation, explain_plan, explanation_of
from lightning_moeclip.parallel.fates import FROZEN, Fate, fates_of_strays, role_outside
from lightning_moeclip.parallel.interop import check_expert_lists, listed_names, tagged_parameters
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import PlannedParameter, build_plan, plan_parameter
from lightning_moeclip.parallel.regions import region_names
from lightning_moeclip.parallel.roles import ParamRole, Towers, read_roles, spreadable_layers
from lightning_moeclip.parallel.strays import stray_tensors

__all__ = ["explain", "has_own"]


def explain(
    module: nn.Module,
    *,
    world_size: int = 8,
    expert_parallel_size: int = 1,
    towers: Towers | None = None,
    strategy: str = "moeclip",
    ranks_per_node: int | None = None,
    bucket_size_mb: float = 25.0,
    gradient_dtype: torch.dtype | str | None = None,
    loss_scaling: Literal["unified", "local"] = "unified",
    regions: Sequence[str] | None = None,
) -> Explanation:
    """Say what becomes of the gradient of every parameter; neither a GPU nor a process group is needed.

    The module stays as it is, and so do the random number generators. A LightningModule is asked for its optimizers.

    Args:
        module: the user's, whole; it may be on any device, also "meta".
        world_size: number of ranks.
        expert_parallel_size: ranks that share out the experts; divides the number of ranks and of experts.
        towers: module paths by tower; None recognises known layouts.
        strategy: "moeclip", or the name of one of Lightning's: what it would leave unreduced or average wrongly.
        ranks_per_node: to tell links between nodes from those within; None for one node.
        bucket_size_mb: as in ``MoEClipStrategy``.
        gradient_dtype: as in ``MoEClipStrategy``.
        loss_scaling: as in ``MoEClipPrecision``.
        regions: as in ``MoEClipPrecision``.

    Returns:
        Rows that print as a table; ``.unreduced`` and ``.unsound`` name what is wrong, ``.unknown`` what nobody can
        tell.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: a setting that would fail when a run starts, with the same message; or a parameter without a shape.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"explain({type(module).__name__}): it takes an nn.Module, such as your LightningModule.")
    _check_shapes(module)
    family = known_strategies().get(strategy)
    if family is None:
        raise ValueError(f"strategy={strategy!r} cannot be explained. Use one of {', '.join(known_strategies())}.")
    if ranks_per_node is not None and ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node} must be at least 1. Write the number of GPUs of a node.")
    mesh = Mesh.imagined(world_size, expert_parallel_size)
    settings = CorridorSettings(towers, bucket_size_mb, checks.dtype_named(gradient_dtype))
    checks.check_no_foreign_slices(module, None)
    local = region_names(module, regions, towers=towers) if loss_scaling == "local" else {}
    with configured_optimizers(module, world_size=world_size) as made:
        notes = [*made.notes, *_unbuilt(module)]
        if family == "moeclip":
            return _explain_ours(module, made, mesh, settings, local, ranks_per_node, notes)
        notes += _assumptions(module, strategy, family, expert_parallel_size)
        fates = list(_stock_fates(module, made.optimizers, mesh, towers, family))
        return explanation_of(fates, mesh, strategy=strategy, ranks_per_node=ranks_per_node, notes=notes)


def _check_shapes(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet, since its layer is a lazy one that has not seen a batch. Run one forward in "
                "the factory, or before explain(), such as module(batch); or write the layer with its sizes."
            )


def _explain_ours(
    module: nn.Module,
    made: Configured,
    mesh: Mesh,
    settings: CorridorSettings,
    regions: Mapping[str, str],
    ranks_per_node: int | None,
    notes: Sequence[str],
) -> Explanation:
    checks.check_strided_gradients(module)
    if mesh.expert_parallel_size > 1:
        checks.check_spreadable(module, mesh.expert_parallel_size)
    checks.check_one_optimizer_each(made.optimizers, {id(p): name for name, p in module.named_parameters()})
    check_expert_lists(module, mesh)
    outside, listed = optimizer_only_parameters(module, made.optimizers), listed_names(module)
    roles = _roles(module, settings.towers, outside)
    shares = _spread_experts(module) if mesh.expert_parallel_size > 1 else frozenset()
    parameters = {
        name: _imagined(parameter, mesh.expert_parallel_size if id(parameter) in shares else 1)
        for name, parameter in _everything(module, outside)
    }
    spread = frozenset(name for name, p in _everything(module, outside) if id(p) in shares)
    plan = build_plan(
        {name: parameter for name, parameter in parameters.items() if parameter.requires_grad},
        roles,
        mesh,
        spread=spread,
        listed=listed,
        optimizer_only=frozenset(outside),
        bucket_size_mb=settings.bucket_size_mb,
    )
    everything = [
        plan_parameter(n, p, roles[n], is_spread=n in spread, is_in_module=n not in outside, is_listed=n in listed)
        for n, p in parameters.items()
    ]
    return explain_plan(
        plan,
        everything,
        mesh,
        strays=stray_tensors(module),
        held={id(parameter): name for name, parameter in outside.items()},
        regions=regions,
        wire_dtype=settings.gradient_dtype,
        ranks_per_node=ranks_per_node,
        notes=notes,
        error=made.error,
    )


def _roles(module: nn.Module, towers: Towers | None, outside: Mapping[str, nn.Parameter]) -> dict[str, ParamRole]:
    return read_roles(module, towers) | {name: role_outside(parameter) for name, parameter in outside.items()}


def _everything(module: nn.Module, outside: Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [*module.named_parameters(), *outside.items()]


def _spread_experts(module: nn.Module) -> frozenset[int]:
    """Ids of the parameters of which a rank would keep a slice."""
    layers = [layer for _, layer in spreadable_layers(module)]
    return frozenset(id(parameter) for layer in layers for parameter in layer.expert_parameters().values())


def _imagined(parameter: nn.Parameter, num_shares: int) -> nn.Parameter:
    """What a rank would hold of a parameter, without memory."""
    shape = list(parameter.shape)
    if num_shares > 1:
        shape[0] //= num_shares
    held = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(held, requires_grad=parameter.requires_grad)


def _stock_fates(
    module: nn.Module, optimizers: Sequence[Optimizer], mesh: Mesh, towers: Towers | None, family: str
) -> Iterator[Fate]:
    outside = optimizer_only_parameters(module, optimizers)
    roles = _roles(module, towers, outside)
    alone = _experts_called_alone(module, roles)
    ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    different = _different_on_ranks(module)
    has_dtensors = any(_is_dtensor(parameter) for parameter in module.parameters())
    for name, parameter in _everything(module, outside):
        seen = StockParameter(
            role=roles[name],
            num_dims=parameter.ndim,
            is_in_module=name not in outside,
            is_called_alone=id(parameter) in alone,
            differs_by_rank=name in different,
            is_ignored_by_ddp=name in ignored,
            is_left_plain=has_dtensors and not _is_dtensor(parameter),
        )
        planned = plan_parameter(name, parameter, roles[name], is_spread=False, is_in_module=seen.is_in_module)
        yield _stock_fate(planned, seen, mesh, family, is_trained=parameter.requires_grad)
    held = {id(parameter) for parameter in outside.values()}
    lost = {path: tensor for path, tensor in stray_tensors(module).items() if id(tensor) not in held}
    yield from fates_of_strays(lost)  # an optimizer that held them would change nothing


def _stock_fate(planned: PlannedParameter, seen: StockParameter, mesh: Mesh, family: str, *, is_trained: bool) -> Fate:
    everybody = mesh.replica_sets("dp")
    if not is_trained:
        return Fate(planned, FROZEN, everybody, None, region=None, num_passes=0)
    if mesh.world_size == 1:
        return Fate(planned, "none: one rank", everybody, 1, num_passes=0)
    rule = rule_for(family, seen)
    if rule.axis == "edp":
        planned = PlannedParameter(
            planned.name, planned.role, planned.shape, planned.dtype, "edp", is_in_module=planned.is_in_module
        )
    return Fate(
        planned,
        rule.operation,
        () if rule.axis is None else mesh.replica_sets(rule.axis),
        None if rule.axis is None else mesh.divisor,
        num_passes=rule.num_passes,
        is_reduced=rule.is_reduced,
        is_sound=rule.is_sound,
        is_conditional=rule.is_conditional,
        why=rule.why,
    )


def _experts_called_alone(module: nn.Module, roles: Mapping[str, ParamRole]) -> frozenset[int]:
    """Ids of the parameters of experts in lists: each is a module that is called only when it has tokens."""
    kinds = {id(parameter): roles[name].kind for name, parameter in module.named_parameters()}
    found: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict)) and len(layer) > 1:
            held = {id(parameter) for parameter in layer.parameters()}
            if held and all(kinds[key] == "expert" for key in held):
                found |= held
    return frozenset(found)


def _different_on_ranks(module: nn.Module) -> frozenset[str]:
    """Names of the parameters of which each rank has another, by DeepSpeed's layout or tags."""
    try:
        return listed_names(module)
    except ValueError:  # tags that do not say over how many ranks, which the stock strategies do not ask
        tagged = tagged_parameters(module)
        return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in tagged)


def _is_dtensor(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")


def has_own(module: nn.Module, hook: str) -> bool:
    """Whether a module has a hook of Lightning's that is not Lightning's own."""
    method = getattr(type(module), hook, None)
    return method is not None and method.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")


def _unbuilt(module: nn.Module) -> Iterable[str]:
    if has_own(module, "configure_model"):
        yield "configure_model() makes parts of the module: they are shown where it was called before explain()."


def _assumptions(module: nn.Module, strategy: str, family: str, expert_parallel_size: int) -> Iterator[str]:
    if expert_parallel_size > 1 and not _different_on_ranks(module):
        yield (
            f"expert_parallel_size={expert_parallel_size} spreads experts under MoEClipStrategy alone: under "
            f"{strategy} every rank holds all of them. Give experts that your own code spreads the attribute "
            "allreduce = False, as DeepSpeed does, to have them told apart."
        )
    if family == "ddp":
        yield (
            "Which parameters a loss uses only a step can tell: one that no loss uses, or not on every rank, makes DDP "
            "fail or wait in the next step. python -m lightning_moeclip verify --strategy ddp takes such steps."
        )
    if family == "model_parallel":
        yield (
            "ModelParallelStrategy shards what configure_model() shards, and Lightning refuses it for a module that "
            "has none. Taken for granted is fully_shard over the whole module, on a mesh of all ranks."
        )
    if family == "fsdp":
        yield "Taken for granted is one FSDP unit. An expert with a unit of its own waits for ranks without its tokens."
