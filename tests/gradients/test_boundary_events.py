"""What a boundary notes of cotangents that are not finite."""

import math

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import nn

from lightning_moeclip.gradients.boundary import Region, attach
from tests.gradients.nested_net import WIDTH, Net, batch, with_regions


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cotangent_that_is_not_finite_marks_incoming_of_every_region_it_enters(
    value: float, dtype: torch.dtype
) -> None:
    net = Net(calls=2)
    net.to(dtype)
    regions = with_regions(net)
    y = net.body(batch().to(dtype))
    cotangent = torch.zeros_like(y)
    cotangent[-1, -1] = value
    y.backward(cotangent)
    assert [region.events[:2].tolist() for region in regions] == [[1, 0], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cotangents_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(dtype)
    region = Region("layer")
    attach([layer], region)
    layer.weight.data.zero_()
    y = layer(torch.zeros(5, WIDTH, dtype=dtype, requires_grad=True))
    y.backward(torch.full_like(y, torch.finfo(dtype).max))
    assert region.events[:2].tolist() == [0, 0]


def spiked() -> tuple[nn.Module, tuple[Region, Region], Region, Region]:
    """before -> block(up, inner, down) -> after, with a region each and one around ``inner``."""
    net = Net()
    regions = with_regions(net)
    before, after = Region("first"), Region("last")
    attach([net.first], before)
    attach([net.last], after)
    return net, regions, before, after


def test_overflow_inside_marks_inside_there_and_incoming_before_it() -> None:
    net, (block, inner), before, after = spiked()
    block.scale.fill_(2.0**100)
    with torch.no_grad():
        net.block.down.weight.mul_(2.0**40)
    net.body(batch().requires_grad_()).sum().backward()
    assert after.events[:2].tolist() == [0, 0]
    assert block.events[:2].tolist() == [0, 1]
    assert inner.events[:2].tolist() == [1, 0]  # what entered it was infinite already
    assert before.events[:2].tolist() == [1, 0]


def test_overflow_of_a_nested_region_marks_inside_of_both() -> None:
    net, (block, inner), before, _ = spiked()
    inner.scale.fill_(2.0**127)
    (net(batch().requires_grad_()) * 2.0**20).backward()
    assert inner.events[:2].tolist() == [0, 1]
    assert block.events[:2].tolist() == [0, 1]  # it made the overflow from a finite cotangent, though in a part of it
    assert before.events[:2].tolist() == [1, 0]


def test_division_that_overflows_is_inside() -> None:
    layer = nn.Linear(WIDTH, WIDTH).half()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    region = Region("layer", scale=2.0**-10)
    attach([layer], region)
    x = batch().half().requires_grad_()
    y = layer(x)
    y.backward(torch.full_like(y, 2.0**14))
    assert x.grad.isinf().all()
    assert region.events[:2].tolist() == [0, 1]


def test_region_called_twice_is_judged_by_its_first_event() -> None:
    def events(first_is_bad: bool) -> list[float]:
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            layer.weight.fill_(2.0**100)
        region = Region("layer")
        attach([layer], region)
        y = layer(layer(batch().requires_grad_()))
        cotangent = torch.ones_like(y)
        if first_is_bad:
            cotangent[0, 0] = math.inf
        y.backward(cotangent)
        return region.events[:2].tolist()

    # 2^100 is finite, its product with 2^100 is not: made inside, and never mind that the call before gets it
    assert events(first_is_bad=False) == [0, 1]
    assert events(first_is_bad=True) == [1, 0]


def test_events_stay_until_their_owner_zeroes_them() -> None:
    net = Net()
    regions = with_regions(net)
    (net(batch()) * math.inf).backward()
    net(batch()).backward()
    assert regions[0].events[:2].tolist() == [1, 0]
    regions[0].events.zero_()
    net(batch()).backward()
    assert regions[0].events[:2].tolist() == [0, 0]


def test_empty_batches_are_finite() -> None:
    net = Net()
    regions = with_regions(net)
    net.body(batch()[:0].requires_grad_()).sum().backward()
    assert [region.events[:2].tolist() for region in regions] == [[0, 0], [0, 0]]
