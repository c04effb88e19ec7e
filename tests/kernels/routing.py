"""Cases and bars of the router and of the permutation, for the torch path and for the kernels alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from lightning_moeclip.kernels.permute import permute, sort_by_expert, unpermute
from lightning_moeclip.kernels.router import route
from torch import Tensor

# tokens, experts, choices: nothing, one, ragged, more than one tile, more experts than a tile holds tokens of
SIZES = [(0, 5, 2), (1, 3, 1), (1, 1, 1), (37, 6, 2), (300, 8, 3), (70, 20, 2), (9, 130, 8), (9, 256, 4)]
# tokens, experts, choices, width
SHAPES = [(0, 5, 2, 8), (1, 3, 1, 1), (37, 6, 2, 40), (70, 4, 3, 300), (5, 8, 8, 256), (3, 2, 1, 0)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_close(found: Tensor, plain: Tensor, truth: Tensor, *, extra: float = 0.0) -> None:
    """At most twice the error of the plain composition, or one rounding of the result, which no luck spares.

    ``extra`` is relative: what the interpreter adds.
    """
    assert found.dtype == plain.dtype
    error, bar = (found.double() - truth).norm(), 2 * (plain.double() - truth).norm()
    rounding = (torch.finfo(found.dtype).eps / 2 + extra) * truth.norm()
    assert error <= max(bar, rounding), f"{float(error)} over {float(bar)} and {float(rounding)}"


def assert_bitwise(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


def logits(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Distinct within a row, in bfloat16 as well: equal ones may be chosen in any order by torch."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    order_TE = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    spread_T1 = torch.rand(num_tokens, 1, generator=generator) / 16 + 1 / 16
    return ((order_TE - num_experts / 2) * spread_T1).to(dtype).requires_grad_()


def routed(z: Tensor, top_k: int, *, normalize: bool, rule: str = "exact") -> tuple[Tensor, ...]:
    """Weights, ids, counts, ends and the cotangent of the logits for a fixed one of the weights."""
    weights, *rest = route(z, top_k, normalize_topk=normalize, gradient=rule)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(weights, z, cotangent_like(weights))
    return (weights.detach(), *rest, grad)


def cotangent_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)


def plain_route(z: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and cotangent of the logits by ordinary operations."""
    weights, _ = z.float().softmax(-1).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return weights.detach(), torch.autograd.grad(weights, z, cotangent_like(weights))[0]


def tables(num_tokens: int, num_experts: int, top_k: int, *, gaps: bool) -> tuple[Tensor, Tensor]:
    """Slots and rows; with ``gaps`` every fourth row is blank and every third choice is dropped."""
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    ends = chosen.view(-1).bincount(minlength=num_experts).cumsum(0, dtype=torch.int32)
    slot, row = sort_by_expert(chosen, ends)
    if not gaps:
        return slot, row
    kept = slot[slot % 3 != 1]
    place = torch.arange(len(kept)) + torch.arange(len(kept)) // 3
    slot = torch.full((len(kept) + len(kept) // 3 + 2,), -1)
    slot[place] = kept
    row = torch.full((num_tokens * top_k,), -1)
    row[kept] = place
    return slot, row.view(num_tokens, top_k)


def moved(x: Tensor, weights: Tensor, slot: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """Rows, the cotangent of x, the weighted sum and the cotangents of rows and weights."""
    rows = permute(x, slot, row)
    (grad_x,) = torch.autograd.grad(rows, x, cotangent_like(rows))
    rows = cotangent_like(rows).requires_grad_()
    y = unpermute(rows, weights, slot, row)
    return (
        permute(x, slot, row).detach(),
        grad_x,
        y.detach(),
        *torch.autograd.grad(y, (rows, weights), cotangent_like(y)),
    )


def plain_moved(x: Tensor, weights: Tensor, slot: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    """The same by ordinary operations in the dtype of x, with a row of zeros where an index is negative."""
    num_tokens, top_k = row.shape
    token = torch.where(slot < 0, num_tokens, slot.div(top_k, rounding_mode="floor"))
    blank = torch.zeros(1, x.shape[1], dtype=x.dtype)
    rows = torch.cat([x, blank])[token]
    (grad_x,) = torch.autograd.grad(rows, x, cotangent_like(rows))
    leaf = cotangent_like(rows).requires_grad_()
    by_choice = torch.cat([leaf, blank])[torch.where(row < 0, len(leaf), row)]
    y = (by_choice * weights.to(x.dtype).unsqueeze(2)).sum(1)
    return (rows.detach(), grad_x, y.detach(), *torch.autograd.grad(y, (leaf, weights), cotangent_like(y)))


def inputs(num_tokens: int, top_k: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_tokens, width, generator=generator).to(dtype).requires_grad_()
    return x, torch.rand(num_tokens, top_k, generator=generator).requires_grad_()


class _Watched:
    """A kernel that takes note of whether a device was chosen for its launch."""

    def __init__(self, kernel: object, entered: list[Tensor], inside: list[bool]) -> None:
        self._kernel, self._entered, self._inside = kernel, entered, inside

    def __getitem__(self, grid: object) -> object:
        self._inside.append(bool(self._entered))
        return self._kernel[grid]  # type: ignore[index]


def watch_devices(patch: pytest.MonkeyPatch, module: ModuleType) -> list[bool]:
    """For each launch to come of a module's kernels, whether it is inside of ``torch.cuda.device_of``."""
    entered: list[Tensor] = []
    inside: list[bool] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield
        entered.pop()

    patch.setattr(torch.cuda, "device_of", device_of)
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        patch.setattr(module, name, _Watched(getattr(module, name), entered, inside))
    return inside
