"""The permutation's torch path against one token after another in float64, and what the operations promise."""

import pytest
import torch
from lightning_moeclip.kernels import reference
from lightning_moeclip.kernels.permute import permute, sort_by_expert, unpermute
from torch import Tensor

from tests.kernels.routing import (
    DTYPES,
    SHAPES,
    SIZES,
    assert_bitwise,
    assert_close,
    inputs,
    moved,
    plain_moved,
    tables,
)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_sort_is_stable_and_equals_the_reference(num_tokens: int, num_experts: int, top_k: int) -> None:
    chosen = torch.randint(num_experts, (num_tokens, top_k), generator=torch.Generator().manual_seed(0))
    ends = chosen.view(-1).bincount(minlength=num_experts).cumsum(0, dtype=torch.int32)
    assert_bitwise(sort_by_expert(chosen, ends), reference.sort_by_expert(chosen, num_experts))


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "width"), SHAPES)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sums_and_gradients_equal_the_reference(
    num_tokens: int, num_experts: int, top_k: int, width: int, gaps: bool, dtype: torch.dtype
) -> None:
    slot, row = tables(num_tokens, num_experts, top_k, gaps=gaps)
    x, weights = inputs(num_tokens, top_k, width, dtype)
    found, plain = moved(x, weights, slot, row), plain_moved(x, weights, slot, row)
    exact = plain_moved(*(t.detach().double().requires_grad_() for t in (x, weights)), slot, row)
    assert torch.equal(found[0], plain[0])
    for mine, theirs, truth in zip(found, plain, exact, strict=True):
        assert_close(mine, theirs, truth)


@pytest.mark.parametrize("gaps", [False, True])
def test_plain_composition_of_the_tests_equals_the_loop_of_the_reference(gaps: bool) -> None:
    slot, row = tables(13, 6, 2, gaps=gaps)
    x, weights = (t.detach().double().requires_grad_() for t in inputs(13, 2, 5, torch.float32))
    rows, _, y, grad_rows, grad_weights = plain_moved(x, weights, slot, row)
    assert torch.equal(rows, reference.permute(x, slot, 2))
    from tests.kernels.routing import cotangent_like

    leaf = cotangent_like(rows).requires_grad_()
    loop = reference.unpermute(leaf, weights, row)
    torch.testing.assert_close(y, loop, rtol=1e-14, atol=1e-15)
    grads = torch.autograd.grad(loop, (leaf, weights), cotangent_like(loop))
    for mine, truth in zip((grad_rows, grad_weights), grads, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("gaps", [False, True])
def test_first_and_second_derivatives_pass_gradcheck(gaps: bool) -> None:
    slot, row = tables(5, 3, 2, gaps=gaps)
    x, weights = (t.detach().double().requires_grad_() for t in inputs(5, 2, 3, torch.float32))

    def both(x: Tensor, weights: Tensor) -> Tensor:
        return unpermute(permute(x, slot, row).square(), weights, slot, row)

    torch.autograd.gradcheck(both, (x, weights))
    torch.autograd.gradgradcheck(both, (x, weights))


def test_nothing_of_a_gap_reaches_a_sum_or_a_gradient() -> None:
    slot, row = torch.tensor([2, -1, 0]), torch.tensor([[2, -1], [0, -1]])
    nan = float("nan")
    x = torch.ones(2, 3, requires_grad=True)
    rows = torch.tensor([[1.0] * 3, [nan] * 3, [2.0] * 3], requires_grad=True)
    # choice 0 weighs NaN: blank rows look there, and so may not
    weights = torch.tensor([[nan, nan], [1.0, float("inf")]], requires_grad=True)
    y = unpermute(rows, weights, slot, row)
    assert y[1].tolist() == [1.0] * 3
    grad_rows, grad_weights = torch.autograd.grad(y, (rows, weights), torch.full_like(y, float("inf")))
    assert grad_rows[1].tolist() == [0.0] * 3
    assert grad_weights[:, 1].tolist() == [0.0, 0.0]
    copies = permute(x * nan, slot, row)
    assert copies.isnan().all(1).tolist() == [True, False, True]
    assert copies[1].tolist() == [0.0] * 3
    (grad_x,) = torch.autograd.grad(permute(x, slot, row), x, torch.tensor([[1.0] * 3, [nan] * 3, [2.0] * 3]))
    assert grad_x.tolist() == [[2.0] * 3, [1.0] * 3]


def test_bad_values_stay_in_their_token() -> None:
    slot, row = tables(9, 4, 2, gaps=False)
    x, weights = inputs(9, 2, 5, torch.float32)
    clean = moved(x, weights, slot, row)
    bad = x.detach().clone()
    bad[3, 2], bad[5, 0] = float("nan"), float("inf")
    found = moved(bad.requires_grad_(), weights, slot, row)
    good = (slot // 2 != 3) & (slot // 2 != 5)
    assert torch.equal(found[0][good], clean[0][good])
    assert found[0].isfinite().all(1).equal(good)


def test_moves_are_bitwise_repeatable_and_equal_with_and_without_the_search_for_gaps() -> None:
    slot, row = tables(37, 6, 2, gaps=False)
    x, weights = inputs(37, 2, 40, torch.bfloat16)
    assert_bitwise(moved(x, weights, slot, row), moved(x, weights, slot, row))
    y = [
        unpermute(permute(x, slot, row, has_blanks=g, has_drops=g), weights, slot, row, has_blanks=g, has_drops=g)
        for g in (True, False)
    ]
    grads = [torch.autograd.grad(out.sum(), (x, weights)) for out in y]
    assert_bitwise([y[0], *grads[0]], [y[1], *grads[1]])


def test_rows_without_any_token_are_zeros() -> None:
    slot, row = torch.tensor([-1, -1]), torch.empty(0, 2, dtype=torch.int64)
    x, weights = torch.empty(0, 3, requires_grad=True), torch.empty(0, 2, requires_grad=True)
    rows = permute(x, slot, row)
    assert rows.tolist() == [[0.0] * 3] * 2
    y = unpermute(rows, weights, slot, row)
    assert [tuple(g.shape) for g in torch.autograd.grad(y.sum(), (x, weights))] == [(0, 3), (0, 2)]


def test_autocast_does_not_touch_sums_and_gradients() -> None:
    slot, row = tables(13, 6, 2, gaps=True)
    x, weights = inputs(13, 2, 5, torch.float32)
    wanted = moved(x, weights, slot, row)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = moved(x, weights, slot, row)
    assert all(one.dtype is other.dtype for one, other in zip(found, wanted, strict=True))
    assert_bitwise(found, wanted)


def test_compiled_moves_are_one_graph_and_equal_eager() -> None:
    slot, row = tables(13, 6, 2, gaps=True)
    x, weights = (t.detach().double().requires_grad_() for t in inputs(13, 2, 5, torch.float32))

    def loss(x: Tensor, weights: Tensor) -> Tensor:
        chosen = torch.tensor([[1, 0], [0, 1]])
        order, _ = sort_by_expert(chosen, torch.tensor([2, 4], dtype=torch.int32))
        return unpermute(permute(x, slot, row).sin(), weights, slot, row).square().sum() + order[0]

    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    both = [torch.autograd.grad(fn(x, weights), (x, weights)) for fn in (loss, traced)]
    for eager, found in zip(*both, strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("gaps", [False, True])
def test_registrations_pass_opcheck(gaps: bool) -> None:
    slot, row = tables(7, 4, 2, gaps=gaps)
    x, weights = inputs(7, 2, 5, torch.float32)
    rows = permute(x, slot, row).detach().requires_grad_()
    ops = torch.ops.moeclip
    torch.library.opcheck(ops.permute.default, (x, slot, row, gaps, gaps))
    torch.library.opcheck(ops.unpermute.default, (rows, weights, slot, row, gaps, gaps))
    torch.library.opcheck(ops.sum_choices.default, (rows.detach(), row, gaps))
    plain = (x.detach(), rows.detach(), weights.detach(), slot, row, gaps, gaps)
    torch.library.opcheck(ops.unpermute_backward.default, plain)
    torch.library.opcheck(
        ops.sort_by_expert.default, (torch.tensor([[1, 0], [0, 1]]), torch.tensor([2, 4], dtype=torch.int32))
    )


SLOT, ROW, X, W = torch.tensor([0, 1]), torch.tensor([[0, 1]]), torch.zeros(1, 3), torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: permute(X.int(), SLOT, ROW), TypeError, r"permute got values in torch.int32: they must be floating"),
        (lambda: permute(X, SLOT.int(), ROW), TypeError, r"slot_R in torch.int32 and row_TK in torch.int64: both must"),
        (
            lambda: permute(X[0], SLOT, ROW),
            ValueError,
            r"values \(3,\), slot_R \(2,\) and row_TK \(1, 2\): they must be",
        ),
        (lambda: permute(X.expand(4, 3), SLOT, ROW), ValueError, r"4 tokens and rows for 1: row_TK must have one line"),
        (lambda: unpermute(X, W, SLOT, ROW), ValueError, r"rows \(1, 3\) with slot_R \(2,\).*one slot per row, one we"),
        (
            lambda: unpermute(X.expand(2, 3), W.T, SLOT, ROW),
            ValueError,
            r"weights \(2, 1\) with row_TK \(1, 2\): one s",
        ),
        (lambda: unpermute(X.expand(2, 3), W.int(), SLOT, ROW), TypeError, r"weights in torch.int32: they must be flo"),
        (lambda: sort_by_expert(ROW.int(), SLOT.int()), TypeError, r"ids in torch.int32 and ends in torch.int32: they"),
        (
            lambda: sort_by_expert(SLOT, SLOT.int()),
            ValueError,
            r"ids of shape \(2,\) and ends of shape \(2,\): they mu",
        ),
    ],
)
def test_bad_arguments_say_what_to_write(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
