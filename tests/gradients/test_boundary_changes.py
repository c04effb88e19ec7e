"""Changes in place around a boundary, and copies of modules with one."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor, nn

from lightning_moeclip.gradients.boundary import Region, attach
from tests.gradients.nested_net import (
    CHANGES,
    INNER,
    OUTER,
    WIDTH,
    InPlace,
    Net,
    assert_equal,
    batch,
    divided,
    gradients,
    with_regions,
)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("is_used_again", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_input_changed_in_place_inside_is_right_outside_too(change: str, is_used_again: bool, nested: bool) -> None:
    def run(layer: nn.Module, scale: float) -> list[Tensor]:
        layer.zero_grad()
        x = batch().requires_grad_()
        h = x * 1.5
        y = layer(h)
        loss = y.pow(2).sum()
        # h is now what the layer made of it
        (loss + (h + 0.3).pow(3).sum() if is_used_again else loss).backward()
        return [x.grad, *(p.grad / scale for p in layer.parameters() if p.grad is not None)]

    layer = InPlace(CHANGES[change])
    whole = nn.Sequential(layer) if nested else layer
    wanted = run(whole, 1.0)
    attach([layer], Region("layer", scale=OUTER))
    if nested:
        attach([whole], Region("whole", scale=INNER))
    for found, reference in zip(run(whole, OUTER * INNER if nested else OUTER), wanted, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-6)


def test_input_changed_in_place_is_right_where_three_regions_have_one_module_as_their_boundary() -> None:
    layer = InPlace(CHANGES["mul_"])
    before = nn.Linear(WIDTH, WIDTH)

    def gradients_of() -> list[Tensor]:
        h = before(batch()) * 1.0
        loss = (layer(h) + h).pow(2).mean()
        return list(torch.autograd.grad(loss, [*before.parameters(), *layer.parameters()]))

    wanted = gradients_of()
    for scale in (INNER, OUTER, 2.0):
        attach([layer], Region("layers", scale=scale))
    found = gradients_of()
    for gradient, true in zip(found[:2], wanted[:2], strict=True):
        assert torch.equal(gradient, true)
    for gradient, true in zip(found[2:], wanted[2:], strict=True):
        assert torch.equal(gradient / (INNER * OUTER * 2.0), true)


def test_view_changed_in_place_inside_is_refused() -> None:
    layer = InPlace(CHANGES["relu_"])
    attach([layer], Region("image.proj", scale=OUTER))
    tokens = batch().requires_grad_() * 1.5
    with pytest.raises(ValueError, match=r"'image.proj' changes its input in place.*inplace=False.*input.clone\(\)"):
        layer(tokens[:, :])


def test_output_changed_in_place_is_right() -> None:
    def run(layer: nn.Module) -> list[Tensor]:
        layer.zero_grad()
        x = batch().requires_grad_()
        y = layer(x)
        y += 1
        y.mul_(x.detach())
        y.pow(2).sum().backward()
        return [x.grad, layer.weight.grad]

    layer = nn.Linear(WIDTH, WIDTH)
    wanted = run(layer)
    attach([layer], Region("layer", scale=OUTER))
    found = run(layer)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1] / OUTER, wanted[1])


def test_changes_of_saved_tensors_are_still_caught() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
    attach([layer], Region("layer", scale=OUTER))
    y = layer(batch())
    y += 1  # sigmoid needs what it returned
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    h = batch().requires_grad_() * 1.5
    kept = h.pow(2)
    changing = InPlace(CHANGES["relu_"])
    attach([changing], Region("layer", scale=OUTER))
    y = changing(h)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y.sum() + kept.sum()).backward()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_module_have_true_gradients_and_may_become_regions_themselves(
    clone: Callable[[nn.Module], nn.Module],
) -> None:
    net = Net()
    wanted = gradients(net, batch())
    regions = with_regions(net)
    twin = clone(net)
    assert_equal(gradients(twin, batch()), wanted)
    (twin(batch()) * math.inf).backward()
    assert regions[0].events[:2].tolist() == [0, 0]
    regions_of_twin = with_regions(twin)
    assert_equal(divided(gradients(twin, batch()), regions_of_twin), wanted)
    assert_equal(divided(gradients(net, batch()), regions), wanted)
