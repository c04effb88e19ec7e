"""Triton kernels that sort choices by expert and move rows: a token is read once, whatever the number of its rows.

Legend of the shape suffixes: S choices, T tokens, R rows, D width, E experts, B blocks of choices, all of one tile; K
experts chosen per token.
"""

# the types of a kernel's arguments are those of its launch
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["permute", "sort_by_expert", "unpermute", "unpermute_backward"]

_BLOCK_S = 64  # each choice is compared with all of its block: 32 pairs per thread of 4 warps
_SCAN_B, _SCAN_E = 512, 8  # table of 4096 counts per step
_TILE = 4096  # values per tile: 32 per thread of 4 warps


@triton.jit
def count_kernel(chosen, partial, num_choices, E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    """Choices per expert among BLOCK_S of them: one row of ``partial``, BLOCK_E experts per program."""
    s_S = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    e_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    id_S = tl.load(chosen + s_S, mask=s_S < num_choices, other=-1).to(tl.int32)
    counts_E = tl.sum((id_S[:, None] == e_E[None, :]).to(tl.int32), axis=0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * E + e_E, counts_E, mask=e_E < E)


@triton.jit
def scan_kernel(partial, ends, num_blocks, E: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Counts into the first row of each block and expert, in place: what earlier blocks and lower experts need."""
    e_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    next_E = tl.load(ends + e_E - 1, mask=(e_E > 0) & (e_E < E), other=0)
    first = 0
    while first < num_blocks:
        b_B = first + tl.arange(0, BLOCK_B)
        place_BE = b_B[:, None].to(tl.int64) * E + e_E[None, :]
        is_count_BE = (b_B < num_blocks)[:, None] & (e_E < E)[None, :]
        counts_BE = tl.load(partial + place_BE, mask=is_count_BE, other=0)
        before_BE = tl.cumsum(counts_BE, axis=0) - counts_BE
        tl.store(partial + place_BE, before_BE + next_E[None, :], mask=is_count_BE)
        next_E += tl.sum(counts_BE, axis=0)
        first += BLOCK_B


@triton.jit
def place_kernel(chosen, firsts, slot, row, num_choices, E: tl.constexpr, BLOCK_S: tl.constexpr):
    """Row of each choice: the first one of its block and expert, and how many of the block come before it."""
    i_S = tl.arange(0, BLOCK_S)
    block = tl.program_id(0).to(tl.int64)
    s_S = block * BLOCK_S + i_S
    is_choice_S = s_S < num_choices
    id_S = tl.load(chosen + s_S, mask=is_choice_S, other=E)
    # the same ids again in the other layout: a row against a column
    is_same_SS = (id_S[:, None] == id_S[None, :]) & (i_S[None, :] < i_S[:, None])
    rank_S = tl.sum(is_same_SS.to(tl.int32), axis=1)
    first_S = tl.load(firsts + block * E + id_S, mask=is_choice_S & (id_S < E), other=0)
    place_S = (first_S + rank_S).to(tl.int64)
    tl.store(row + s_S, place_S, mask=is_choice_S)
    tl.store(slot + place_S, s_S, mask=is_choice_S)


@triton.jit
def _fill_blank(rows, slot, num_rows, block, d_D, D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Zeros in the blank rows among BLOCK_R; the others are left alone."""
    r_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
    is_blank_R = tl.load(slot + r_R, mask=r_R < num_rows, other=0) < 0
    zero_RD = tl.zeros([BLOCK_R, d_D.shape[0]], rows.dtype.element_ty)
    tl.store(rows + r_R[:, None] * D + d_D[None, :], zero_RD, mask=is_blank_R[:, None] & (d_D < D)[None, :])


@triton.jit
def permute_kernel(
    x,
    slot,
    row,
    rows,
    num_tokens,
    num_rows,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tokens of a block into their rows; the programs after the last token fill blank rows."""
    block = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    num_blocks = tl.cdiv(num_tokens, BLOCK_T)
    if block < num_blocks:
        t_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token_T = t_T < num_tokens
        is_value_TD = is_token_T[:, None] & (d_D < D)[None, :]
        x_TD = tl.load(x + t_T[:, None] * D + d_D[None, :], mask=is_value_TD)
        for k in tl.static_range(K):
            row_T = tl.load(row + t_T * K + k, mask=is_token_T, other=-1)
            is_kept_TD = (row_T >= 0)[:, None] & (d_D < D)[None, :]
            tl.store(rows + row_T[:, None] * D + d_D[None, :], x_TD, mask=is_kept_TD)
    else:
        _fill_blank(rows, slot, num_rows, block - num_blocks, d_D, D, BLOCK_T)


@triton.jit
def unpermute_kernel(
    rows,
    weights,
    row,
    y,
    num_tokens,
    D: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sum of each token's rows in the order of its choices, in float32."""
    t_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_token_T = t_T < num_tokens
    sum_TD = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        row_T = tl.load(row + t_T * K + k, mask=is_token_T, other=-1)
        is_kept_T = row_T >= 0
        is_kept_TD = is_kept_T[:, None] & (d_D < D)[None, :]
        value_TD = tl.load(rows + row_T[:, None] * D + d_D[None, :], mask=is_kept_TD, other=0.0).to(tl.float32)
        if WEIGHTED:
            value_TD *= tl.load(weights + t_T * K + k, mask=is_kept_T, other=0.0).to(tl.float32)[:, None]
        sum_TD += value_TD
    is_value_TD = is_token_T[:, None] & (d_D < D)[None, :]
    tl.store(y + t_T[:, None] * D + d_D[None, :], sum_TD.to(y.dtype.element_ty), mask=is_value_TD)


@triton.jit
def unpermute_backward_kernel(
    grad,
    rows,
    weights,
    slot,
    row,
    grad_rows,
    grad_weights,
    num_tokens,
    num_rows,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Cotangents of the rows and weights of a block of tokens, each row read once; then blank rows as in permute."""
    block = tl.program_id(0).to(tl.int64)
    num_blocks = tl.cdiv(num_tokens, BLOCK_T)
    if block < num_blocks:
        t_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
        k_K = tl.arange(0, BLOCK_K)
        is_token_T = t_T < num_tokens
        dot_TK = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        for start in range(0, D, BLOCK_D):
            d_D = start + tl.arange(0, BLOCK_D)
            is_value_TD = is_token_T[:, None] & (d_D < D)[None, :]
            grad_TD = tl.load(grad + t_T[:, None] * D + d_D[None, :], mask=is_value_TD, other=0.0).to(tl.float32)
            for k in tl.static_range(K):
                row_T = tl.load(row + t_T * K + k, mask=is_token_T, other=-1)
                is_kept_T = row_T >= 0
                is_kept_TD = is_kept_T[:, None] & (d_D < D)[None, :]
                place_TD = row_T[:, None] * D + d_D[None, :]
                row_TD = tl.load(rows + place_TD, mask=is_kept_TD, other=0.0).to(tl.float32)
                # not by the zeros in the row: times an infinite cotangent they are NaN
                dot_T = tl.where(is_kept_T, tl.sum(row_TD * grad_TD, axis=1), 0.0)
                dot_TK += tl.where((k_K == k)[None, :], dot_T[:, None], 0.0)
                w_T = tl.load(weights + t_T * K + k, mask=is_kept_T, other=0.0).to(tl.float32)
                tl.store(grad_rows + place_TD, (w_T[:, None] * grad_TD).to(grad_rows.dtype.element_ty), mask=is_kept_TD)
        is_choice_TK = is_token_T[:, None] & (k_K < K)[None, :]
        place_TK = t_T[:, None] * K + k_K[None, :]
        tl.store(grad_weights + place_TK, dot_TK.to(grad_weights.dtype.element_ty), mask=is_choice_TK)
    else:
        for start in range(0, D, BLOCK_D):
            d_D = start + tl.arange(0, BLOCK_D)
            _fill_blank(grad_rows, slot, num_rows, block - num_blocks, d_D, D, BLOCK_T)


def _blocks(width: int) -> tuple[int, int]:
    """Tokens and values of a token in a tile: 256 values are 16 bytes and more for each thread of a warp."""
    block_d = min(256, triton.next_power_of_2(max(width, 1)))
    return min(64, _TILE // block_d), block_d


def _num_blocks(num_tokens: int, num_rows: int, block: int, has_blanks: bool) -> int:
    return triton.cdiv(num_tokens, block) + (triton.cdiv(num_rows, block) if has_blanks else 0)


def sort_by_expert(chosen_TK: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the three kernels of a counting sort; what ``permute.sort_by_expert`` returns."""
    chosen_TK, ends_E = chosen_TK.contiguous(), ends_E.contiguous()
    num_choices, num_experts = chosen_TK.numel(), len(ends_E)
    slot_S = torch.empty(num_choices, dtype=torch.int64, device=chosen_TK.device)
    row_TK = torch.empty_like(chosen_TK)
    if not num_choices:
        return slot_S, row_TK
    num_blocks = triton.cdiv(num_choices, _BLOCK_S)
    firsts_BE = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=chosen_TK.device)
    block_e = min(32, triton.next_power_of_2(num_experts))
    with torch.cuda.device_of(chosen_TK):
        count_kernel[(num_blocks, triton.cdiv(num_experts, block_e))](
            chosen_TK,
            firsts_BE,
            num_choices,
            E=num_experts,
            BLOCK_S=_BLOCK_S,
            BLOCK_E=block_e,
            enable_fp_fusion=True,
        )
    with torch.cuda.device_of(chosen_TK):
        scan_kernel[(triton.cdiv(num_experts, _SCAN_E),)](
            firsts_BE,
            ends_E,
            num_blocks,
            E=num_experts,
            BLOCK_B=_SCAN_B,
            BLOCK_E=_SCAN_E,
            enable_fp_fusion=True,
        )
    with torch.cuda.device_of(chosen_TK):
        place_kernel[(num_blocks,)](
            chosen_TK, firsts_BE, slot_S, row_TK, num_choices, E=num_experts, BLOCK_S=_BLOCK_S, enable_fp_fusion=True
        )
    return slot_S, row_TK


def permute(x_TD: Tensor, slot_R: Tensor, row_TK: Tensor, *, has_blanks: bool) -> Tensor:
    """Launch ``permute_kernel``: [R, D]; without any, no program looks for blank rows."""
    (num_tokens, width), num_rows = x_TD.shape, len(slot_R)
    rows_RD = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    block_t, block_d = _blocks(width)
    if rows_RD.numel():
        with torch.cuda.device_of(x_TD):
            permute_kernel[(_num_blocks(num_tokens, num_rows, block_t, has_blanks), triton.cdiv(width, block_d))](
                x_TD.contiguous(),
                slot_R.contiguous(),
                row_TK.contiguous(),
                rows_RD,
                num_tokens,
                num_rows,
                D=width,
                K=row_TK.shape[1],
                BLOCK_T=block_t,
                BLOCK_D=block_d,
                enable_fp_fusion=True,
            )
    return rows_RD


def unpermute(rows_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """Launch ``unpermute_kernel``: [T, D]; without weights, a plain sum."""
    num_tokens, width = len(row_TK), rows_RD.shape[1]
    y_TD = torch.empty(num_tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    block_t, block_d = _blocks(width)
    if y_TD.numel():
        with torch.cuda.device_of(rows_RD):
            unpermute_kernel[(triton.cdiv(num_tokens, block_t), triton.cdiv(width, block_d))](
                rows_RD.contiguous(),
                rows_RD if weights_TK is None else weights_TK.contiguous(),
                row_TK.contiguous(),
                y_TD,
                num_tokens,
                D=width,
                K=row_TK.shape[1],
                WEIGHTED=weights_TK is not None,
                BLOCK_T=block_t,
                BLOCK_D=block_d,
                enable_fp_fusion=True,
            )
    return y_TD


def unpermute_backward(
    grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, slot_R: Tensor, row_TK: Tensor, *, has_blanks: bool
) -> tuple[Tensor, Tensor]:
    """Launch ``unpermute_backward_kernel``: cotangents of the rows and of the weights."""
    (num_tokens, top_k), (num_rows, width) = row_TK.shape, rows_RD.shape
    grad_rows_RD = torch.empty(num_rows, width, dtype=rows_RD.dtype, device=rows_RD.device)
    grad_weights_TK = torch.empty(num_tokens, top_k, dtype=weights_TK.dtype, device=rows_RD.device)
    block_t, block_d = _blocks(width)
    num_blocks = _num_blocks(num_tokens, num_rows, block_t, has_blanks)
    if num_blocks:
        with torch.cuda.device_of(rows_RD):
            unpermute_backward_kernel[(num_blocks,)](
                grad_TD.contiguous(),
                rows_RD.contiguous(),
                weights_TK.contiguous(),
                slot_R.contiguous(),
                row_TK.contiguous(),
                grad_rows_RD,
                grad_weights_TK,
                num_tokens,
                num_rows,
                D=width,
                K=top_k,
                BLOCK_T=block_t,
                BLOCK_D=block_d,
                BLOCK_K=triton.next_power_of_2(top_k),
                enable_fp_fusion=True,
            )
    return grad_rows_RD, grad_weights_TK
