"""Gradients that carry a scale of their own are divided by it while they are packed, in every way they can come."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.corridor import CorridorSettings, GradientCorridor
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.state.canonical import SpreadExperts, spread_names
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
X = torch.randn(3, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Scaled(torch.autograd.Function):
    """Multiplies the cotangent alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent * ctx.scale, None


class Net(nn.Module):
    """Dense, experts, head; gradients of the last two are too large by their scales, unless these are 1."""

    def __init__(self, *scales: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = TinyExperts(DIM, 4)
        self.head = nn.Linear(DIM, DIM).double()
        self.scales = scales or (torch.ones(()), torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        expert, head = self.scales
        hidden = Scaled.apply(self.experts(Scaled.apply(self.dense(x), 1 / expert)), expert)
        return Scaled.apply(self.head(Scaled.apply(hidden, 1 / head)), head).square().mean()

    def divisors(self) -> dict[str, Tensor]:
        return {"experts.weight": self.scales[0], "head.weight": self.scales[1], "head.bias": self.scales[1]}

    def grads(self) -> dict[str, Tensor | None]:
        return {n: None if p.grad is None else p.grad.detach().clone() for n, p in self.named_parameters()}


Run = Callable[[Net, Any, Callable[[Tensor], Tensor]], None]


def once(net: Net, corridor: Any, own: Callable[[Tensor], Tensor]) -> None:
    """One backward, and the scales changed before the next step."""
    backward(net, corridor, own(X[0]))
    net.zero_grad()
    change(net)
    backward(net, corridor, own(X[1]))


def accumulated(net: Net, corridor: Any, own: Callable[[Tensor], Tensor]) -> None:
    """Two micro-batches without communication, then one with it."""
    for x in X[:2]:
        pause(corridor, True)
        net(own(x)).backward()
    pause(corridor, False)
    backward(net, corridor, own(X[2]))


def reopened(net: Net, corridor: Any, own: Callable[[Tensor], Tensor]) -> None:
    """Further backwards on top of reduced gradients, the second paused first, with other scales."""
    backward(net, corridor, own(X[0]))
    change(net)
    pause(corridor, True)
    net(own(X[1])).backward()
    pause(corridor, False)
    backward(net, corridor, own(X[2]))
    backward(net, corridor, own(X[0]))


def replaced(net: Net, corridor: Any, own: Callable[[Tensor], Tensor]) -> None:
    """Backwards on top of gradients that the user has put there, and one in which the head takes no part."""
    backward(net, corridor, own(X[0]))
    for p in net.parameters():
        p.grad = 2 * p.grad
    backward(net, corridor, own(X[1]))
    change(net)
    begin(corridor)
    Scaled.apply(net.experts(Scaled.apply(net.dense(own(X[2])), 1 / net.scales[0])), net.scales[0]).mean().backward()
    end(corridor)


def twice(net: Net, corridor: Any, own: Callable[[Tensor], Tensor]) -> None:
    """Two losses in one reduction: the gradients of the second come after the buckets have left."""
    backward(net, corridor, own(X[0]))
    net.zero_grad()
    begin(corridor)
    net(own(X[1])).backward()
    net(own(X[2])).backward()
    end(corridor)


def before_launch(net: Net, corridor: Any, own: Callable[[Tensor], Tensor]) -> None:
    """Two losses in the first reduction, whose buckets wait for its end: gradients are packed on top of others."""
    begin(corridor)
    net(own(X[1])).backward()
    net(own(X[2])).backward()
    end(corridor)


def pause(corridor: Any, is_paused: bool) -> None:
    if corridor is not None:
        corridor.reducer.is_paused = is_paused


def begin(corridor: Any) -> None:
    if corridor is not None:
        corridor.begin()


def end(corridor: Any) -> None:
    if corridor is not None:
        corridor.finish()


def backward(net: Net, corridor: Any, x: Tensor) -> None:
    begin(corridor)
    net(x).backward()
    end(corridor)


def change(net: Net) -> None:
    net.scales[0].mul_(0.125)
    net.scales[1].mul_(4.0)


RUNS: tuple[Run, ...] = (once, accumulated, reopened, replaced, twice, before_launch)


def check(rank: Rank, ep: int) -> None:
    for run in RUNS:
        alone = Net(torch.tensor(1.0), torch.tensor(1.0))
        alone.divisors = dict
        _in_one_process(run, alone)
        net = Net(torch.tensor(2.0**10), torch.tensor(2.0**-6))
        mesh = Mesh.build(ep)
        if mesh.experts is not None:
            SpreadExperts(mesh.experts).spread(net)
        spread = frozenset(spread_names(net))
        corridor = GradientCorridor(net, list, mesh, CorridorSettings(), spread=spread, divisors=net.divisors)
        run(net, corridor, lambda x: x.chunk(rank.world_size)[rank.index])
        corridor.detach()
        true = alone.grads()
        if mesh.experts is not None:
            true["experts.weight"] = true["experts.weight"].chunk(ep)[mesh.experts.rank]
        assert worst_error(net.grads(), true) < TOLERANCE, (run.__name__, ep)


def _in_one_process(run: Run, net: Net) -> None:
    net.scales[0].mul_ = net.scales[1].mul_ = lambda _: None  # type: ignore[method-assign]
    run(net, None, lambda x: x)


@on_ranks(1)
def test_scaled_gradients_equal_one_process_on_1_rank(rank: Rank) -> None:
    check(rank, 1)


@on_ranks(2)
def test_scaled_gradients_equal_one_process_on_2_ranks(rank: Rank) -> None:
    for ep in (1, 2):
        check(rank, ep)


@on_ranks(4)
def test_scaled_gradients_equal_one_process_on_4_ranks(rank: Rank) -> None:
    check(rank, 2)


@on_ranks(1)
def test_without_divisors_one_process_reduces_nothing(rank: Rank) -> None:
    net = Net()
    assert GradientCorridor(net, list, Mesh.build(), CorridorSettings()).reducer is None


@pytest.mark.parametrize(("divisor", "arrived", "divided"), [(2.0**30, 2.0**15, 2.0**-15), (2.0**-20, 2.0**-18, 4.0)])
def test_16_bit_gradient_is_divided_in_float32(divisor: float, arrived: float, divided: float) -> None:
    net = nn.Linear(2, 2, bias=False).half()
    scale = torch.tensor(divisor)
    corridor = GradientCorridor(net, list, Mesh.build(), CorridorSettings(), divisors=lambda: {"weight": scale})
    corridor.begin()
    (net.weight * torch.full((2, 2), arrived, dtype=torch.float16)).sum().backward()
    corridor.finish()
    assert torch.equal(net.weight.grad, torch.full((2, 2), divided, dtype=torch.float16))
    corridor.detach()
