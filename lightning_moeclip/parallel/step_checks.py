"""Checks of what a step is made of: accumulation, checkpointing, micro-batches that are computed again."""

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from lightning_moeclip.parallel import rules
from lightning_moeclip.parallel.checks import uses_batch_statistics
from lightning_moeclip.parallel.roles import ParamRole, spreadable_layers

__all__ = [
    "RecomputesMicroBatches",
    "check_equal_accumulation",
    "check_recomputed_batch_norm",
    "lone_pause",
    "reentrant_wrappers",
    "warn_of_accumulated_contrast",
    "warn_of_reentrant_checkpointing",
]

_SCALE_KIND = "logit_scale"


@runtime_checkable
class RecomputesMicroBatches(Protocol):
    """A module that runs the forward of its micro-batches twice, as cached accumulation does.

    Attributes:
        recomputes_micro_batches: whether it does, as it is set up.
    """

    recomputes_micro_batches: bool


def check_equal_accumulation(by_rank: Sequence[int]) -> None:
    """Refuse ranks that reduce their gradients after different numbers of micro-batches.

    Args:
        by_rank: ``accumulate_grad_batches`` of each rank, the same sequence on all ranks.

    Raises:
        ValueError: they differ.
    """
    if len({*by_rank}) > 1:
        told = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(by_rank))
        raise ValueError(
            rules.LONE_PAUSE.told(
                f"accumulate_grad_batches differs between ranks ({told}): some would reduce gradients while the others "
                "go on to the next micro-batch, and wait for ever. Write the same number, or the same "
                "GradientAccumulationScheduler, on every rank."
            )
        )


def lone_pause(told: str) -> str:
    """What is wrong where some ranks reduce gradients and others do not, and what to write.

    Args:
        told: which rank does what.
    """
    return rules.LONE_PAUSE.told(
        f"Some ranks reduce gradients that others keep to themselves ({told}). All ranks go into "
        "strategy.block_backward_sync() or toggle_model(sync_grad=False), change accumulate_grad_batches and call "
        "backward at the same points, or none does."
    )


def check_recomputed_batch_norm(module: nn.Module) -> None:
    """Refuse a BatchNorm under a module that runs the forward of its micro-batches twice.

    Raises:
        ValueError: there are both.
    """
    twice = [path for path, m in module.named_modules() if isinstance(m, RecomputesMicroBatches) and _does(m)]
    for path, layer in module.named_modules():
        if twice and uses_batch_statistics(layer):
            raise ValueError(
                rules.RECOMPUTED_BATCH_NORM.told(
                    f"{path} is a {type(layer).__name__} in training, and {twice[0] or type(module).__name__} runs the "
                    "forward of each micro-batch twice: it would normalise by micro-batch instead of by batch, and "
                    "count each in its running statistics twice. Use LayerNorm or GroupNorm, or freeze it with eval()."
                )
            )


def _does(module: RecomputesMicroBatches) -> bool:
    return bool(module.recomputes_micro_batches)


def warn_of_accumulated_contrast(roles: Mapping[str, ParamRole], accumulate_grad_batches: int) -> bool:
    """Warn that each micro-batch of a contrastive loss knows its own negatives alone.

    Args:
        roles: role by name of what is trained; a scale of the logits tells a contrastive loss.
        accumulate_grad_batches: micro-batches of a step.

    Returns:
        Whether there was something to warn of.
    """
    scales = [name for name, role in roles.items() if role.kind == _SCALE_KIND]
    if accumulate_grad_batches < 2 or not scales:
        return False
    rules.ACCUMULATED_CONTRAST.warn(
        f"accumulate_grad_batches={accumulate_grad_batches} with a contrastive loss ({scales[0]}): each of the "
        f"{accumulate_grad_batches} micro-batches is contrasted with itself alone, which is another loss than that of "
        "one batch of all their rows. For the negatives of the whole step, use larger batches or more ranks."
    )
    return True


def reentrant_wrappers(module: nn.Module) -> list[str]:
    """Paths of layers whose experts can be spread and that torch's ``checkpoint_wrapper`` runs again, reentrantly."""
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrapper is None:  # nobody wraps a module without having imported it
        return []
    around = [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, wrapper.CheckpointWrapper) and layer.checkpoint_impl is wrapper.CheckpointImpl.REENTRANT
    ]
    return [path for path, _ in spreadable_layers(module) if any(path.startswith(f"{p}." if p else "") for p in around)]


def warn_of_reentrant_checkpointing(where: str) -> None:
    """Warn that spread experts run again inside of a backward that has a graph of its own.

    Args:
        where: which layers, as the start of a sentence.
    """
    rules.REENTRANT.warn(
        f"{where} under reentrant activation checkpointing with experts spread over ranks: the numbers are those of "
        "one process, but no graph passes through the first forward. auxiliary_loss has no gradient there, and the "
        "layers are found again through the checkpoint alone where a training_step returns None. Write "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
    )
