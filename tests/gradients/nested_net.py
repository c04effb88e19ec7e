"""The nested net that boundaries are tried on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.gradients.boundary import Region, attach

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
