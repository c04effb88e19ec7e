"""Triton kernels of the router: one pass over the logits forward, one backward, and a fold of the counts.

Legend of the shape suffixes: T tokens of a tile, E experts, K experts chosen per token, all padded to powers of two; B
programs.
"""

# the types of a kernel's arguments are those of its launch
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from lightning_moeclip.kernels.backend import num_warps
from torch import Tensor

__all__ = ["route", "route_backward"]

_TILE = 512  # logits per tile: 16 bytes per thread; with 8 choices, more of them do not fit into registers
_NUM_THREADS = 128
_FOLD = 4096  # counts per step of the fold
_LOWEST = tl.constexpr(-(2**31))  # below the order of every logit, -inf included
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _order(z_TE):
    """Integers that sort as the numbers do, equal zeros equal and NaN above all."""
    z_TE = tl.where(z_TE == 0, 0.0, z_TE)
    bits_TE = z_TE.to(tl.int32, bitcast=True)
    order_TE = tl.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE)
    return tl.where(z_TE != z_TE, _HIGHEST, order_TE)


@triton.jit
def _top(z_TE, e_E, k_K, E: tl.constexpr, K: tl.constexpr):
    """The K highest of each row, the lowest id among equals: logits, ids and a tile that is 1 where chosen."""
    order_TE = tl.where((e_E < E)[None, :], _order(z_TE), _LOWEST)
    is_chosen_TE = tl.zeros(z_TE.shape, tl.int32)
    z_TK = tl.zeros([z_TE.shape[0], k_K.shape[0]], tl.float32)
    id_TK = tl.zeros([z_TE.shape[0], k_K.shape[0]], tl.int32)
    for k in tl.static_range(K):
        highest_T = tl.max(order_TE, axis=1)
        id_T = tl.min(tl.where(order_TE == highest_T[:, None], e_E[None, :], E - 1), axis=1)
        is_here_TE = e_E[None, :] == id_T[:, None]
        z_T = tl.sum(tl.where(is_here_TE, z_TE, 0.0), axis=1)  # one term
        z_TK = tl.where((k_K == k)[None, :], z_T[:, None], z_TK)
        id_TK = tl.where((k_K == k)[None, :], id_T[:, None], id_TK)
        is_chosen_TE += is_here_TE.to(tl.int32)
        order_TE = tl.where(is_here_TE, _LOWEST, order_TE)
    return z_TK, id_TK, is_chosen_TE


@triton.jit
def route_kernel(
    logits,
    weights,
    chosen,
    partial,
    num_tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weights and ids of TILES * BLOCK_T tokens, and the choices per expert among them as one row of ``partial``."""
    e_E = tl.arange(0, BLOCK_E)
    k_K = tl.arange(0, BLOCK_K)
    counts_E = tl.zeros([BLOCK_E], tl.int32)
    for tile in range(TILES):
        t_T = (tl.program_id(0).to(tl.int64) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token_T = t_T < num_tokens
        is_logit_TE = is_token_T[:, None] & (e_E < E)[None, :]
        z_TE = tl.load(logits + t_T[:, None] * E + e_E[None, :], mask=is_logit_TE, other=0.0).to(tl.float32)
        z_TK, id_TK, is_chosen_TE = _top(z_TE, e_E, k_K, E, K)
        if NORMALIZE:
            # the first is the highest
            highest_T = tl.sum(tl.where((k_K == 0)[None, :], z_TK, 0.0), axis=1)
            exp_TK = tl.where((k_K < K)[None, :], tl.exp(z_TK - highest_T[:, None]), 0.0)
            sum_T = tl.sum(exp_TK, axis=1)
        else:
            highest_T = tl.max(tl.where((e_E < E)[None, :], z_TE, float("-inf")), axis=1)
            exp_TK = tl.exp(z_TK - highest_T[:, None])
            sum_T = tl.sum(tl.where((e_E < E)[None, :], tl.exp(z_TE - highest_T[:, None]), 0.0), axis=1)
        place_TK = t_T[:, None] * K + k_K[None, :]
        is_choice_TK = is_token_T[:, None] & (k_K < K)[None, :]
        tl.store(weights + place_TK, exp_TK / sum_T[:, None], mask=is_choice_TK)
        tl.store(chosen + place_TK, id_TK.to(tl.int64), mask=is_choice_TK)
        counts_E += tl.sum(tl.where(is_token_T[:, None], is_chosen_TE, 0), axis=0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * E + e_E, counts_E, mask=e_E < E)


@triton.jit
def fold_kernel(partial, counts, ends, num_rows, E: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Sum of the rows of ``partial`` and its cumulative sum over the experts, by one program."""
    e_E = tl.arange(0, BLOCK_E)
    sum_BE = tl.zeros([BLOCK_B, BLOCK_E], tl.int32)
    first = 0
    while first < num_rows:
        b_B = first + tl.arange(0, BLOCK_B)
        is_count_BE = (b_B < num_rows)[:, None] & (e_E < E)[None, :]
        sum_BE += tl.load(partial + b_B[:, None].to(tl.int64) * E + e_E[None, :], mask=is_count_BE, other=0)
        first += BLOCK_B
    counts_E = tl.sum(sum_BE, axis=0)
    tl.store(counts + e_E, counts_E.to(tl.int64), mask=e_E < E)
    tl.store(ends + e_E, tl.cumsum(counts_E, axis=0), mask=e_E < E)


@triton.jit
def route_backward_kernel(
    grad,
    logits,
    weights,
    chosen,
    grad_logits,
    num_tokens,
    inactive,
    E: tl.constexpr,
    K: tl.constexpr,
    WITHIN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Cotangents of the logits of BLOCK_T tokens."""
    t_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e_E = tl.arange(0, BLOCK_E)
    is_token_T = t_T < num_tokens
    is_logit_TE = is_token_T[:, None] & (e_E < E)[None, :]
    a_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    p_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    is_chosen_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for k in tl.static_range(K):
        id_T = tl.load(chosen + t_T * K + k, mask=is_token_T, other=0).to(tl.int32)
        a_T = tl.load(grad + t_T * K + k, mask=is_token_T, other=0.0)
        is_here_TE = e_E[None, :] == id_T[:, None]
        a_TE = tl.where(is_here_TE, a_T[:, None], a_TE)
        is_chosen_TE += is_here_TE.to(tl.int32)
        if WITHIN:
            w_T = tl.load(weights + t_T * K + k, mask=is_token_T, other=0.0)
            p_TE = tl.where(is_here_TE, w_T[:, None], p_TE)
    if not WITHIN:
        z_TE = tl.load(logits + t_T[:, None] * E + e_E[None, :], mask=is_logit_TE, other=0.0).to(tl.float32)
        highest_T = tl.max(tl.where((e_E < E)[None, :], z_TE, float("-inf")), axis=1)
        p_TE = tl.where((e_E < E)[None, :], tl.exp(z_TE - highest_T[:, None]), 0.0)
        p_TE = p_TE / tl.sum(p_TE, axis=1)[:, None]
    grad_TE = p_TE * (a_TE - tl.sum(p_TE * a_TE, axis=1)[:, None])
    if WITHIN:
        # not by the zero in p: the row of a NaN would spread
        grad_TE = tl.where(is_chosen_TE > 0, grad_TE, 0.0)
    else:
        grad_TE = tl.where(is_chosen_TE > 0, grad_TE, grad_TE * inactive)
    place_TE = t_T[:, None] * E + e_E[None, :]
    tl.store(grad_logits + place_TE, grad_TE.to(grad_logits.dtype.element_ty), mask=is_logit_TE)


def _tile(num_experts: int) -> tuple[int, int]:
    """Tokens and experts of a tile."""
    block_e = triton.next_power_of_2(num_experts)
    return min(128, max(1, _TILE // block_e)), block_e


def route(logits_TE: Tensor, top_k: int, *, normalize_topk: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the two kernels of the forward; what ``router.route`` returns, without a gradient."""
    logits_TE = logits_TE.contiguous()
    num_tokens, num_experts = logits_TE.shape
    block_t, block_e = _tile(num_experts)
    # fewer rows to fold, where a tile holds few tokens
    tiles = max(1, 64 // block_t)
    num_programs = triton.cdiv(num_tokens, tiles * block_t)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    chosen_TK = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    partial_BE = torch.empty(num_programs, num_experts, dtype=torch.int32, device=logits_TE.device)
    counts_E = torch.empty(num_experts, dtype=torch.int64, device=logits_TE.device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=logits_TE.device)
    if num_tokens:
        with torch.cuda.device_of(logits_TE):
            route_kernel[(num_programs,)](
                logits_TE,
                weights_TK,
                chosen_TK,
                partial_BE,
                num_tokens,
                E=num_experts,
                K=top_k,
                NORMALIZE=normalize_topk,
                TILES=tiles,
                BLOCK_T=block_t,
                BLOCK_E=block_e,
                BLOCK_K=triton.next_power_of_2(top_k),
                num_warps=num_warps(_NUM_THREADS),
                enable_fp_fusion=True,
            )
    with torch.cuda.device_of(counts_E):
        fold_kernel[(1,)](
            partial_BE,
            counts_E,
            ends_E,
            num_programs,
            E=num_experts,
            BLOCK_B=max(1, _FOLD // block_e),
            BLOCK_E=block_e,
            enable_fp_fusion=True,
        )
    return weights_TK, chosen_TK, counts_E, ends_E


def route_backward(
    grad_TK: Tensor, logits_TE: Tensor, weights_TK: Tensor, chosen_TK: Tensor, *, within: bool, inactive: float
) -> Tensor:
    """Launch the kernel of the backward; the cotangent of the logits, in their dtype."""
    logits_TE = logits_TE.contiguous()
    num_tokens, num_experts = logits_TE.shape
    block_t, block_e = _tile(num_experts)
    grad_TE = torch.empty_like(logits_TE)
    if num_tokens:
        with torch.cuda.device_of(logits_TE):
            route_backward_kernel[(triton.cdiv(num_tokens, block_t),)](
                grad_TK.contiguous(),
                logits_TE,
                weights_TK.contiguous(),
                chosen_TK.contiguous(),
                grad_TE,
                num_tokens,
                inactive,
                E=num_experts,
                K=chosen_TK.shape[1],
                WITHIN=within,
                BLOCK_T=block_t,
                BLOCK_E=block_e,
                num_warps=num_warps(_NUM_THREADS),
                enable_fp_fusion=True,
            )
    return grad_TE
