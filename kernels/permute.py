"""Tokens into rows sorted by expert, and the weighted sum of a token's rows, with both gradients in one pass.

Legend of the shape suffixes: T tokens, K experts chosen per token, S = T * K choices, R rows, D width, E experts. Two
tables tell which choice a row serves and which row serves a choice: ``slot_R``, -1 for a blank row, and ``row_TK``, -1
for a choice that was dropped. Each is the inverse of the other, and neither may name the same place twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_moeclip.kernels.backend import runs_triton
from torch import Tensor

__all__ = ["permute", "sort_by_expert", "unpermute"]

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def sort_by_expert(chosen_TK: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Place of each choice when they are sorted by expert, and within an expert by token.

    Args:
        chosen_TK: [T, K], expert ids below E, int64.
        ends_E: [E], cumulative counts of the ids, int32, as ``route`` gives them.

    Returns:
        ``slot`` [S] and ``row`` [T, K], int64.

    Raises:
        TypeError: a dtype that is not an index.
        ValueError: a shape that does not fit.
    """
    if chosen_TK.dtype != torch.int64 or ends_E.dtype != torch.int32:
        raise TypeError(
            f"sort_by_expert got ids in {chosen_TK.dtype} and ends in {ends_E.dtype}: "
            "they must be int64 and int32, as route gives them."
        )
    if chosen_TK.dim() != 2 or ends_E.dim() != 1:
        raise ValueError(
            f"sort_by_expert got ids of shape {tuple(chosen_TK.shape)} and ends of shape {tuple(ends_E.shape)}: "
            "they must be [tokens, choices] and [experts]."
        )
    call = torch.ops.moeclip.sort_by_expert if torch.compiler.is_compiling() else _sort_by_expert
    return call(chosen_TK, ends_E)


def permute(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor, *, has_blanks: bool = True, has_drops: bool = True) -> Tensor:
    """A copy of its token for each row, zeros for a blank one; the backward adds a token's rows in a fixed order.

    Args:
        x_TD: [T, D], any floating dtype.
        slot_R: [R], int64.
        row_TK: [T, K], int64.
        has_blanks: whether ``slot`` may hold -1; False spares the search.
        has_drops: the same of ``row``.

    Returns:
        [R, D], differentiable, in the dtype of ``x``.

    Raises:
        TypeError: tokens that are not floating, or tables that are not int64.
        ValueError: a shape that does not fit.
    """
    _check("permute", x_TD, slot_R, row_TK)
    if x_TD.shape[0] != row_TK.shape[0]:
        raise ValueError(
            f"permute got {x_TD.shape[0]} tokens and rows for {row_TK.shape[0]}: row_TK must have one line per token."
        )
    call = torch.ops.moeclip.permute if torch.compiler.is_compiling() else _Permute.apply
    return call(x_TD, slot_R, row_TK, has_blanks, has_drops)


def unpermute(
    rows_RD: Tensor,
    weights_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    *,
    has_blanks: bool = True,
    has_drops: bool = True,
) -> Tensor:
    """y_t = sum over k of weights[t, k] * rows[row[t, k]], in a fixed order; dropped choices add nothing.

    Args:
        rows_RD: [R, D], any floating dtype.
        weights_TK: [T, K], any floating dtype.
        slot_R: [R], int64.
        row_TK: [T, K], int64.
        has_blanks: whether ``slot`` may hold -1; False spares the search.
        has_drops: the same of ``row``.

    Returns:
        [T, D], differentiable in rows and weights, in the dtype of the rows.

    Raises:
        TypeError: rows or weights that are not floating, or tables that are not int64.
        ValueError: a shape that does not fit.
    """
    _check("unpermute", rows_RD, slot_R, row_TK)
    if not weights_TK.is_floating_point():
        raise TypeError(f"unpermute got weights in {weights_TK.dtype}: they must be floating, as route gives them.")
    if rows_RD.shape[0] != slot_R.shape[0] or weights_TK.shape != row_TK.shape:
        raise ValueError(
            f"unpermute got rows {tuple(rows_RD.shape)} with slot_R {tuple(slot_R.shape)}, and weights "
            f"{tuple(weights_TK.shape)} with row_TK {tuple(row_TK.shape)}: one slot per row, one weight per choice."
        )
    call = torch.ops.moeclip.unpermute if torch.compiler.is_compiling() else _Unpermute.apply
    return call(rows_RD, weights_TK, slot_R, row_TK, has_blanks, has_drops)


def _check(name: str, x: Tensor, slot_R: Tensor, row_TK: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} got values in {x.dtype}: they must be floating. Use x.float().")
    if slot_R.dtype != torch.int64 or row_TK.dtype != torch.int64:
        raise TypeError(
            f"{name} got slot_R in {slot_R.dtype} and row_TK in {row_TK.dtype}: "
            "both must be int64, as sort_by_expert gives them."
        )
    if (x.dim(), slot_R.dim(), row_TK.dim()) != (2, 1, 2):
        raise ValueError(
            f"{name} got values {tuple(x.shape)}, slot_R {tuple(slot_R.shape)} and row_TK {tuple(row_TK.shape)}: "
            "they must be [., width], [rows] and [tokens, choices]."
        )


def _runs_triton(x: Tensor) -> bool:
    return x.dtype in _KERNEL_DTYPES and runs_triton(x)


def _sort_by_expert(chosen_TK: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    if runs_triton(chosen_TK):
        from lightning_moeclip.kernels import permute_triton

        return permute_triton.sort_by_expert(chosen_TK, ends_E)
    slot_S = chosen_TK.reshape(-1).argsort(stable=True)
    place_S = torch.arange(slot_S.shape[0], device=slot_S.device)
    return slot_S, torch.empty_like(slot_S).scatter_(0, slot_S, place_S).view(chosen_TK.shape)


def _fill_(values_ND: Tensor, index_N: Tensor) -> Tensor:
    """Zeros where the index is negative; by filling, since zero times a NaN would spread it."""
    is_missing_N = index_N < 0
    if index_N.is_cpu:
        return values_ND.index_fill_(0, is_missing_N.nonzero().view(-1), 0.0)
    # nonzero would wait for the device
    return values_ND.masked_fill_(is_missing_N.view(-1, *[1] * (values_ND.dim() - 1)), 0.0)


def _take(values_ND: Tensor, index_M: Tensor, has_gaps: bool) -> Tensor:
    """values[index], and zeros where the index is negative."""
    if not has_gaps:
        return values_ND.index_select(0, index_M)
    if not values_ND.shape[0]:
        return values_ND.new_zeros(index_M.shape[0], *values_ND.shape[1:])
    return _fill_(values_ND.index_select(0, index_M.clamp(min=0)), index_M)


def _in_given_dtype(x: Tensor) -> AbstractContextManager[object]:
    """No autocast, which would round what a product takes: the kernels know none."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _token(slot_R: Tensor, top_k: int) -> Tensor:
    """Token of each row, -1 for a blank one."""
    return slot_R.div(top_k, rounding_mode="floor") if top_k > 1 else slot_R


def _by_choice(rows_RD: Tensor, row_TK: Tensor, has_drops: bool) -> Tensor:
    """Rows in the order of the choices, [T, K, D], or what there is one of for each row, [T, K]."""
    return _take(rows_RD, row_TK.reshape(-1), has_drops).view(*row_TK.shape, *rows_RD.shape[1:])


def _permute(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor, has_blanks: bool, has_drops: bool) -> Tensor:
    if _runs_triton(x_TD):
        from lightning_moeclip.kernels import permute_triton

        return permute_triton.permute(x_TD, slot_R, row_TK, has_blanks=has_blanks)
    return _take(x_TD, _token(slot_R, row_TK.shape[1]), has_blanks)


def _sum_choices(rows_RD: Tensor, row_TK: Tensor, has_drops: bool) -> Tensor:
    """The transpose of ``permute``: y_t = sum over k of rows[row[t, k]]."""
    if _runs_triton(rows_RD):
        from lightning_moeclip.kernels import permute_triton

        return permute_triton.unpermute(rows_RD, None, row_TK)
    return _by_choice(rows_RD, row_TK, has_drops).sum(1)


def _unpermute(
    rows_RD: Tensor, weights_TK: Tensor, slot_R: Tensor, row_TK: Tensor, has_blanks: bool, has_drops: bool
) -> Tensor:
    if _runs_triton(rows_RD):
        from lightning_moeclip.kernels import permute_triton

        return permute_triton.unpermute(rows_RD, weights_TK, row_TK)
    w_TK = weights_TK.to(rows_RD.dtype)
    if has_drops:
        w_TK = w_TK.masked_fill(row_TK < 0, 0.0)
    with _in_given_dtype(rows_RD):
        return torch.bmm(w_TK.unsqueeze(1), _by_choice(rows_RD, row_TK, has_drops)).squeeze(1)


def _unpermute_backward(
    grad_TD: Tensor,
    rows_RD: Tensor,
    weights_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    has_blanks: bool,
    has_drops: bool,
) -> tuple[Tensor, Tensor]:
    """Cotangents of the rows and of the weights, from one pass over the rows."""
    if _runs_triton(rows_RD):
        from lightning_moeclip.kernels import permute_triton

        return permute_triton.unpermute_backward(grad_TD, rows_RD, weights_TK, slot_R, row_TK, has_blanks=has_blanks)
    return _unpermute_backward_by_torch(grad_TD, rows_RD, weights_TK, slot_R, row_TK, has_blanks, has_drops)


def _unpermute_backward_by_torch(
    grad_TD: Tensor,
    rows_RD: Tensor,
    weights_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    has_blanks: bool,
    has_drops: bool,
) -> tuple[Tensor, Tensor]:
    """The same by operations with derivatives of their own, which ``create_graph=True`` asks for."""
    if not grad_TD.shape[0]:
        return torch.zeros_like(rows_RD), torch.zeros_like(weights_TK)
    # what a blank row takes from choice 0 reaches no weight, since no choice has that row, and is filled at the end
    choice_R = slot_R.clamp(min=0) if has_blanks else slot_R
    grad_RD = grad_TD.index_select(0, _token(choice_R, row_TK.shape[1]))
    w_R1 = weights_TK.reshape(-1).index_select(0, choice_R).to(rows_RD.dtype).unsqueeze(1)
    with _in_given_dtype(rows_RD):
        dot_R = torch.linalg.vecdot(rows_RD, grad_RD)
    grad_w_TK = _by_choice(dot_R, row_TK, has_drops).to(weights_TK.dtype)
    # in place would lose what a second derivative needs
    grad_rows_RD = grad_RD * w_R1 if torch.is_grad_enabled() else grad_RD.mul_(w_R1)
    return _fill_(grad_rows_RD, slot_R) if has_blanks else grad_rows_RD, grad_w_TK


def _set_up_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, row_TK, _, ctx.has_drops = inputs
    ctx.save_for_backward(row_TK)


def _grads_of_permute(backward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, ...]]:
    def grads(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            # create_graph=True: by operations with derivatives of their own
            return _by_choice(grad_RD, row_TK, ctx.has_drops).sum(1), None, None, None, None
        return backward(grad_RD, row_TK, ctx.has_drops), None, None, None, None

    return grads


def _set_up_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.has_blanks, ctx.has_drops = inputs
    ctx.save_for_backward(*tensors)


def _grads_of_unpermute(backward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor | None, ...]]:
    def grads(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        call: Callable[..., tuple[Tensor, Tensor]] = backward
        if torch.is_grad_enabled():
            call = _unpermute_backward_by_torch
        return *call(grad_TD, *ctx.saved_tensors, ctx.has_blanks, ctx.has_drops), None, None, None, None

    return grads


# Eager calls, without the dispatcher, which costs as much as the operation on a small layer; what torch.compile traces
# is torch.ops.moeclip. Not by setup_context: torch would inspect the signature in every call, 30 us of Python.
class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _set_up_permute(ctx, inputs, output := _permute(*inputs))
        return output

    backward = staticmethod(_grads_of_permute(_sum_choices))


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _set_up_unpermute(ctx, inputs, output := _unpermute(*inputs))
        return output

    backward = staticmethod(_grads_of_unpermute(_unpermute_backward))


_library = torch.library.Library("moeclip", "FRAGMENT")
_library.define("sort_by_expert(Tensor chosen, Tensor ends) -> (Tensor, Tensor)")
_library.define("permute(Tensor x, Tensor slot, Tensor row, bool has_blanks, bool has_drops) -> Tensor")
_library.define("sum_choices(Tensor rows, Tensor row, bool has_drops) -> Tensor")
_library.define(
    "unpermute(Tensor rows, Tensor weights, Tensor slot, Tensor row, bool has_blanks, bool has_drops) -> Tensor"
)
_library.define(
    "unpermute_backward(Tensor grad, Tensor rows, Tensor weights, Tensor slot, Tensor row, "
    "bool has_blanks, bool has_drops) -> (Tensor, Tensor)"
)
for _name, _implementation in (
    ("sort_by_expert", _sort_by_expert),
    ("permute", _permute),
    ("sum_choices", _sum_choices),
    ("unpermute", _unpermute),
    ("unpermute_backward", _unpermute_backward),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "moeclip::permute",
    _grads_of_permute(torch.ops.moeclip.sum_choices.default),
    setup_context=_set_up_permute,
    lib=_library,
)
torch.library.register_autograd(
    "moeclip::unpermute",
    _grads_of_unpermute(torch.ops.moeclip.unpermute_backward.default),
    setup_context=_set_up_unpermute,
    lib=_library,
)


@torch.library.register_fake("moeclip::sort_by_expert", lib=_library)
def _(chosen_TK: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return chosen_TK.new_empty(chosen_TK.numel()), chosen_TK.new_empty(chosen_TK.shape)


@torch.library.register_fake("moeclip::permute", lib=_library)
def _(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor, has_blanks: bool, has_drops: bool) -> Tensor:
    return x_TD.new_empty(slot_R.shape[0], x_TD.shape[1])


@torch.library.register_fake("moeclip::sum_choices", lib=_library)
def _(rows_RD: Tensor, row_TK: Tensor, has_drops: bool) -> Tensor:
    return rows_RD.new_empty(row_TK.shape[0], rows_RD.shape[1])


@torch.library.register_fake("moeclip::unpermute", lib=_library)
def _(rows_RD: Tensor, weights_TK: Tensor, slot_R: Tensor, row_TK: Tensor, has_blanks: bool, has_drops: bool) -> Tensor:
    return rows_RD.new_empty(row_TK.shape[0], rows_RD.shape[1])


@torch.library.register_fake("moeclip::unpermute_backward", lib=_library)
def _(
    grad_TD: Tensor,
    rows_RD: Tensor,
    weights_TK: Tensor,
    slot_R: Tensor,
    row_TK: Tensor,
    has_blanks: bool,
    has_drops: bool,
) -> tuple[Tensor, Tensor]:
    return rows_RD.new_empty(rows_RD.shape), weights_TK.new_empty(weights_TK.shape)
