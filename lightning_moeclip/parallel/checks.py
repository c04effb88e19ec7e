"""Checks of the strategy's arguments, of the model and of its optimizers; each says what to write instead."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_moeclip.parallel import rules
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.mesh import ExpertAxis
from lightning_moeclip.parallel.roles import ParamRole, spreadable_layers

__all__ = [
    "check_at_least_one",
    "check_no_foreign_slices",
    "check_one_optimizer_each",
    "check_same_on_all_ranks",
    "check_spreadable",
    "check_strided_gradients",
    "dtype_named",
    "refuse_ddp_arguments",
    "uses_batch_statistics",
    "warn_of_batch_norm",
    "warn_of_optimizer_only",
    "warn_of_scale_decay",
]

_DDP_ARGUMENTS = {
    "find_unused_parameters": "a parameter without a gradient is found in every step: leave it out",
    "gradient_as_bucket_view": "gradients always view the buckets: leave it out",
    "static_graph": "graphs may change from step to step: leave it out",
    "bucket_cap_mb": "write bucket_size_mb=... instead",
    "broadcast_buffers": "buffers are broadcast at start, before validation and before saving: leave it out",
    "ddp_comm_hook": "write gradient_dtype=torch.bfloat16 to compress the reduction",
    "ddp_comm_state": "there is no communication hook: leave it out",
    "ddp_comm_wrapper": "write gradient_dtype=torch.bfloat16 to compress the reduction",
    "model_averaging_period": "every step is synchronised: use Lightning's WeightAveraging callback for averages",
    "process_group": "groups are made from expert_parallel_size: leave it out",
}


def refuse_ddp_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse keyword arguments that only torch's DistributedDataParallel knows.

    Raises:
        TypeError: there is one, or one that nobody knows.
    """
    for name, value in arguments.items():
        advice = _DDP_ARGUMENTS.get(name, "no such argument: see help(MoEClipStrategy)")
        raise TypeError(
            rules.DDP_ARGUMENT.told(
                f"MoEClipStrategy({name}={value!r}): gradients do not pass through torch's DDP; {advice}."
            )
        )


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of a ``gradient_dtype`` that may be a name.

    Raises:
        ValueError: torch has no such dtype.
    """
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            rules.UNKNOWN_DTYPE.told(
                f"gradient_dtype={dtype!r} is not a dtype of torch. Write 'bfloat16' or 'float32', or None."
            )
        )
    return found


def check_at_least_one(expert_parallel_size: int) -> None:
    """Refuse a number of ranks that is none.

    Raises:
        ValueError: it is below 1.
    """
    if expert_parallel_size < 1:
        raise ValueError(
            rules.NO_RANKS_FOR_EXPERTS.told(
                f"expert_parallel_size={expert_parallel_size} must be at least 1. The default 1 keeps all experts on "
                "every rank."
            )
        )


def check_same_on_all_ranks(lines: Sequence[str], *, what: str) -> None:
    """Compare a description over ranks; every rank of the default group must call this.

    Raises:
        RuntimeError: on every rank, naming the first rank and line that differ from rank 0.
    """
    told = gather_objects(list(lines))
    for rank, other in enumerate(told):
        if other == told[0]:
            continue
        length = max(len(other), len(told[0]))
        padded = [[*lines_of, *["nothing"] * (length - len(lines_of))] for lines_of in (told[0], other)]
        index = next(i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b)
        raise RuntimeError(
            rules.RANKS_DIFFER.told(
                f"{what} differs between ranks, first at entry {index}: rank 0 has {padded[0][index]!r}, "
                f"rank {rank} has {padded[1][index]!r}. Every rank must build the same model and "
                "optimizers, in the same order."
            )
        )


def check_one_optimizer_each(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Refuse a parameter that two optimizers would step.

    Args:
        optimizers: all of the run.
        names: name by id of the Parameter.

    Raises:
        ValueError: two optimizers hold the same parameter.
    """
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                first = owner.setdefault(id(parameter), index)
                if first != index:
                    raise ValueError(
                        rules.TWO_OPTIMIZERS.told(
                            f"{names.get(id(parameter), 'a parameter')} is in optimizer {first} and in optimizer "
                            f"{index}. Each would step it with the same gradient: give it to one of them."
                        )
                    )


def check_strided_gradients(module: nn.Module) -> None:
    """Refuse layers whose gradients are sparse, and sparse parameters.

    Raises:
        ValueError: the module has an ``nn.Embedding(sparse=True)`` or a sparse parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.layout != torch.strided:
            raise ValueError(
                rules.SPARSE.told(
                    f"{name} is a parameter of {parameter.layout}. Parameters are sent, summed and compared element by "
                    "element. Write register_buffer(...) where it is not trained, or train its values as a dense one."
                )
            )
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise ValueError(
                rules.SPARSE.told(
                    f"{path} has sparse=True. Gradients are summed over ranks in flat buffers, which hold every row. "
                    "Write sparse=False."
                )
            )


def check_spreadable(module: nn.Module, expert_parallel_size: int) -> None:
    """Refuse experts that cannot be shared out, or that would leave something stale behind.

    Raises:
        ValueError: the number of experts is no multiple, or an expert has a gradient already.
    """
    for path, layer in spreadable_layers(module):
        if layer.num_experts % expert_parallel_size:
            fits = math.gcd(layer.num_experts, expert_parallel_size)
            raise ValueError(
                rules.UNEVEN_EXPERTS.told(
                    f"{path}: num_experts={layer.num_experts} cannot be spread over "
                    f"expert_parallel_size={expert_parallel_size}. Use a multiple of {expert_parallel_size}, or "
                    f"MoEClipStrategy(expert_parallel_size={fits})."
                )
            )
        for name, parameter in layer.expert_parameters().items():
            if layer.expert_axis is None and parameter.grad is not None:
                raise ValueError(
                    rules.STALE_GRADIENT.told(
                        f"{path}.{name} has a gradient from before fit, of experts that other ranks will hold. "
                        "Write module.zero_grad() before trainer.fit(module)."
                    )
                )


def check_no_foreign_slices(module: nn.Module, axis: ExpertAxis | None) -> None:
    """Refuse experts that the strategy of an earlier run has left as slices.

    Args:
        module: the user's module.
        axis: ranks that share out experts in this run.

    Raises:
        RuntimeError: a layer is spread over other ranks.
    """
    for path, layer in spreadable_layers(module):
        if layer.expert_axis is not None and layer.expert_axis is not axis:
            raise RuntimeError(
                rules.FOREIGN_SLICES.told(
                    f"{path} holds {layer.num_experts // layer.expert_axis.size} of its {layer.num_experts} experts: a "
                    "run under another strategy object failed or was interrupted before it could gather them. Go on "
                    "with that Trainer (trainer.fit(module) again), or make the module anew, from a checkpoint."
                )
            )


def uses_batch_statistics(layer: nn.Module) -> bool:
    """Whether it is a batch norm that normalises with the rows of a batch, and not with what it has learned."""
    is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    return is_norm and (layer.training or not layer.track_running_stats)


def warn_of_batch_norm(module: nn.Module) -> None:
    """Warn that statistics of a batch norm are those of one rank's rows."""
    for path, layer in module.named_modules():
        if uses_batch_statistics(layer) and not isinstance(layer, nn.SyncBatchNorm):
            rules.BATCH_NORM.warn(
                f"{path} is a BatchNorm: in training it normalises with the rows of its own rank, which is not what "
                "one process does. Write Trainer(sync_batchnorm=True)."
            )
            return


def warn_of_scale_decay(
    optimizers: Iterable[Optimizer], names: Mapping[int, str], roles: Mapping[str, ParamRole], undecayed: frozenset[int]
) -> None:
    """Warn that weight decay pulls the scale or the bias of logits of a user's own module towards 0.

    Args:
        optimizers: all of the run.
        names: name by id of the Parameter.
        roles: role by name.
        undecayed: ids of parameters that their own module keeps decay away from.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "")
                is_scale = name in roles and roles[name].kind == "logit_scale"
                if is_scale and group.get("weight_decay") and id(parameter) not in undecayed:
                    rules.SCALE_DECAY.warn(
                        f"{name} has weight_decay={group['weight_decay']}, which pulls it towards 0, whatever the data "
                        "say: a log of the scale to a scale of 1. Put it into a parameter group with weight_decay=0."
                    )


def warn_of_optimizer_only(names: Sequence[str]) -> None:
    """Warn of parameters that an optimizer steps and the module does not have.

    Args:
        names: of these, at least one.
    """
    rules.OPTIMIZER_ONLY.warn(
        f"{len(names)} parameter(s) are in an optimizer and not in the LightningModule ({', '.join(names)}). "
        "They are reduced over ranks and saved for ckpt_path=..., but load_from_checkpoint will not see them: "
        "make them attributes of the module."
    )
