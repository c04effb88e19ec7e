"""Cotangents are a times the true ones inside a region and unchanged outside, whatever runs there."""

import copy
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.gradients.boundary import Region, attach, forget_compiled

OUTER, INNER = 2.0**7, 2.0**-5
WIDTH = 8


class Block(nn.Module):
    """Keyword input, dict output, a region of its own inside, perhaps recomputed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x).tanh()).tanh())

    def forward(self, *, x: Tensor, extra: Any = None) -> dict[str, Any]:
        h = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return {"h": (h, [h * 2]), "extra": extra}


class Net(nn.Module):
    """Linear, Block (the region), linear; the Block perhaps recomputed with what is before it."""

    def __init__(self, *, inside: bool | None = None, outside: bool | None = None, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block(inside)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.outside, self.calls = outside, calls

    def body(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.calls):
            one, (two,) = self.block(x=h)["h"]
            h = one + two.sin()
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) if self.outside is None else checkpoint(self.body, x, use_reentrant=self.outside)
        return self.last(h).float().pow(2).mean()


def batch() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def with_regions(net: nn.Module, *, outer: float = OUTER, inner: float = INNER) -> tuple[Region, Region]:
    regions = Region("block", scale=outer), Region("block.inner", scale=inner)
    attach([net.block.inner], regions[1])
    attach([net.block], regions[0])
    return regions


def gradients(net: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    net.zero_grad()
    x = x.clone().requires_grad_()
    (net if forward is None else forward)(x).backward()
    return {"x": x.grad} | {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def divided(found: dict[str, Tensor], regions: tuple[Region, Region]) -> dict[str, Tensor]:
    outer, inner = (region.scale for region in regions)
    factors = dict.fromkeys(found, 1.0)
    factors |= {name: outer for name in found if name.startswith("block.")}
    factors |= {name: outer * inner for name in found if name.startswith("block.inner.")}
    return {name: gradient / factors[name] for name, gradient in found.items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not wrong, f"not bit-equal: {wrong}"


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
    assert [region.events.tolist() for region in regions] == [[0, 0], [0, 0]]


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
    assert inner.events.tolist() == outer.events.tolist() == [1, 0]
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


# --- numbers in 16 bits


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


# --- events


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
    assert [region.events.tolist() for region in regions] == [[1, 0], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cotangents_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    layer = nn.Linear(WIDTH, WIDTH).to(dtype)
    region = Region("layer")
    attach([layer], region)
    layer.weight.data.zero_()
    y = layer(torch.zeros(5, WIDTH, dtype=dtype, requires_grad=True))
    y.backward(torch.full_like(y, torch.finfo(dtype).max))
    assert region.events.tolist() == [0, 0]


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
    assert after.events.tolist() == [0, 0]
    assert block.events.tolist() == [0, 1]
    assert inner.events.tolist() == [1, 0]  # what entered it was infinite already
    assert before.events.tolist() == [1, 0]


def test_overflow_of_a_nested_region_marks_inside_of_both() -> None:
    net, (block, inner), before, _ = spiked()
    inner.scale.fill_(2.0**127)
    (net(batch().requires_grad_()) * 2.0**20).backward()
    assert inner.events.tolist() == [0, 1]
    assert block.events.tolist() == [0, 1]  # it made the overflow from a finite cotangent, though in a part of it
    assert before.events.tolist() == [1, 0]


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
    assert region.events.tolist() == [0, 1]


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
        return region.events.tolist()

    # 2^100 is finite, its product with 2^100 is not: made inside, and never mind that the call before gets it
    assert events(first_is_bad=False) == [0, 1]
    assert events(first_is_bad=True) == [1, 0]


def test_events_stay_until_their_owner_zeroes_them() -> None:
    net = Net()
    regions = with_regions(net)
    (net(batch()) * math.inf).backward()
    net(batch()).backward()
    assert regions[0].events.tolist() == [1, 0]
    regions[0].events.zero_()
    net(batch()).backward()
    assert regions[0].events.tolist() == [0, 0]


def test_empty_batches_are_finite() -> None:
    net = Net()
    regions = with_regions(net)
    net.body(batch()[:0].requires_grad_()).sum().backward()
    assert [region.events.tolist() for region in regions] == [[0, 0], [0, 0]]


# --- changes in place


class InPlace(nn.Module):
    """Changes its input in place by a weight of its own, then goes on with it."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.change(x, self.weight))


CHANGES = {
    "relu_": lambda x, w: functional.relu(x, inplace=True),
    "sigmoid_": lambda x, w: x.sigmoid_(),
    "mul_": lambda x, w: x.mul_(w),
    "mul_ of a view": lambda x, w: x.view(-1, WIDTH).mul_(w),
}


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


# --- copies and pickles


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
    assert regions[0].events.tolist() == [0, 0]
    regions_of_twin = with_regions(twin)
    assert_equal(divided(gradients(twin, batch()), regions_of_twin), wanted)
    assert_equal(divided(gradients(net, batch()), regions), wanted)


# --- torch.compile

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
    assert [region.events.tolist() for region in regions] == [[0, 0], [0, 0]]
    for value in (math.inf, math.nan):
        (forward(batch().requires_grad_()) * value).backward()
        assert [region.events.tolist() for region in regions] == [[1, 0], [1, 0]]
        for region in regions:
            region.events.zero_()
    regions[0].scale.fill_(2.0**100)
    with torch.no_grad():
        net.block.down.weight.mul_(2.0**40)
    forward(batch().requires_grad_()).backward()
    assert regions[0].events.tolist() == [0, 1]


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
