"""Experts spread over ranks: every output and gradient is that of one process that holds all tokens."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip.modules import MoE, auxiliary_loss
from lightning_moeclip.parallel import ledger
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.testing import Rank, on_ranks

DIM, HIDDEN, EXPERTS = 6, 10, 8
ROWS = {1: [9], 2: [7, 4], 4: [5, 3, 0, 6]}


def build(**options: object) -> MoE:
    torch.manual_seed(1)
    return MoE(DIM, HIDDEN, EXPERTS, **options).double()  # type: ignore[arg-type]


def batch(world_size: int) -> tuple[Tensor, Tensor]:
    """Tokens of all ranks, and a cotangent for each."""
    torch.manual_seed(2)
    return torch.randn(2, sum(ROWS[world_size]), DIM, dtype=torch.float64).unbind()


def one_process(moe: MoE, world_size: int, *, balance: float = 0.0) -> dict[str, Tensor]:
    """Output and gradients of L = (1/W) sum over all tokens of <y, cotangent>, plus the auxiliary loss."""
    x, cotangent = batch(world_size)
    x.requires_grad_()
    y = moe(x)
    loss = (y * cotangent).sum() / world_size
    if balance:
        from lightning_moeclip.kernels.reference import load_balance_loss

        loss = loss + balance * load_balance_loss(x @ moe.router.weight.T, moe.top_k)
    loss.backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in moe.named_parameters() if p.grad is not None}}


def spread(moe: MoE, rank: Rank, ep: int, *, balance: float = 0.0) -> dict[str, Tensor]:
    """The same from many ranks, by the rule of gradients: (1/W) * sum over the replicas, whole experts put together."""
    world = rank.world_size
    mesh = Mesh.build(ep)
    x_all, cotangent_all = batch(world)
    x = x_all.split(ROWS[world])[rank.index].requires_grad_()
    if mesh.experts is not None:
        moe.shard_experts(mesh.experts)
        with mesh.experts.opened():
            y = moe(x)
            loss = (y * cotangent_all.split(ROWS[world])[rank.index]).sum()
            if balance:
                loss = loss + auxiliary_loss(moe, balance=balance)
            loss.backward()
    else:
        y = moe(x)
        loss = (y * cotangent_all.split(ROWS[world])[rank.index]).sum()
        if balance:
            loss = loss + auxiliary_loss(moe, balance=balance)
        loss.backward()
    found = {"y": gather_rows(y.detach(), world), "x": gather_rows(x.grad, world) / world}
    share = EXPERTS // ep
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        whole = torch.zeros(EXPERTS, *parameter.shape[1:], dtype=torch.float64)
        if name in moe.expert_parameters():
            first = (rank.index % ep) * share
            whole[first : first + share] = parameter.grad
        else:
            whole += parameter.grad
        dist.all_reduce(whole)
        found[name] = whole / world
    return found


def gather_rows(mine: Tensor | None, world_size: int) -> Tensor:
    assert mine is not None
    parts = [torch.empty(0) for _ in range(world_size)]
    dist.all_gather_object(parts, mine)
    return torch.cat(parts)


def assert_equal(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert found.keys() == truth.keys()
    norm = max(float(t.norm()) for name, t in truth.items() if name != "y")
    for name, expected in truth.items():
        error = float((found[name] - expected).norm()) / max(float(expected.norm()), 1e-6 * norm)
        assert error < 1e-10, f"{name}: {error}"


def compare(rank: Rank, ep: int, options: dict[str, object], balance: float, all_to_expert_0: bool) -> None:
    reference, moe = build(**options), build(**options)
    if all_to_expert_0:
        for layer in (reference, moe):
            with torch.no_grad():
                layer.router.weight.zero_()
    truth = one_process(reference, rank.world_size, balance=balance)
    found = spread(moe, rank, ep, balance=balance)
    assert_equal(found, truth)


CASES = [
    pytest.param({}, id="top2"),
    pytest.param({"top_k": 1}, id="top1"),
    pytest.param({"top_k": 3, "normalize_topk": False, "activation": "quick_gelu"}, id="top3-not-renormalised"),
]


@pytest.mark.parametrize("options", CASES)
@on_ranks(2)
def test_gradients_of_experts_on_2_ranks_equal_one_process(rank: Rank, options: dict[str, object]) -> None:
    for ep in (1, 2):
        compare(rank, ep, options, 0.3, False)


@pytest.mark.parametrize("options", CASES)
@on_ranks(4)
def test_gradients_of_experts_on_4_ranks_equal_one_process_also_with_an_empty_rank(
    rank: Rank, options: dict[str, object]
) -> None:
    for ep in (1, 2, 4):
        compare(rank, ep, options, 0.3, False)


@on_ranks(2)
def test_all_tokens_on_the_first_experts_leave_the_others_with_exact_zero_gradients(rank: Rank) -> None:
    """Equal logits go to experts of rank 0 or rank 1 alone: no hang, and no gradient that is None."""
    moe = build(top_k=1)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[0, 0] = 1e-3
    mesh = Mesh.build(2)
    assert mesh.experts is not None
    moe.shard_experts(mesh.experts)
    x = torch.rand(5, DIM, dtype=torch.float64) + 0.1
    with mesh.experts.opened():
        moe(x).sum().backward()
    assert moe.tokens_per_expert.tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    for weight in moe.expert_parameters().values():
        assert weight.grad is not None
        busy = [0] if rank.index == 0 else []
        for expert in range(EXPERTS // 2):
            assert bool(weight.grad[expert].any()) == (expert in busy)


@on_ranks(2)
def test_backward_communicates_on_every_rank_though_only_one_has_tokens_that_need_gradients(rank: Rank) -> None:
    mesh = Mesh.build(2)
    assert mesh.experts is not None
    moe = build()
    moe.shard_experts(mesh.experts)
    x = torch.randn(3 * rank.index, DIM, dtype=torch.float64, requires_grad=rank.index == 1)
    with mesh.experts.opened():
        moe(x).sum().backward()
    assert (x.grad is not None) == (rank.index == 1)


@on_ranks(2)
def test_ledger_holds_the_output_so_that_a_rank_without_a_loss_can_answer(rank: Rank) -> None:
    mesh = Mesh.build(2)
    assert mesh.experts is not None
    moe = build()
    moe.shard_experts(mesh.experts)
    x = torch.randn(4, DIM, dtype=torch.float64, requires_grad=True)
    with mesh.experts.opened(), ledger.recording() as page:
        y = moe(x)
        if rank.index == 0:
            y.sum().backward()
        else:
            torch.autograd.backward(page, [torch.zeros_like(output) for output in page])
    assert len(page) == 1
    assert x.grad is not None
    assert bool(x.grad.any()) == (rank.index == 0)
