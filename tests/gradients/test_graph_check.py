"""What enters or leaves a region past its boundary is found in the graph of the loss."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.gradients.boundary import Region, attach
from lightning_moeclip.gradients.graph_check import find_leaks
from lightning_moeclip.parallel.regions import resolve_regions

WIDTH = 4


@dataclass
class Unknown:
    """No pytree."""

    h: Tensor


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.extra: Tensor | None = None
        self.kept: Tensor | None = None
        self.wraps = False

    def forward(self, x: Tensor) -> Any:
        self.kept = x.relu()
        h = self.inner(self.kept)
        if self.extra is not None:
            h = h + self.extra
        return Unknown(self.out(h)) if self.wraps else self.out(h)


class Net(nn.Module):
    def __init__(self, how: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.head = Head()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, self.stem(x)).sum()


def leaks(net: nn.Module, paths: list[str], loss: Callable[[], Tensor]) -> list[str]:
    specs = resolve_regions(net, paths)
    regions = {spec.name: Region(spec.name, scale=2.0) for spec in specs}
    owners: dict[int, tuple[Region, ...]] = {}
    for spec in specs:  # the innermost first
        attach(spec.modules, regions[spec.name])
        for parameter in spec.parameters:
            owners.setdefault(parameter, tuple(regions[name] for name in (*spec.ancestors, spec.name)))
    return find_leaks(loss(), owners, {id(p): name for name, p in net.named_parameters()})


def leaks_of(how: Callable[[Net, Tensor], Tensor], paths: list[str]) -> list[str]:
    net = Net(how)
    return leaks(net, paths, lambda: net(torch.ones(2, WIDTH)))


def with_extra(net: Net, h: Tensor) -> Tensor:
    net.head.extra = h.tanh()
    return net.head(h)


def with_kept(net: Net, h: Tensor) -> Tensor:
    y = net.head(h)
    assert net.head.kept is not None
    return y + net.head.kept


def wrapped(net: Net, h: Tensor) -> Tensor:
    net.head.wraps = True
    return net.head(h).h


CLOSED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "called": lambda net, h: net.head(h),
    "called with a keyword": lambda net, h: net.head(x=h),
    "called twice": lambda net, h: net.head(net.head(h)) + h,
    "recomputed": lambda net, h: checkpoint(net.head, h, use_reentrant=False),
    "recomputed by reentrant checkpointing": lambda net, h: checkpoint(net.head, h, use_reentrant=True),
    "changes its input in place": lambda net, h: net.head(h.mul_(2)) + h,
    "not called": lambda net, h: h,
}


@pytest.mark.parametrize("paths", [["head"], ["head", "head.inner"], ["stem", "head.inner"], []])
@pytest.mark.parametrize("how", CLOSED)
def test_closed_regions_have_no_leaks(how: str, paths: list[str]) -> None:
    assert leaks_of(CLOSED[how], paths) == []


PAST = "used past the output of the region 'head'. Call the module itself, neither its forward nor a function of its"
LEAKS: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "function of a weight": (
        lambda net, h: net.head(functional.linear(h, net.head.out.weight)),
        f"head.out.weight: {PAST}",
    ),
    "call of forward": (
        lambda net, h: net.head.forward(h),
        f"head.inner.weight, head.inner.bias, head.out.weight and 1 more: {PAST}",
    ),
    "call of a part": (lambda net, h: net.head.out(h), f"head.out.weight, head.out.bias: {PAST}"),
    "penalty on a weight": (
        lambda net, h: net.head(h).sum() + net.head.inner.bias.square(),
        f"head.inner.bias: {PAST}",
    ),
    "output in an unknown object": (
        wrapped,
        f"head.inner.weight, head.inner.bias, head.out.weight and 1 more: {PAST}",
    ),
    "input by attribute": (
        with_extra,
        "stem.weight, stem.bias: used to make a tensor that comes into the region 'head' past its input. Pass",
    ),
    "output by attribute": (
        with_kept,
        "A tensor made of the input of the region 'head' reaches the loss past its output. Return it from the module",
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_leak_is_named(leak: str) -> None:
    how, message = LEAKS[leak]
    (found,) = leaks_of(how, ["head"])
    assert found.startswith(message)
    assert leaks_of(how, ["stem"]) == []


def test_leak_of_a_nested_region_names_that_region() -> None:
    def part(net: Net, h: Tensor) -> Tensor:
        net.head.extra = net.head.inner.forward(h)
        return net.head(h)

    found = leaks_of(part, ["head", "head.inner"])
    assert any(
        "head.inner.weight, head.inner.bias: used past the output of the region 'head.inner'." in m for m in found
    )
    assert any("stem.weight, stem.bias: used to make a tensor that comes into the region 'head'" in m for m in found)


def test_tensor_that_escapes_a_nested_region_into_the_outer_one_names_the_nested() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x.relu()
            return super().forward(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Keeps(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.inner.kept

    net = nn.ModuleDict({"stem": nn.Linear(WIDTH, WIDTH), "outer": Outer()})

    def loss() -> Tensor:
        return net["outer"](net["stem"](torch.ones(2, WIDTH))).sum()

    (found,) = leaks(net, ["outer", "outer.inner"], loss)
    assert found.startswith("A tensor made of the input of the region 'outer.inner' reaches the loss past its output.")


def test_regions_of_one_module_are_nested_in_order() -> None:
    net = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})
    x = torch.ones(2, WIDTH, requires_grad=True)
    assert leaks(net, ["heads", "heads.0"], lambda: net["heads"][0](x).sum()) == []


def test_region_inside_itself_is_named() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, depth: int) -> Tensor:
            return self(self.linear(x), depth=depth - 1) if depth else self.linear(x)

    net = nn.ModuleDict({"twice": Twice()})
    assert leaks(net, ["twice"], lambda: net["twice"](torch.ones(1, WIDTH), depth=0).sum()) == []
    found = leaks(net, ["twice"], lambda: net["twice"](torch.ones(1, WIDTH), depth=1).sum())
    assert found
    assert "region 'twice'" in found[0]


def test_weights_that_nobody_asks_about_are_not_judged() -> None:
    net = Net(lambda net, h: net.head.forward(h))
    (spec,) = resolve_regions(net, ["head"])
    region = Region("head")
    attach(spec.modules, region)
    assert find_leaks(net(torch.ones(2, WIDTH)), dict.fromkeys(spec.parameters, (region,)), {}) == []


def test_loss_without_graph_has_no_leaks() -> None:
    assert find_leaks(torch.zeros(()), {}, {}) == []


def test_deep_and_wide_graphs_are_walked_once() -> None:
    h = w = torch.ones((), requires_grad=True)
    for _ in range(5 * sys.getrecursionlimit()):
        h = h * w + h  # 2^n paths
    assert find_leaks(h, {}, {id(w): "w"}) == []
    (found,) = find_leaks(h, {id(w): (Region("r"),)}, {id(w): "w"})
    assert found.startswith("w: used past the output of the region 'r'")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["net", "head", "stem"])
def test_compiled_graphs_are_not_judged(what: str, backend: str) -> None:
    torch.compiler.reset()
    net = Net(lambda net, h: net.head(h))
    part = net if what == "net" else getattr(net, what)
    part.compile(backend=backend)
    assert leaks(net, ["head", "head.inner"], lambda: net(torch.ones(2, WIDTH))) == []
    torch.compiler.reset()
