"""Copies of tokens, their order, and the exchange between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moeclip.modules.dispatch import (
    RowPlan,
    combine,
    copy_tokens,
    plan_rows,
    plan_within_capacity,
    receive,
    send_back,
)
from lightning_moeclip.modules.router import Routing
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.testing import Rank, on_ranks

EXPERTS, DIM = 5, 3


def routing_of(chosen: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
    counts = torch.bincount(chosen.reshape(-1), minlength=num_experts)
    return Routing(torch.empty(0), weights, chosen, counts, counts.cumsum(0, dtype=torch.int32))


def routings(num_tokens: int, top_k: int) -> Routing:
    torch.manual_seed(num_tokens)
    chosen = torch.rand(num_tokens, EXPERTS).topk(top_k, dim=-1).indices
    return routing_of(chosen, torch.rand(num_tokens, top_k), EXPERTS)


def plans(routing: Routing) -> list[RowPlan]:
    return [plan_rows(routing), plan_rows(routing, padding_max=10.0), plan_within_capacity(routing, 2)]


@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (6, 2), (9, 5)])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_are_sorted_by_expert_and_combine_is_the_inverse(num_tokens: int, top_k: int, which: int) -> None:
    routing = routings(num_tokens, top_k)
    chosen, plan = routing.chosen, plans(routing)[which]
    x = torch.randn(num_tokens, DIM, dtype=torch.float64)
    rows = copy_tokens(x, plan)
    expert = torch.arange(EXPERTS).repeat_interleave(plan.counts)
    assert len(rows) == len(expert)
    assert plan.chosen.tolist() == [int((chosen == e).sum()) for e in range(EXPERTS)]
    assert plan.ends.tolist() == plan.counts.cumsum(0).tolist()
    is_blank = plan.slot < 0
    assert torch.equal(chosen.view(-1)[plan.slot[~is_blank]], expert[~is_blank])
    assert torch.equal(rows[~is_blank], x[plan.slot[~is_blank] // top_k])
    assert not rows[is_blank].any()
    served = torch.zeros(num_tokens * top_k).index_fill_(0, plan.slot[~is_blank], 1.0).view(num_tokens, top_k)
    back = combine(rows, torch.ones(num_tokens, top_k, dtype=torch.float64), plan)
    assert torch.allclose(back, x * served.sum(1, keepdim=True), rtol=1e-15, atol=0)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_copies_and_weighted_sum_have_exact_first_and_second_derivatives(which: int) -> None:
    plan = plans(routings(4, 2))[which]
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: combine(copy_tokens(x, plan).square(), w, plan), (x, weights))
    torch.autograd.gradgradcheck(lambda x, w: combine(copy_tokens(x, plan).square(), w, plan), (x, weights))


def test_blank_rows_keep_a_nan_token_from_other_experts() -> None:
    chosen = torch.tensor([[0], [0], [1]])
    plan = plan_rows(routing_of(chosen, torch.ones(3, 1), 2), padding_max=2.0)
    x = torch.tensor([[float("nan")], [1.0], [2.0]], requires_grad=True)
    rows = copy_tokens(x, plan)
    assert rows[2:].tolist() == [[2.0], [0.0]]
    (grad,) = torch.autograd.grad(combine(rows, torch.ones(3, 1), plan).sum(), rows)
    assert grad.tolist() == [[1.0], [1.0], [1.0], [0.0]]


def test_capacity_keeps_the_heaviest_and_the_earlier_token_on_ties() -> None:
    chosen = torch.tensor([[0], [0], [0], [1], [0]])
    weights = torch.tensor([[0.3], [0.9], [0.5], [0.1], [0.5]])
    plan = plan_within_capacity(routing_of(chosen, weights, 3), 2)
    assert plan.slot.tolist() == [1, 2, 3]
    assert plan.row.tolist() == [[-1], [0], [1], [2], [-1]]
    assert (plan.counts.tolist(), plan.chosen.tolist()) == ([2, 1, 0], [4, 1, 0])


def test_a_capacity_asks_once_how_many_rows_are_left() -> None:
    """A mask as an index has as many elements as the device says: the host waits for it."""
    masked: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.nonzero):
                found, *_ = [*args[1], None] if len(args) > 1 else [None]
                if found is None or found.dtype is torch.bool:
                    masked.append(str(func))
            return func(*args, **kwargs or {})

    routing = routings(9, 2)
    with Watch():
        plan_within_capacity(routing, 2)
    assert masked == ["aten.index.Tensor"]


@on_ranks(4)
def test_rows_arrive_sorted_by_expert_and_return_in_their_order_with_summed_cotangents(rank: Rank) -> None:
    mesh = Mesh.build(4)
    axis = mesh.experts
    assert axis is not None
    counts = torch.tensor([[0, 3, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 4]]).repeat_interleave(2, 1)
    mine = counts[rank.index]
    expert = torch.arange(8).repeat_interleave(mine)
    # row = (its source, its expert)
    rows = torch.stack([torch.full_like(expert, rank.index), expert], 1).double().requires_grad_()
    received = receive(rows, mine, axis, requires_grad=True)
    experts = [2 * rank.index, 2 * rank.index + 1]
    truth = [[s, e] for e in experts for s in range(4) for _ in range(int(counts[s, e]))]
    assert received.rows.tolist() == truth
    assert received.counts == [int(counts[:, e].sum()) for e in experts]
    back = send_back(received.rows * 3, received, axis)
    assert torch.equal(back, 3 * rows)
    back.backward((rank.index + 1) * torch.ones_like(back))
    assert torch.equal(rows.grad, torch.full_like(rows, 3 * (rank.index + 1)))
    dist.barrier()
