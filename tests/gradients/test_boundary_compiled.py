"""Boundaries under torch.compile: one graph, the same bits, scales and events that follow."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor, nn

from lightning_moeclip.gradients.boundary import Region, attach, forget_compiled
from tests.gradients.nested_net import (
    CHANGES,
    INNER,
    OUTER,
    InPlace,
    Net,
    assert_equal,
    batch,
    divided,
    gradients,
    with_regions,
)

# of dynamo itself, while it traces
COMPILES = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def compiles(test: Any) -> Any:
    for mark in COMPILES:
        test = mark(test)
    return test


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(net: nn.Module, backend: str) -> tuple[Callable[[Tensor], Tensor], Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(net, backend=counter, fullgraph=True), counter


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])  # the second: inductor's passes
def test_compiled_in_one_graph_is_bit_equal_and_follows_the_scale_without_recompiling(backend: str) -> None:
    net = Net(calls=2)
    forward, counter = compiled(net, backend)
    wanted = gradients(net, batch(), forward)
    regions = with_regions(net)  # after a first compiled call: its graph must not be used again
    for _ in range(2):
        assert_equal(divided(gradients(net, batch(), forward), regions), wanted)
        regions[0].scale.mul_(2)
        regions[1].scale.div_(8)
    assert counter.frame_count == 2  # one graph without the regions, one with them
    check_events_of_compiled(net, forward, regions)
    assert counter.frame_count == 2


def check_events_of_compiled(
    net: nn.Module, forward: Callable[[Tensor], Tensor], regions: tuple[Region, Region]
) -> None:
    assert [region.events[:2].tolist() for region in regions] == [[0, 0], [0, 0]]
    for value in (math.inf, math.nan):
        (forward(batch().requires_grad_()) * value).backward()
        assert [region.events[:2].tolist() for region in regions] == [[1, 0], [1, 0]]
        for region in regions:
            region.events.zero_()
    regions[0].scale.fill_(2.0**100)
    with torch.no_grad():
        net.block.down.weight.mul_(2.0**40)
    forward(batch().requires_grad_()).backward()
    assert regions[0].events[:2].tolist() == [0, 1]


@compiles
def test_removed_hooks_are_gone_from_compiled_graphs_too() -> None:
    net = Net()
    forward, _ = compiled(net, "aot_eager")
    wanted = gradients(net, batch(), forward)
    handles = attach([net.block], Region("block", scale=OUTER))
    assert not torch.equal(gradients(net, batch(), forward)["block.up.weight"], wanted["block.up.weight"])
    for handle in handles:
        handle.remove()
    forget_compiled()
    assert_equal(gradients(net, batch(), forward), wanted)


@compiles
@pytest.mark.parametrize("how", ["in place", "wrapped", "wrapped inside"])
def test_region_that_is_compiled_itself_is_bit_equal(how: str) -> None:
    net = Net()
    wanted = gradients(net, batch())
    block = net.block
    if how == "in place":
        block.compile(backend="aot_eager")
    else:
        net.block = torch.compile(block, backend="aot_eager")
    regions = Region("block", scale=OUTER), Region("block.inner", scale=INNER)
    attach([block.inner], regions[1])
    attach([net.block if how == "wrapped" else block], regions[0])
    found = {name.replace("_orig_mod.", ""): g for name, g in gradients(net, batch()).items()}
    assert_equal(divided(found, regions), wanted)


@compiles
def test_input_changed_in_place_is_refused_while_compiling() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = InPlace(CHANGES["mul_"])

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.5
            return self.layer(h).sum() + h.pow(3).sum()

    net = Skip()
    attach([net.layer], Region("layer", scale=OUTER))
    with pytest.raises(Exception, match="is a view and is being modified inplace"):
        torch.compile(net, backend="aot_eager", fullgraph=True)(batch().requires_grad_())
