"""Tokens to experts and back: the copies that are sent, their exchange between ranks, and the weighted sum.

The only file of the layers that calls collectives. The exchange of counts waits for the device: the host has to know
how many rows to receive.

Shapes: T tokens, K experts per token, R rows (T * K unless a capacity drops some), D width, E experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    """Which token each row is a copy of, rows sorted by expert and within an expert by token.

    Attributes:
        token: [R], source token of a row; any for a blank row.
        slot: [R], place of a row among the T * K choices; any for a blank row.
        row: [T, K], row of a choice, the inverse of ``slot``; None when a capacity dropped some.
        blank: rows of zeros that make all experts' rows as many; None without.
        counts: [E], rows per expert with blank ones, int64.
        chosen: [E], choices per expert, int64.
        top_k: K.
    """

    token: Tensor
    slot: Tensor
    row: Tensor | None
    blank: Tensor | None
    counts: Tensor
    chosen: Tensor
    top_k: int


def count_experts(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs: [num_experts], int64, without waiting for the device as ``bincount`` does."""
    flat = chosen.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )


def plan_rows(chosen_TK: Tensor, num_experts: int, *, padding_max: float = 0.0) -> RowPlan:
    """Sort the choices by expert, all of them.

    Args:
        chosen_TK: expert ids.
        num_experts: E.
        padding_max: fill up to equal rows per expert where that makes at most so many times T * K rows; CPU only, since
            the host has to know the counts.
    """
    top_k = chosen_TK.shape[1]
    chosen_S = chosen_TK.reshape(-1)
    counts_E = count_experts(chosen_S, num_experts)
    slot_S = chosen_S.argsort(stable=True)
    row_S = torch.empty_like(slot_S)
    place_S = torch.arange(len(slot_S), device=slot_S.device)
    fullest = int(counts_E.max()) if padding_max and len(slot_S) else 0
    if not 0 < fullest * num_experts <= padding_max * len(slot_S):
        row_S[slot_S] = place_S
        return RowPlan(slot_S // top_k, slot_S, row_S.view(-1, top_k), None, counts_E, counts_E, top_k)
    place_S += ((torch.arange(num_experts) * fullest) - (counts_E.cumsum(0) - counts_E)).repeat_interleave(counts_E)
    row_S[slot_S] = place_S
    slot_R = torch.zeros(num_experts * fullest, dtype=torch.int64)
    slot_R[place_S] = slot_S
    is_blank_R = torch.ones(len(slot_R), dtype=torch.bool)
    is_blank_R[place_S] = False
    even_E = torch.full_like(counts_E, fullest)
    return RowPlan(
        slot_R // top_k, slot_R, row_S.view(-1, top_k), is_blank_R.nonzero().squeeze(1), even_E, counts_E, top_k
    )


def plan_within_capacity(chosen_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: int) -> RowPlan:
    """Sort the choices by expert, at most ``capacity`` each: the heaviest, the earlier token on ties."""
    top_k = chosen_TK.shape[1]
    chosen_S = chosen_TK.reshape(-1)
    counts_E = count_experts(chosen_S, num_experts)
    slot_R = _within_capacity(chosen_S, weights_TK.detach().reshape(-1), counts_E, capacity)
    return RowPlan(slot_R // top_k, slot_R, None, None, counts_E.clamp(max=capacity), counts_E, top_k)


def _within_capacity(chosen_S: Tensor, weights_S: Tensor, counts_E: Tensor, capacity: int) -> Tensor:
    heaviest_S = weights_S.argsort(stable=True, descending=True)
    ranked_S = heaviest_S[chosen_S[heaviest_S].argsort(stable=True)]
    first_E = counts_E.cumsum(0) - counts_E
    place_S = torch.arange(len(ranked_S), device=ranked_S.device) - first_E[chosen_S[ranked_S]]
    kept_S = torch.zeros_like(chosen_S, dtype=torch.bool)
    kept_S[ranked_S[place_S < capacity]] = True
    slot_S = chosen_S.argsort(stable=True)
    return slot_S[kept_S[slot_S]]


class _CopyTokens(torch.autograd.Function):
    """x[token_R]; the backward gathers a token's K rows and adds them in a fixed order, which index_add_ would not."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan, ctx.num_tokens = plan, x_TD.shape[0]
        return _blanked(x_TD.index_select(0, plan.token), plan)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _by_choice(grad_RD, ctx.plan, ctx.num_tokens).sum(1), None


def _blanked(rows_RD: Tensor, plan: RowPlan) -> Tensor:
    """Zeros in the blank rows; by filling, since zero times a NaN would spread it."""
    return rows_RD if plan.blank is None else rows_RD.index_fill_(0, plan.blank, 0.0)


def _by_choice(rows_RD: Tensor, plan: RowPlan, num_tokens: int) -> Tensor:
    """Rows in the order of the choices, [T, K, D]; zeros for those that were dropped."""
    width = rows_RD.shape[1]
    if plan.row is not None:
        return rows_RD.index_select(0, plan.row.view(-1)).view(num_tokens, plan.top_k, width)
    blank_SD = rows_RD.new_zeros(num_tokens * plan.top_k, width)
    return blank_SD.index_copy(0, plan.slot, rows_RD).view(num_tokens, plan.top_k, width)


def copy_tokens(x_TD: Tensor, plan: RowPlan) -> Tensor:
    """One copy of each token per chosen expert, sorted by expert: [R, D]."""
    return _CopyTokens.apply(x_TD, plan)


class _Combine(torch.autograd.Function):
    """y_t = sum over k of weights[t, k] * rows[row of (t, k)], in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(rows_RD, weights_TK)
        rows_TKD = _by_choice(rows_RD, plan, len(weights_TK))
        return torch.bmm(weights_TK.unsqueeze(1), rows_TKD).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        plan: RowPlan = ctx.plan
        rows_RD, weights_TK = ctx.saved_tensors
        grad_RD = _blanked(grad_TD.index_select(0, plan.token), plan)
        grad_weights_TK = grad_rows_RD = None
        if ctx.needs_input_grad[1]:
            grad_weight_R = torch.linalg.vecdot(rows_RD, grad_RD)
            grad_weights_TK = _by_choice(grad_weight_R.unsqueeze(1), plan, len(weights_TK)).squeeze(2)
        if ctx.needs_input_grad[0]:
            weight_R1 = weights_TK.reshape(-1).index_select(0, plan.slot).unsqueeze(1)
            grad_rows_RD = grad_RD * weight_R1 if torch.is_grad_enabled() else grad_RD.mul_(weight_R1)
        return grad_rows_RD, grad_weights_TK, None


def combine(rows_RD: Tensor, weights_TK: Tensor, plan: RowPlan) -> Tensor:
    """Weighted sum of the experts' outputs for each token: [T, D], in the dtype of the rows."""
    return _Combine.apply(rows_RD, weights_TK.to(rows_RD.dtype), plan)


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
