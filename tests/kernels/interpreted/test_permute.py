"""The permutation's kernels under Triton's interpreter against plain float64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lightning_moeclip.kernels import permute_triton, reference
from lightning_moeclip.kernels.backend import runs_triton
from lightning_moeclip.kernels.permute import permute, sort_by_expert, unpermute

from tests.kernels.routing import (
    DTYPES,
    SHAPES,
    assert_bitwise,
    assert_close,
    cotangent_like,
    inputs,
    moved,
    plain_moved,
    tables,
    watch_devices,
)


@pytest.fixture(autouse=True)
def _as_a_gpu_counts() -> Iterator[None]:
    assert runs_triton(torch.zeros(1)), "Triton is not installed"
    # numpy, which the interpreter computes with, warns of what a GPU does in silence
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(0, 5, 2), (1, 1, 1), (37, 6, 2), (300, 8, 2), (20, 130, 8), (300, 20, 1)]
)
def test_counting_sort_is_stable_and_equals_the_reference(num_tokens: int, num_experts: int, top_k: int) -> None:
    chosen = torch.randint(num_experts, (num_tokens, top_k), generator=torch.Generator().manual_seed(0))
    ends = chosen.view(-1).bincount(minlength=num_experts).cumsum(0, dtype=torch.int32)
    assert_bitwise(sort_by_expert(chosen, ends), reference.sort_by_expert(chosen, num_experts))


def test_counting_sort_carries_over_more_blocks_than_one_step_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permute_triton, "_SCAN_B", 2)
    chosen = torch.randint(3, (200, 2), generator=torch.Generator().manual_seed(0))
    ends = chosen.view(-1).bincount(minlength=3).cumsum(0, dtype=torch.int32)
    assert_bitwise(sort_by_expert(chosen, ends), reference.sort_by_expert(chosen, 3))


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "width"), SHAPES)
@pytest.mark.parametrize("gaps", [False, True])
def test_kernels_equal_plain_float64(num_tokens: int, num_experts: int, top_k: int, width: int, gaps: bool) -> None:
    slot, row = tables(num_tokens, num_experts, top_k, gaps=gaps)
    for dtype in DTYPES:
        x, weights = inputs(num_tokens, top_k, width, dtype)
        found, plain = moved(x, weights, slot, row), plain_moved(x, weights, slot, row)
        exact = plain_moved(*(t.detach().double().requires_grad_() for t in (x, weights)), slot, row)
        assert torch.equal(found[0], plain[0])
        for mine, theirs, truth in zip(found, plain, exact, strict=True):
            # stores in bfloat16 cut off under the interpreter, where a GPU rounds: one place of their digits
            extra = torch.finfo(torch.bfloat16).eps if mine.dtype == torch.bfloat16 else 0.0
            assert_close(mine, theirs, truth, extra=extra)


def test_nothing_of_a_gap_reaches_a_sum_or_a_gradient() -> None:
    slot, row = torch.tensor([2, -1, 0]), torch.tensor([[2, -1], [0, -1]])
    nan = float("nan")
    rows = torch.tensor([[1.0] * 3, [nan] * 3, [2.0] * 3], requires_grad=True)
    weights = torch.tensor([[nan, nan], [1.0, float("inf")]], requires_grad=True)
    y = unpermute(rows, weights, slot, row)
    assert y[1].tolist() == [1.0] * 3
    grad_rows, grad_weights = torch.autograd.grad(y, (rows, weights), torch.full_like(y, float("inf")))
    assert grad_rows[1].tolist() == [0.0] * 3
    assert grad_weights[:, 1].tolist() == [0.0, 0.0]
    x = torch.full((2, 3), nan, requires_grad=True)
    copies = permute(x, slot, row)
    assert copies[1].tolist() == [0.0] * 3
    assert copies.isnan().all(1).tolist() == [True, False, True]
    (grad_x,) = torch.autograd.grad(copies, x, torch.tensor([[1.0] * 3, [nan] * 3, [2.0] * 3]))
    assert grad_x.tolist() == [[2.0] * 3, [1.0] * 3]


def test_rows_without_any_token_are_zeros() -> None:
    slot, row = torch.tensor([-1, -1]), torch.empty(0, 2, dtype=torch.int64)
    x, weights = torch.empty(0, 3, requires_grad=True), torch.empty(0, 2, requires_grad=True)
    rows = permute(x, slot, row)
    assert rows.tolist() == [[0.0] * 3] * 2
    leaf = rows.detach().requires_grad_()
    grads = torch.autograd.grad(unpermute(leaf, weights, slot, row).sum(), (leaf, weights))
    assert grads[0].tolist() == [[0.0] * 3] * 2


def test_kernels_are_bitwise_repeatable_and_equal_with_and_without_the_search_for_blank_rows() -> None:
    slot, row = tables(37, 6, 2, gaps=False)
    x, weights = inputs(37, 2, 40, torch.bfloat16)
    first = moved(x, weights, slot, row)
    assert_bitwise(first, moved(x, weights, slot, row))
    assert torch.equal(permute(x, slot, row, has_blanks=False, has_drops=False), first[0])
    rows = cotangent_like(first[0]).requires_grad_()
    y = unpermute(rows, weights, slot, row, has_blanks=False, has_drops=False)
    assert_bitwise([y, *torch.autograd.grad(y, (rows, weights), cotangent_like(y))], first[2:])


@pytest.mark.parametrize("gaps", [False, True])
def test_second_derivatives_equal_those_of_plain_operations(gaps: bool) -> None:
    slot, row = tables(7, 4, 2, gaps=gaps)
    x, weights = inputs(7, 2, 5, torch.float32)

    def second(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        y = unpermute(permute(x, slot, row).square(), weights, slot, row)
        first = torch.autograd.grad(y.square().sum(), (x, weights), create_graph=True)
        return [*torch.autograd.grad(sum(g.square().sum() for g in first), (x, weights))]

    # the kernels take no float64: there all is torch
    exact = second(*(t.detach().double().requires_grad_() for t in (x, weights)))
    for found, truth in zip(second(x, weights), exact, strict=True):
        assert (found - truth).norm() <= 20 * torch.finfo(torch.float32).eps * truth.norm()


def test_every_launch_is_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one: each kernel runs inside of ``device_of`` some tensor."""
    inside = watch_devices(monkeypatch, permute_triton)
    slot, row = tables(5, 3, 2, gaps=False)
    x, weights = inputs(5, 2, 8, torch.float32)
    y = unpermute(permute(x, slot, row), weights, slot, row)
    torch.autograd.grad(y, (x, weights), cotangent_like(y))
    assert inside == [True] * 7
