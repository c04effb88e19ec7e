"""Cotangents are a times the true ones inside a region and unchanged outside, whatever runs there."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor, nn

from lightning_moeclip.gradients.boundary import Region, attach
from tests.gradients.nested_net import (
    INNER,
    OUTER,
    WIDTH,
    Net,
    assert_equal,
    batch,
    divided,
    gradients,
    with_regions,
)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # reentrant in reentrant
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("outside", [None, False, True])
@pytest.mark.parametrize("inside", [None, False, True])
def test_nested_regions_are_bit_equal_under_any_checkpointing(
    inside: bool | None, outside: bool | None, calls: int
) -> None:
    net = Net(inside=inside, outside=outside, calls=calls)
    wanted = gradients(net, batch())
    regions = with_regions(net)
    found = gradients(net, batch())
    assert not torch.equal(found["block.up.weight"], wanted["block.up.weight"])
    assert_equal(divided(found, regions), wanted)
    assert [region.events[:2].tolist() for region in regions] == [[0, 0], [0, 0]]


def test_region_whose_input_needs_no_gradient_is_bit_equal() -> None:
    net = Net()
    x = batch()
    wanted = gradients(net, x)
    region = Region("first", scale=OUTER)
    attach([net.first], region)
    net.zero_grad()
    net(x).backward()
    assert torch.equal(net.first.weight.grad / OUTER, wanted["first.weight"])
    assert torch.equal(net.last.weight.grad, wanted["last.weight"])


def test_scale_changed_in_place_serves_the_next_backward() -> None:
    net = Net()
    wanted = gradients(net, batch())
    regions = with_regions(net)
    gradients(net, batch())
    regions[0].scale.mul_(2)
    assert_equal(divided(gradients(net, batch()), regions), wanted)


def test_first_derivatives_are_right_with_create_graph_and_second_ones_are_refused() -> None:
    net = Net()
    x = batch().requires_grad_()
    wanted = torch.autograd.grad(net(x), [x, net.block.up.weight])
    with_regions(net)
    found = torch.autograd.grad(net(x), [x, net.block.up.weight], create_graph=True)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1] / OUTER, wanted[1])
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found[0].sum().backward()


def test_what_needs_no_gradient_passes_untouched() -> None:
    class Returns(nn.Linear):
        def forward(self, *given: Tensor) -> list[Tensor]:
            return [super().forward(given[0]), *given]

    layer = Returns(WIDTH, WIDTH)
    attach([layer], Region("layer", scale=OUTER))
    x, index = batch(), torch.arange(3)
    y, *rest = layer(x, index)
    assert y.grad_fn is not None
    assert [a is b for a, b in zip(rest, [x, index], strict=True)] == [True, True]
    with torch.no_grad():
        x.requires_grad_()
        y, same = layer(x)
        assert y.grad_fn is None
        assert same is x
    assert layer.requires_grad_(False)(batch())[0].grad_fn is None


def test_list_that_the_module_fills_stays_the_callers() -> None:
    class Fills(nn.Linear):
        def forward(self, x: Tensor, seen: list[int], *, shapes: dict[str, Any]) -> Tensor:
            seen.append(len(x))
            shapes["x"] = x.shape
            return super().forward(x)

    layer = Fills(WIDTH, WIDTH)
    attach([layer], Region("layer"))
    seen: list[int] = []
    shapes: dict[str, Any] = {}
    layer(batch().requires_grad_(), seen, shapes=shapes)
    assert (seen, shapes) == ([5], {"x": (5, WIDTH)})


def test_one_tensor_given_twice_stays_one() -> None:
    class Same(nn.Linear):
        def forward(self, query: Tensor, key: Tensor, *, value: Tensor) -> tuple[Tensor, Tensor]:
            assert query is key is value
            y = super().forward(query)
            return y, y

    layer = Same(WIDTH, WIDTH)
    attach([layer], Region("layer", scale=OUTER))
    x = batch().requires_grad_()
    one, two = layer(x, x, value=x)
    assert one is two
    (one + two).sum().backward()
    torch.testing.assert_close(x.grad, 2 * layer.weight.detach().sum(0).expand(5, -1))


class Record:
    def __init__(self) -> None:
        self.outgoing: OrderedDict[int, Callable[[Tensor], Tensor]] = OrderedDict()

    def keep(self, tensor: Tensor) -> None:
        for leave in self.outgoing.values():
            tensor = leave(tensor)
        self.kept = tensor


class KeepsLogits(nn.Linear):
    """Keeps a tensor of its forward for a loss, as a MoE layer keeps its logits."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.routing_record = Record()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.routing_record.keep(y.tanh())
        return y


def test_tensor_kept_for_a_loss_leaves_all_its_regions() -> None:
    def loss(x: Tensor) -> Tensor:
        return net(x).pow(2).mean() + net[1][0].routing_record.kept.sum()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(KeepsLogits()))
    wanted = gradients(net, batch(), loss)
    inner, outer = Region("1.0", scale=INNER), Region("1", scale=OUTER)
    handles = attach([net[1][0]], inner)
    attach([net[1]], outer)
    found = gradients(net, batch(), loss)
    assert_equal({n: g / (OUTER * INNER if n.startswith("1.") else 1) for n, g in found.items()}, wanted)
    loss(batch()).mul(math.inf).backward()
    assert inner.events[:2].tolist() == outer.events[:2].tolist() == [1, 0]
    for handle in handles:
        handle.remove()
    found = gradients(net, batch(), loss)
    assert_equal({n: g / (OUTER if n.startswith("1.") else 1) for n, g in found.items()}, wanted)
    frozen = torch.ones(2)
    net[1][0].routing_record.keep(frozen)
    assert net[1][0].routing_record.kept is frozen


def test_removed_handles_leave_nothing() -> None:
    net = Net()
    wanted = gradients(net, batch())
    region = Region("block", scale=OUTER)
    for handle in attach([net.block], region):
        handle.remove()
    assert_equal(gradients(net, batch()), wanted)


def worst_error(net: nn.Module, found: dict[str, Tensor], divide: float) -> float:
    exact = gradients(copy.deepcopy(net).double(), batch().double())
    return max(float((found[name] / divide - exact[name]).norm() / exact[name].norm()) for name in exact)


@pytest.mark.parametrize("scale", [2.0**-3, 2.0**6])
def test_fp16_autocast_is_within_twice_plain_fp16(scale: float) -> None:
    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return net(x) * 2**8

    net = Net()
    plain = worst_error(net, gradients(net, batch(), loss), 2**8)
    assert 1e-5 < plain < 1e-2
    bare = copy.deepcopy(net)
    regions = with_regions(net, outer=scale)
    found = divided(gradients(net, batch(), loss), regions)
    assert worst_error(bare, found, 2**8) <= 2 * plain


def test_half_cotangents_are_scaled_in_float32() -> None:
    layer = nn.Linear(1, 1, bias=False).half()
    region = Region("layer", scale=2.0**17)  # no fp16 number, nor is its inverse a normal one
    attach([layer], region)
    x = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    y = layer(x)
    y.backward(torch.full_like(y, 2.0**-14))
    assert layer.weight.grad.item() == 8.0
    # 2^-14 w, rounded where it is stored: once inside, once outside
    assert x.grad.item() == ((layer.weight.detach() * 8.0).float() / 2**17).half().item()


def test_vanishing_cotangents_survive_inside() -> None:
    def zeros(scale: float) -> float:
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH).half()
        attach([layer], Region("layer", scale=scale))
        y = layer(batch().half())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).mul(2.0**-25).half())
        return float((layer.weight.grad == 0).float().mean())

    def zeros_of_a_vanishing_input() -> float:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).half()
        with torch.no_grad():
            layer[1].weight.mul_(2.0**-10)
        attach([layer], Region("layer", scale=2.0**12))
        y = layer(batch().half())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).mul(2.0**-14).half())
        return float((layer[0].weight.grad == 0).float().mean())

    assert zeros(1.0) > 0.1
    assert zeros_of_a_vanishing_input() == 0.0
