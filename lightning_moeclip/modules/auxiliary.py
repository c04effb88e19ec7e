"""Losses that keep a router healthy, from the token counts of all ranks.

Shapes: T tokens, E experts.
"""

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from lightning_moeclip.modules.dispatch import sum_over_ranks, union_over_ranks, world_size
from lightning_moeclip.modules.record import RoutingCall, RoutingRecord
from lightning_moeclip.modules.router import Router

__all__ = ["auxiliary_loss"]


def auxiliary_loss(module: nn.Module, *, balance: float = 0.01, z: float = 0.0) -> Tensor:
    """Balance and z-loss of the MoE layers in a module, to be added to the loss in ``training_step``.

    Each layer gives balance * E * sum_e f_e P_e (Switch Transformer, Fedus et al. 2021, equations 4-6) plus z times the
    mean of logsumexp(logits)^2 (ST-MoE, Zoph et al. 2022, equation 5); layers are summed. Both are formed per tower and
    averaged over the towers that had tokens on any rank: one tower can starve experts while the total looks balanced
    (LIMoE, Mustafa et al. 2022). f_e counts the tokens of all ranks, before a capacity drops any; P_e on this rank is
    W / N times the sum over its own tokens, so that the mean over W ranks is the value of one process, however the
    tokens are spread.

    Call it once per forward, on every rank. It reads what the layers recorded since the last call and clears it. One
    all-reduce serves all layers and towers; its backward communicates nothing. The first time that any rank sees a
    tower that is called neither None, "image" nor "text", all ranks exchange names as well.

    Args:
        module: holds the layers.
        balance: coefficient of the balance loss.
        z: coefficient of the z-loss.

    Returns:
        0-d, float32 at least.

    Raises:
        ValueError: the module holds no MoE layer.
    """
    layers = _layers(module)
    device, dtype = layers[0].router.weight.device, layers[0].router.weight.dtype
    total = torch.zeros((), dtype=dtype, device=device)
    for layer, (logits_by_tower, counts_SE) in zip(layers, _read(layers), strict=True):
        total = total + _layer_loss(logits_by_tower, counts_SE, layer.router.top_k, balance, z).to(device, dtype)
    return total


class _Layer(Protocol):
    routing_record: RoutingRecord
    router: Router


def _layers(module: nn.Module) -> list[_Layer]:
    found = [layer for layer in module.modules() if isinstance(getattr(layer, "routing_record", None), RoutingRecord)]
    if not found:
        raise ValueError(
            f"auxiliary_loss({type(module).__name__}) found no MoE layer in it. "
            "Pass the module that holds them, for example the LightningModule itself."
        )
    return cast(list[_Layer], found)


def _read(layers: list[_Layer]) -> list[tuple[list[list[Tensor]], Tensor]]:
    """Take the records: for each layer the logits of each agreed tower, and their global counts [towers, E]."""
    taken = [
        layer.routing_record.take(needs_grad=torch.is_grad_enabled() and layer.router.weight.requires_grad)
        for layer in layers
    ]
    counts = _sum_counts(layers, taken)
    if counts is None:
        names = [(at, call.tower) for at, calls in enumerate(taken) for call in calls]
        known = [(at, tower) for at, layer in enumerate(layers) for tower in layer.routing_record.towers]
        for at, tower in union_over_ranks([name for name in names if name not in known]):
            layers[at].routing_record.towers.append(tower)
        counts = _sum_counts(layers, taken)
        assert counts is not None, "all ranks know all names now"
    by_tower = [
        [[call.logits for call in calls if call.tower == tower] for tower in layer.routing_record.towers]
        for layer, calls in zip(layers, taken, strict=True)
    ]
    return list(zip(by_tower, counts, strict=True))


def _sum_counts(layers: list[_Layer], taken: list[list[RoutingCall]]) -> list[Tensor] | None:
    """Choices per agreed tower and expert over all ranks; None when some rank has a tower that is not agreed yet.

    Its shape follows from what all ranks have agreed on, never from what this rank saw.
    """
    device = layers[0].router.weight.device
    tables, num_unknown = [], 0
    for layer, calls in zip(layers, taken, strict=True):
        towers = layer.routing_record.towers
        table_SE = torch.zeros(len(towers), len(layer.router.weight), dtype=torch.int64, device=device)
        for call in calls:
            if call.tower in towers:
                table_SE[towers.index(call.tower)] += call.counts.to(device)
            else:
                num_unknown += 1
        tables.append(table_SE)
    flat = torch.cat([*(table.view(-1) for table in tables), torch.tensor([num_unknown], device=device)])
    # the host waits here for the sum of a few integers: it decides what all ranks do next
    summed = sum_over_ranks(flat)
    if summed[-1].item() > 0:
        return None
    parts = summed[:-1].split([table.numel() for table in tables])
    return [part.view_as(table) for part, table in zip(parts, tables, strict=True)]


def _layer_loss(logits_by_tower: list[list[Tensor]], counts_SE: Tensor, top_k: int, balance: float, z: float) -> Tensor:
    """Mean over the towers with tokens of one layer's losses, this rank's part."""
    num_choices_S = counts_SE.sum(1)
    has_tokens_S = num_choices_S > 0
    num_towers = has_tokens_S.sum().clamp(min=1)
    total = counts_SE.new_zeros((), dtype=torch.float32)
    for logits, counts_E, num_choices in zip(logits_by_tower, counts_SE, num_choices_S, strict=True):
        if not logits:
            continue
        logits_TE = torch.cat(logits)
        dtype, num_experts = logits_TE.dtype, logits_TE.shape[1]
        share_E = counts_E.to(dtype) / num_choices.clamp(min=1)
        value = balance * num_experts * (share_E * logits_TE.softmax(-1).sum(0)).sum()
        if z:
            value = value + z * logits_TE.logsumexp(-1).square().sum()
        # W / N, with N tokens of all ranks
        total = total + value * (world_size() * top_k) / num_choices.clamp(min=1)
    return total / num_towers
