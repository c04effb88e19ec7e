"""Experts spread over ranks: every output and gradient is that of one process that holds all tokens."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from lightning_moeclip.kernels.reference import load_balance_loss
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


def local_loss(moe: MoE, x: Tensor, cotangent: Tensor, captions: list[int]) -> tuple[Tensor, Tensor]:
    """<y, cotangent> of the image tower, and of a text tower that sends some of the rows through the same layer."""
    y = moe(x, tower="image")
    text = moe(x[captions], tower="text")
    return y, (y * cotangent).sum() + (text * cotangent[captions]).sum() * 0.5


def captions_of(rank: int) -> list[int]:
    """Rows of a rank that its text tower takes: fewer than those of the image tower, none on rank 1."""
    return [] if rank == 1 else [0, 2]


def one_process(moe: MoE, world_size: int, *, balance: float) -> dict[str, Tensor]:
    """Output and gradients of L = (1/W) sum over ranks of their loss, plus the auxiliary loss of all tokens."""
    x, cotangent = batch(world_size)
    x.requires_grad_()
    first = [sum(ROWS[world_size][:rank]) for rank in range(world_size)]
    captions = [at + row for rank, at in enumerate(first) for row in captions_of(rank) if ROWS[world_size][rank]]
    y, loss = local_loss(moe, x, cotangent, captions)
    towers = [load_balance_loss(part @ moe.router.weight.T, moe.top_k) for part in (x, x[captions])]
    (loss / world_size + balance * (towers[0] + towers[1]) / 2).backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in moe.named_parameters() if p.grad is not None}}


def spread(moe: MoE, rank: Rank, ep: int, *, balance: float) -> dict[str, Tensor]:
    """The same from many ranks, by the rule of gradients: (1/W) * sum over the replicas, whole experts put together."""
    world = rank.world_size
    mesh = Mesh.build(ep)
    x, cotangent = (part.split(ROWS[world])[rank.index].contiguous() for part in batch(world))
    x.requires_grad_()
    if mesh.experts is not None:
        moe.shard_experts(mesh.experts)
    with mesh.experts.opened() if mesh.experts is not None else nullcontext():
        y, loss = local_loss(moe, x, cotangent, captions_of(rank.index) if len(x) else [])
        (loss + auxiliary_loss(moe, balance=balance)).backward()
    assert x.grad is not None
    found = {"y": gather_rows(y.detach(), world), "x": gather_rows(x.grad, world) / world}
    share = EXPERTS // ep
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        whole = torch.zeros(EXPERTS, *parameter.shape[1:], dtype=torch.float64)
        first = (rank.index % ep) * share if name in moe.expert_parameters() else 0
        whole[first : first + len(parameter)] = parameter.grad
        dist.all_reduce(whole)
        found[name] = whole / world
    return found


def gather_rows(mine: Tensor, world_size: int) -> Tensor:
    parts = [torch.empty(0) for _ in range(world_size)]
    dist.all_gather_object(parts, mine)
    return torch.cat(parts)


def assert_equal(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert found.keys() == truth.keys()
    norm = max(float(t.norm()) for name, t in truth.items() if name != "y")
    for name, expected in truth.items():
        error = float((found[name] - expected).norm()) / max(float(expected.norm()), 1e-6 * norm)
        assert error < 1e-10, f"{name}: {error}"


def compare(rank: Rank, ep: int, options: dict[str, object]) -> None:
    truth = one_process(build(**options), rank.world_size, balance=0.3)
    assert_equal(spread(build(**options), rank, ep, balance=0.3), truth)


CASES = [
    pytest.param({}, id="top2"),
    pytest.param({"top_k": 1}, id="top1"),
    pytest.param({"top_k": 3, "normalize_topk": False, "activation": "quick_gelu"}, id="top3-not-renormalised"),
]


@pytest.mark.parametrize("options", CASES)
@on_ranks(2)
def test_a_layer_that_two_towers_share_has_on_2_ranks_the_gradients_of_one_process(
    rank: Rank, options: dict[str, object]
) -> None:
    for ep in (1, 2):
        compare(rank, ep, options)


@pytest.mark.parametrize("options", CASES)
@on_ranks(4)
def test_a_layer_that_two_towers_share_has_on_4_ranks_one_of_them_empty_the_gradients_of_one_process(
    rank: Rank, options: dict[str, object]
) -> None:
    for ep in (1, 2, 4):
        compare(rank, ep, options)


@on_ranks(2)
def test_all_tokens_on_the_first_experts_leave_the_others_with_exact_zero_gradients(rank: Rank) -> None:
    """No hang, and no gradient that is None, on the rank whose experts nobody asked either."""
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
