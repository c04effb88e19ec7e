"""Triton kernels of the losses over pairs: tiles of logits that never leave a multiprocessor.

Legend of the shape suffixes: M own rows, N columns of one launch, D feature width; B the rows of a tile, C its columns,
K its step along D; T tiles that are folded.

A program computes one tile of logits, in float32, and reduces it: to a maximum and a sum per row and per column, to one
sum, or to the gradient of the tile. Each writes to a place of its own and a second kernel folds in a fixed order, in
float64: no atomics, the same bits every time. Products of 16-bit features are exact in float32, so they enter the
tensor cores as they are and the scale multiplies the sum. Row ``i``'s partner is column ``i + shift`` of the launch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

__all__ = [
    "clip_gradient_kernel",
    "clip_statistics_kernel",
    "fold_kernel",
    "sigmoid_gradient_kernel",
    "sigmoid_sum_kernel",
]

# programs that run at a time share rows of this many tiles, so that texts come from the cache
_GROUP = tl.constexpr(8)


@triton.jit
def _place(M, N, B: tl.constexpr, C: tl.constexpr):
    """Row and column of this program's tile among the tiles."""
    num_rows, num_columns = tl.cdiv(M, B), tl.cdiv(N, C)
    program = tl.program_id(0)
    first = program // (_GROUP * num_columns) * _GROUP
    height = tl.minimum(num_rows - first, _GROUP)
    within = program % (_GROUP * num_columns)
    return first + within % height, within // height


@triton.jit
def _logits(
    image_MD, text_ND, scale, row_B, column_C, M, N,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """The tile [B, C] of scale * image . text, float32; 0 beyond the edges."""
    k_K = tl.arange(0, K)
    image_BK = image_MD + row_B.to(tl.int64)[:, None] * D + k_K[None, :]
    text_KC = text_ND + column_C.to(tl.int64)[None, :] * D + k_K[:, None]
    has_row, has_column = (row_B < M)[:, None], (column_C < N)[None, :]
    sum_BC = tl.zeros((B, C), tl.float32)
    for k in range(0, D, K):
        if D % K == 0:
            x_BK = tl.load(image_BK + k, mask=has_row, other=0.0)
            y_KC = tl.load(text_KC + k, mask=has_column, other=0.0)
        else:
            x_BK = tl.load(image_BK + k, mask=has_row & (k_K < D - k)[None, :], other=0.0)
            y_KC = tl.load(text_KC + k, mask=has_column & (k_K < D - k)[:, None], other=0.0)
        if WIDENS:  # the interpreter has no bfloat16 arithmetic
            x_BK, y_KC = x_BK.to(tl.float32), y_KC.to(tl.float32)
        sum_BC = tl.dot(x_BK, y_KC, sum_BC, input_precision=PRECISION)
    return sum_BC * tl.load(scale).to(tl.float32)


@triton.jit
def _has_pairs(row, column, shift, B: tl.constexpr, C: tl.constexpr):
    """Whether the partner of any row of the tile may be among its columns."""
    return (row + shift < column + C) & (row + shift + B > column)


@triton.jit
def _store_tile(gradient, g_BC, row, column, M, width, B: tl.constexpr, C: tl.constexpr):
    """Round a tile into [M, width], from its place on.

    As a vector, since on AMD's matrices a thread holds 4 numbers of a row, which are 8 bytes of 16-bit numbers, and
    Triton stores them as they lie: a vector it lays anew.
    """
    at_BC = tl.arange(0, B * C)
    row_BC, column_BC = row + at_BC // C, column + at_BC % C
    mask_BC = (row_BC < M) & (column_BC < width)
    stored_BC = tl.reshape(g_BC.to(gradient.dtype.element_ty), (B * C,))
    tl.store(gradient + row_BC.to(tl.int64) * width + column_BC, stored_BC, mask=mask_BC)


@triton.jit
def _store_row_sums(sums, x_BC, B: tl.constexpr):
    """Sums over the rows of a tile into [programs, B].

    Not their sum: where the logits go into two results, Triton 3.6 fails on sm_100 at a reduction of a vector.
    """
    tl.store(sums + tl.program_id(0).to(tl.int64) * B + tl.arange(0, B), tl.sum(x_BC, 1))


@triton.jit
def clip_statistics_kernel(
    image_MD, text_ND, scale, row_top, row_sum, column_top, column_sum, positives_M, M, N, shift,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Of each tile the maximum and the sum of exp(z - maximum) over its rows, [tiles, M], and columns, [tiles, N]."""
    tile_row, tile_column = _place(M, N, B, C)
    row_B = tile_row * B + tl.arange(0, B)
    column_C = tile_column * C + tl.arange(0, C)
    z_BC = _logits(image_MD, text_ND, scale, row_B, column_C, M, N, D, B, C, K, PRECISION, WIDENS)
    has_row, has_column = row_B < M, column_C < N
    if _has_pairs(tile_row * B, tile_column * C, shift, B, C):
        partner_B = row_B + shift
        pair_B = tl.sum(tl.where(column_C[None, :] == partner_B[:, None], z_BC, 0.0), 1)
        is_here = has_row & (partner_B >= tile_column * C) & (partner_B < tile_column * C + C)
        tl.store(positives_M + row_B, pair_B.to(tl.float64), mask=is_here)
    z_BC = tl.where(has_row[:, None] & has_column[None, :], z_BC, float("-inf"))
    top_B, top_C = tl.max(z_BC, 1), tl.max(z_BC, 0)
    # -inf - -inf is NaN, where a sum of nothing is 0
    shift_B = tl.where(top_B == float("-inf"), 0.0, top_B)
    shift_C = tl.where(top_C == float("-inf"), 0.0, top_C)
    at_B = tile_column.to(tl.int64) * M + row_B
    tl.store(row_top + at_B, top_B, mask=has_row)
    tl.store(row_sum + at_B, tl.sum(tl.exp(z_BC - shift_B[:, None]), 1), mask=has_row)
    at_C = tile_row.to(tl.int64) * N + column_C
    tl.store(column_top + at_C, top_C, mask=has_column)
    tl.store(column_sum + at_C, tl.sum(tl.exp(z_BC - shift_C[None, :]), 0), mask=has_column)


@triton.jit
def fold_kernel(top, total, result, num_tiles, length, T: tl.constexpr, B: tl.constexpr):
    """Take num_tiles maxima and sums of each of ``length`` lines, [num_tiles, length], into log-sum-exps, float64."""
    at_B = tl.program_id(0) * B + tl.arange(0, B)
    is_here = at_B < length
    before_B = tl.load(result + at_B, mask=is_here, other=float("-inf"))
    top_B = before_B
    first = 0
    while first < num_tiles:
        tile_T = first + tl.arange(0, T)
        at_TB = tile_T.to(tl.int64)[:, None] * length + at_B[None, :]
        mask_TB = (tile_T < num_tiles)[:, None] & is_here[None, :]
        top_TB = tl.load(top + at_TB, mask=mask_TB, other=float("-inf")).to(tl.float64)
        top_B = tl.maximum(top_B, tl.max(top_TB, 0))
        first += T
    shift_B = tl.where(top_B == float("-inf"), 0.0, top_B)
    sum_B = tl.exp(before_B - shift_B)
    first = 0
    while first < num_tiles:
        tile_T = first + tl.arange(0, T)
        at_TB = tile_T.to(tl.int64)[:, None] * length + at_B[None, :]
        mask_TB = (tile_T < num_tiles)[:, None] & is_here[None, :]
        top_TB = tl.load(top + at_TB, mask=mask_TB, other=float("-inf")).to(tl.float64)
        total_TB = tl.load(total + at_TB, mask=mask_TB, other=0.0).to(tl.float64)
        sum_B += tl.sum(total_TB * tl.exp(top_TB - shift_B[None, :]), 0)
        first += T
    is_empty = sum_B == 0.0
    found_B = tl.where(is_empty, float("-inf"), shift_B + tl.log(tl.where(is_empty, 1.0, sum_B)))
    tl.store(result + at_B, found_B, mask=is_here)


@triton.jit
def _weights(logsumexp, factor, is_here):
    """Log-sum-exps rounded to float32, and factors that hold what the rounding took away."""
    exact = tl.load(logsumexp, mask=is_here, other=0.0)
    rounded = exact.to(tl.float32)
    return rounded, factor * tl.exp((rounded.to(tl.float64) - exact).to(tl.float32))


@triton.jit
def clip_gradient_kernel(
    image_MD, text_ND, scale, by_row_M, by_column_N, row_factor, column_factor_N, gradient, sums, M, N, shift,
    width,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """G = a (p - d) + b_j (q - d) of each tile into gradient, [M, width]; 0 in its columns beyond N; G z by row."""
    tile_row, tile_column = _place(M, N, B, C)
    row_B = tile_row * B + tl.arange(0, B)
    column_C = tile_column * C + tl.arange(0, C)
    has_row, has_column = row_B < M, column_C < N
    z_BC = _logits(image_MD, text_ND, scale, row_B, column_C, M, N, D, B, C, K, PRECISION, WIDENS)
    a = tl.load(row_factor).to(tl.float32)
    b_C = tl.load(column_factor_N + column_C, mask=has_column, other=0.0).to(tl.float32)
    shift_B, weight_B = _weights(by_row_M + row_B, a, has_row)
    shift_C, weight_C = _weights(by_column_N + column_C, b_C, has_column)
    g_BC = tl.exp(z_BC - shift_C[None, :]) * weight_C[None, :] + tl.exp(z_BC - shift_B[:, None]) * weight_B[:, None]
    if _has_pairs(tile_row * B, tile_column * C, shift, B, C):
        is_pair = column_C[None, :] == (row_B + shift)[:, None]
        g_BC = tl.where(is_pair, g_BC - (a + b_C)[None, :], g_BC)
    g_BC = tl.where(has_row[:, None] & has_column[None, :], g_BC, 0.0)
    _store_row_sums(sums, g_BC * z_BC, B)
    _store_tile(gradient, g_BC, tile_row * B, tile_column * C, M, width, B, C)


@triton.jit
def _signed_logits(
    image_MD, text_ND, scale, bias, tile_row, tile_column, M, N, shift,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Y (z + bias) of a tile, and exp(-|z + bias|)."""
    row_B = tile_row * B + tl.arange(0, B)
    column_C = tile_column * C + tl.arange(0, C)
    z_BC = _logits(image_MD, text_ND, scale, row_B, column_C, M, N, D, B, C, K, PRECISION, WIDENS)
    signed_BC = -z_BC - tl.load(bias).to(tl.float32)
    if _has_pairs(tile_row * B, tile_column * C, shift, B, C):
        signed_BC = tl.where(column_C[None, :] == (row_B + shift)[:, None], -signed_BC, signed_BC)
    return signed_BC, tl.exp(-tl.abs(signed_BC))


@triton.jit
def _log1p(e):
    """log(1 + e) for 0 <= e <= 1, to the last digits of e: 2 atanh(e / (2 + e)).

    log(1 + e) itself would lose a small e in the 1, and the GPU's log2 knows no relative error near 1. With
    s = e / (2 + e) <= 1/3 the series 2 (s + s^3/3 + ... + s^15/15) leaves out less than 2e-9 of the value.
    """
    s = e / (2.0 + e)
    w = s * s
    series = 1.0 / 13.0 + w * (1.0 / 15.0)
    series = 1.0 / 11.0 + w * series
    series = 1.0 / 9.0 + w * series
    series = 1.0 / 7.0 + w * series
    series = 1.0 / 5.0 + w * series
    series = 1.0 / 3.0 + w * series
    return 2.0 * (s + s * w * series)


@triton.jit
def sigmoid_sum_kernel(
    image_MD, text_ND, scale, bias, sums, M, N, shift,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """The sum of softplus(-y (z + bias)) over each tile, [programs]."""
    tile_row, tile_column = _place(M, N, B, C)
    signed_BC, e_BC = _signed_logits(
        image_MD, text_ND, scale, bias, tile_row, tile_column, M, N, shift, D, B, C, K, PRECISION, WIDENS
    )
    each_BC = _log1p(e_BC) + tl.maximum(-signed_BC, 0.0)  # which may drop NaN, but the logarithm keeps it
    has_row, has_column = tile_row * B + tl.arange(0, B) < M, tile_column * C + tl.arange(0, C) < N
    each_BC = tl.where(has_row[:, None] & has_column[None, :], each_BC, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(each_BC, 1), 0))


@triton.jit
def sigmoid_gradient_kernel(
    image_MD, text_ND, scale, bias, gradient, sums, row_sums, pull_M, M, N, shift, width,
    D: tl.constexpr, B: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, WIDENS: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """G = -y sigmoid(-y (z + bias)): GAIN G into gradient, [M, width], its sum, G (z + bias) by row, pairs."""
    tile_row, tile_column = _place(M, N, B, C)
    row_B = tile_row * B + tl.arange(0, B)
    column_C = tile_column * C + tl.arange(0, C)
    has_row, has_column = row_B < M, column_C < N
    signed_BC, e_BC = _signed_logits(
        image_MD, text_ND, scale, bias, tile_row, tile_column, M, N, shift, D, B, C, K, PRECISION, WIDENS
    )
    g_BC = tl.where(signed_BC > 0, e_BC, 1.0) / (1.0 + e_BC)
    g_BC = tl.where(has_row[:, None] & has_column[None, :], g_BC, 0.0)
    # both without the sign of a pair, and before the branch, so that no tile of logits waits in registers for its end
    _store_row_sums(row_sums, -g_BC * signed_BC, B)
    if _has_pairs(tile_row * B, tile_column * C, shift, B, C):
        partner_B = row_B + shift
        is_pair = column_C[None, :] == partner_B[:, None]
        g_BC = tl.where(is_pair, -g_BC, g_BC)
        is_here = has_row & (partner_B >= tile_column * C) & (partner_B < tile_column * C + C)
        tl.store(pull_M + row_B, tl.sum(tl.where(is_pair, g_BC, 0.0), 1), mask=is_here)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(g_BC, 1), 0))
    _store_tile(gradient, g_BC * GAIN, tile_row * B, tile_column * C, M, width, B, C)
