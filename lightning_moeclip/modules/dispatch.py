"""Tokens to experts and back: the copies that are sent, their exchange between ranks, and the weighted sum.

The only file of the layers that calls collectives. Two places wait for the device: the exchange of counts, since the
host has to know how many rows to receive, and a capacity, since it has to know how many rows are left.

Shapes: T tokens, K experts per token, R rows (T * K unless a capacity drops some), D width, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip.kernels.permute import permute, sort_by_expert, unpermute
from lightning_moeclip.modules.router import Routing
from lightning_moeclip.parallel.mesh import ExpertAxis

__all__ = [
    "Received",
    "RowPlan",
    "combine",
    "copy_tokens",
    "plan_rows",
    "plan_within_capacity",
    "receive",
    "send_back",
    "sum_outputs",
    "sum_over_ranks",
    "union_over_ranks",
    "world_size",
]


@dataclass(frozen=True)
class RowPlan:
    """Which choice each row serves, rows sorted by expert and within an expert by token.

    Attributes:
        slot: [R], place of a row among the T * K choices; -1 for a blank row, which makes all experts' rows as many.
        row: [T, K], row of a choice, the inverse of ``slot``; -1 for a choice that a capacity dropped.
        counts: [E], rows per expert with blank ones, int64.
        ends: [E], the cumulative sum of ``counts``, int32.
        chosen: [E], choices per expert, int64.
        has_blanks: whether some rows are blank.
        has_drops: whether some choices were dropped.
    """

    slot: Tensor
    row: Tensor
    counts: Tensor
    ends: Tensor
    chosen: Tensor
    has_blanks: bool = False
    has_drops: bool = False


def plan_rows(routing: Routing, *, padding_max: float = 0.0) -> RowPlan:
    """Sort the choices by expert, all of them.

    Args:
        routing: the choices.
        padding_max: fill up to equal rows per expert where that makes at most so many times T * K rows; CPU only, since
            the host has to know the counts.
    """
    chosen_TK, counts_E, ends_E = routing.chosen, routing.counts, routing.ends
    slot_S, row_TK = sort_by_expert(chosen_TK, ends_E)
    num_experts = len(counts_E)
    fullest = int(counts_E.max()) if padding_max and len(slot_S) else 0
    if not 0 < fullest * num_experts <= padding_max * len(slot_S):
        return RowPlan(slot_S, row_TK, counts_E, ends_E, counts_E)
    even_ends_E = torch.arange(fullest, fullest * num_experts + 1, fullest, dtype=torch.int32)
    row_TK += ((even_ends_E - fullest) - (ends_E - counts_E))[chosen_TK]
    slot_R = slot_S.new_full((num_experts * fullest,), -1).scatter_(0, row_TK.view(-1), torch.arange(len(slot_S)))
    return RowPlan(slot_R, row_TK, torch.full_like(counts_E, fullest), even_ends_E, counts_E, has_blanks=True)


def plan_within_capacity(routing: Routing, capacity: int) -> RowPlan:
    """Sort the choices by expert, at most ``capacity`` each: the heaviest, the earlier token on ties."""
    slot_R = _within_capacity(routing, capacity)
    row_S = torch.full_like(routing.chosen, -1).view(-1)
    row_S[slot_R] = torch.arange(len(slot_R), device=slot_R.device)
    counts_E = routing.counts.clamp(max=capacity)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    return RowPlan(slot_R, row_S.view(routing.chosen.shape), counts_E, ends_E, routing.counts, has_drops=True)


def _within_capacity(routing: Routing, capacity: int) -> Tensor:
    chosen_S = routing.chosen.reshape(-1)
    heaviest_S = routing.weights.detach().reshape(-1).argsort(stable=True, descending=True)
    place_S, _ = sort_by_expert(chosen_S[heaviest_S].unsqueeze(1), routing.ends)
    ranked_S = heaviest_S[place_S]
    first_E = routing.ends - routing.counts
    place_S = torch.arange(len(ranked_S), device=ranked_S.device) - first_E[chosen_S[ranked_S]]
    # not by a mask as an index, which waits for the device
    kept_S = torch.zeros_like(chosen_S, dtype=torch.bool).scatter_(0, ranked_S, place_S < capacity)
    slot_S, _ = sort_by_expert(routing.chosen, routing.ends)
    return slot_S[kept_S[slot_S]]


def copy_tokens(x_TD: Tensor, plan: RowPlan) -> Tensor:
    """One copy of each token per chosen expert, sorted by expert: [R, D]."""
    return permute(x_TD, plan.slot, plan.row, has_blanks=plan.has_blanks, has_drops=plan.has_drops)


def combine(rows_RD: Tensor, weights_TK: Tensor, plan: RowPlan) -> Tensor:
    """Weighted sum of the experts' outputs for each token: [T, D], in the dtype of the rows."""
    return unpermute(rows_RD, weights_TK, plan.slot, plan.row, has_blanks=plan.has_blanks, has_drops=plan.has_drops)


class _Exchange(torch.autograd.Function):
    """Uneven all-to-all of rows; the backward sends cotangents the other way, so what was sent twice is summed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.how = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.how
        if torch.is_grad_enabled():
            return _Exchange.apply(grad, grad.new_empty(0), received, sent, group), None, None, None, None
        return _all_to_all(grad, received, sent, group), None, None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.how = order, inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.how
        return _Permute.apply(grad, inverse, order), None, None


@dataclass(frozen=True)
class Received:
    """Rows that reached this rank's experts, sorted by expert, and the way back.

    Attributes:
        rows: [rows received, D].
        counts: rows per local expert, on the host.
        order: place among the rows as they arrived (by source rank, then expert) of each row.
        inverse: the inverse of ``order``.
        sent: rows that this rank sent to each rank.
        received: rows that came from each rank.
        anchor: empty tensor that requires grad wherever the layer does: every rank runs every backward exchange.
    """

    rows: Tensor
    counts: list[int]
    order: Tensor
    inverse: Tensor
    sent: list[int]
    received: list[int]
    anchor: Tensor


def receive(rows_RD: Tensor, counts_E: Tensor, axis: ExpertAxis, *, requires_grad: bool) -> Received:
    """Send each row to the rank that holds its expert; always two exchanges, of counts and of rows."""
    counts_WE = torch.empty_like(counts_E)
    dist.all_to_all_single(counts_WE, counts_E, group=axis.group)
    by_source = counts_WE.view(axis.size, -1)
    # one wait for the device for both
    table = torch.stack([counts_E.view(axis.size, -1), by_source]).tolist()
    sent, received = ([sum(row) for row in side] for side in table)
    local = torch.arange(by_source.shape[1], device=counts_E.device).repeat(axis.size)
    order = local.repeat_interleave(counts_WE, output_size=sum(received)).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    anchor = rows_RD.new_empty(0, requires_grad=requires_grad and torch.is_grad_enabled())
    arrived_RD = _Exchange.apply(rows_RD, anchor, sent, received, axis.group)
    counts = [sum(column) for column in zip(*table[1], strict=True)]
    return Received(_Permute.apply(arrived_RD, order, inverse), counts, order, inverse, sent, received, anchor)


def send_back(rows_RD: Tensor, received: Received, axis: ExpertAxis) -> Tensor:
    """The exact inverse of ``receive`` for the experts' outputs."""
    ordered_RD = _Permute.apply(rows_RD, received.inverse, received.order)
    return _Exchange.apply(ordered_RD, received.anchor, received.received, received.sent, axis.group)


def world_size() -> int:
    """Ranks that take part in the batch: W, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over all ranks, no gradient; a copy where there is one process."""
    total = values.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def sum_outputs(rows_RD: Tensor, plan: RowPlan) -> tuple[Tensor, Tensor]:
    """Sum of each expert's outputs and their number, over the tokens of all ranks: [E, D] and [E]."""
    dtype = torch.promote_types(rows_RD.dtype, torch.float32)
    expert_R = torch.arange(len(plan.counts), device=rows_RD.device).repeat_interleave(
        plan.counts, output_size=len(rows_RD)
    )
    # a product with 0 and 1 adds in a fixed order, which index_add_ on a GPU does not
    member_ER = (torch.arange(len(plan.counts), device=rows_RD.device).unsqueeze(1) == expert_R).to(dtype)
    served_E = torch.minimum(plan.chosen, plan.counts)  # fewer with a capacity, and blank rows add zeros
    sums_ED = member_ER @ rows_RD.detach().to(dtype)
    both = sum_over_ranks(torch.cat([sums_ED, served_E.to(dtype).unsqueeze(1)], dim=1))
    return both[:, :-1], both[:, -1]


def union_over_ranks(names: list[tuple[int, str | None]]) -> list[tuple[int, str | None]]:
    """All (layer, tower) that any rank gave, in one order on every rank."""
    gathered: list[list[tuple[int, str | None]]] = [names]
    if world_size() > 1:
        gathered = [[] for _ in range(world_size())]
        dist.all_gather_object(gathered, names)
    return sorted({name for part in gathered for name in part}, key=lambda name: (name[0], name[1] or ""))
