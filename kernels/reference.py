"""The truths that kernels and modules are held to: plain torch, dense, in any floating dtype including float64.

Legend of the shape suffixes: N samples of the global batch, D feature width; T tokens, H hidden width, E experts,
K experts chosen per token, R rows (copies of tokens). Written for reading, not for speed.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "contrastive_loss",
    "gradient_sums",
    "load_balance_loss",
    "mate_sums",
    "moe_layer",
    "packed_gradient",
    "permute",
    "residual_sums",
    "route",
    "router_logits_gradient",
    "router_z_loss",
    "sigmoid_loss",
    "sort_by_expert",
    "unpermute",
]


def contrastive_loss(image_ND: Tensor, text_ND: Tensor, logit_scale: Tensor) -> Tensor:
    """Symmetric InfoNCE of a whole batch, by a dense N x N matrix of logits.

    L = 1/(2N) [sum_i (lse_j z_ij - z_ii) + sum_j (lse_i z_ij - z_jj)], z_ij = exp(logit_scale) I_i . T_j.
    CLIP (Radford et al. 2021), figure 3.

    Args:
        image_ND: [N, D], image features as they enter the product.
        text_ND: [N, D], row i is the partner of image i.
        logit_scale: 0-d, the log of the scale.

    Returns:
        0-d, the mean over both directions and all samples.
    """
    z_NN = logit_scale.exp() * (image_ND @ text_ND.T)
    by_image_N = z_NN.logsumexp(dim=1) - z_NN.diagonal()
    by_text_N = z_NN.logsumexp(dim=0) - z_NN.diagonal()
    return (by_image_N.sum() + by_text_N.sum()) / (2 * len(z_NN))


def sigmoid_loss(image_ND: Tensor, text_ND: Tensor, logit_scale: Tensor, logit_bias: Tensor) -> Tensor:
    """Pairwise sigmoid loss of a whole batch, by a dense N x N matrix of logits.

    L = 1/N sum_ij softplus(-y_ij (exp(logit_scale) I_i . T_j + logit_bias)), y_ii = 1 and -1 elsewhere.
    SigLIP (Zhai et al. 2023), equation 1 and algorithm 1.

    Args:
        image_ND: [N, D], image features as they enter the product.
        text_ND: [N, D], row i is the partner of image i.
        logit_scale: 0-d, the log of the scale.
        logit_bias: 0-d, added to every logit.

    Returns:
        0-d, the sum over all pairs divided by N.
    """
    z_NN = logit_scale.exp() * (image_ND @ text_ND.T) + logit_bias
    y_NN = 2 * torch.eye(len(z_NN), dtype=z_NN.dtype, device=z_NN.device) - 1
    # not F.softplus: beyond 20 it is the identity, an error of 2e-9
    return -torch.nn.functional.logsigmoid(y_NN * z_NN).sum() / len(z_NN)


def moe_layer(
    x_TD: Tensor,
    router_ED: Tensor,
    w_in_EDH: Tensor,
    w_out_EHD: Tensor,
    top_k: int,
    *,
    normalize_topk: bool,
) -> Tensor:
    """Y = sum over the top_k experts e of w_e gelu(x w_in[e]) w_out[e], every expert computed for every token.

    Args:
        x_TD: [T, D], tokens.
        router_ED: [E, D], row e gives the logit of expert e, without bias.
        w_in_EDH: [E, D, H], first weights of the experts, applied from the right.
        w_out_EHD: [E, H, D], second weights of the experts, applied from the right.
        top_k: K, experts chosen per token, at most E.
        normalize_topk: divide the weights of the chosen experts by their sum.

    Returns:
        [T, D]. ``w`` is the softmax over all experts, divided by its sum over the chosen ones if normalised.
    """
    probs_TE = (x_TD @ router_ED.T).softmax(-1)
    chosen_TK = probs_TE.topk(top_k, dim=-1).indices
    mask_TE = torch.zeros_like(probs_TE).scatter(1, chosen_TK, 1.0)
    weights_TE = probs_TE * mask_TE
    if normalize_topk:
        weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    hidden_ETH = torch.nn.functional.gelu(torch.einsum("td,edh->eth", x_TD, w_in_EDH))
    return torch.einsum("te,eth,ehd->td", weights_TE, hidden_ETH, w_out_EHD)


def router_logits_gradient(
    logits_TE: Tensor, chosen_TK: Tensor, alignment_TE: Tensor, *, normalize_topk: bool, rule: str = "exact"
) -> Tensor:
    """dL/dz of the router logits z, from a_e = <dL/dy, f_e>.

    With p = softmax(z), K the chosen experts and w their weights:
    exact, w = p: dL/dz_j = p_j (1[j in K] a_j - sum_K p_e a_e);
    exact, w = p / sum_K p: dL/dz_j = 1[j in K] w_j (a_j - sum_K w_e a_e);
    compensated: the first with the rows of inactive experts times E / K;
    dense: p_j (a_j - sum over all e of p_e a_e), where a of an inactive expert is taken with its mean output.

    Args:
        logits_TE: [T, E], z.
        chosen_TK: [T, K], int64, distinct ids of the chosen experts of each token, in any order.
        alignment_TE: [T, E], a: product of the cotangent of a token's output with the output of each expert. Of
            experts that were not chosen only the rule "dense" reads it.
        normalize_topk: the weights of the chosen experts were divided by their sum; only the rule "exact" knows both.
        rule: "exact", "compensated" or "dense".

    Returns:
        [T, E].
    """
    probs_TE = logits_TE.softmax(-1)
    chosen_TE = torch.zeros_like(probs_TE).scatter(1, chosen_TK, 1.0)
    if rule == "dense":
        return probs_TE * (alignment_TE - (probs_TE * alignment_TE).sum(-1, keepdim=True))
    weights_TE = probs_TE * chosen_TE
    if normalize_topk:
        weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
        return weights_TE * (alignment_TE - (weights_TE * alignment_TE).sum(-1, keepdim=True))
    exact_TE = probs_TE * (chosen_TE * alignment_TE - (weights_TE * alignment_TE).sum(-1, keepdim=True))
    if rule == "compensated":
        factor = logits_TE.shape[1] / chosen_TK.shape[1]
        return torch.where(chosen_TE.bool(), exact_TE, factor * exact_TE)
    return exact_TE


def load_balance_loss(logits_TE: Tensor, top_k: int) -> Tensor:
    """E * sum_e f_e P_e (Switch Transformer, Fedus et al. 2021, equations 4-6), over all tokens of all ranks.

    f_e is the share of the T * top_k choices that fell on expert e, P_e the mean probability of e. No tokens: zero.
    """
    num_tokens, num_experts = logits_TE.shape
    if num_tokens == 0:
        return logits_TE.sum()
    probs_TE = logits_TE.softmax(-1)
    chosen_TK = logits_TE.topk(top_k, dim=-1).indices
    share_E = torch.zeros_like(probs_TE).scatter(1, chosen_TK, 1.0).sum(0) / (top_k * num_tokens)
    return num_experts * (share_E * probs_TE.mean(0)).sum()


def router_z_loss(logits_TE: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(z)^2 (ST-MoE, Zoph et al. 2022, equation 5). No tokens: zero."""
    return logits_TE.logsumexp(-1).square().sum() / max(logits_TE.shape[0], 1)


def route(logits_TE: Tensor, top_k: int, *, normalize_topk: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, ids, choices per expert and their cumulative sum, one token after another.

    The highest logits are chosen, a NaN first of all and the lower id among equals.

    Args:
        logits_TE: [T, E].
        top_k: K.
        normalize_topk: divide the weights by their sum.

    Returns:
        [T, K] differentiable; [T, K], int64; [E], int64; [E], int32.
    """
    num_tokens, num_experts = logits_TE.shape
    weights_TK = logits_TE.new_zeros(num_tokens, top_k)
    chosen_TK = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    counts_E = torch.zeros(num_experts, dtype=torch.int64)
    for t, logits_E in enumerate(logits_TE):
        z = [math.inf if math.isnan(value) else value for value in logits_E.tolist()]
        is_nan = [math.isnan(value) for value in logits_E.tolist()]
        ids = sorted(range(num_experts), key=lambda e: (not is_nan[e], -z[e], e))[:top_k]
        w_K = logits_E.softmax(-1)[ids]
        weights_TK[t] = w_K / w_K.sum() if normalize_topk else w_K
        chosen_TK[t] = torch.tensor(ids)
        for e in ids:
            counts_E[e] += 1
    return weights_TK, chosen_TK, counts_E, counts_E.cumsum(0).to(torch.int32)


def sort_by_expert(chosen_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Choices in the order of their experts, each expert's in the order of the tokens: slot [T * K], row [T, K]."""
    ids = chosen_TK.reshape(-1).tolist()
    slots = [s for e in range(num_experts) for s, chosen in enumerate(ids) if chosen == e]
    rows = [0] * len(ids)
    for r, s in enumerate(slots):
        rows[s] = r
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64).view(chosen_TK.shape)


def permute(x_TD: Tensor, slot_R: Tensor, top_k: int) -> Tensor:
    """Row r is a copy of the token of choice slot[r], zeros where that is negative: [R, D]."""
    rows = [x_TD[s // top_k] if s >= 0 else torch.zeros_like(x_TD[0]) for s in slot_R.tolist()]
    return torch.stack(rows) if rows else x_TD.new_zeros(0, x_TD.shape[1])


def unpermute(rows_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """y_t = sum over k of weights[t, k] * rows[row[t, k]], without the choices whose row is negative: [T, D]."""
    y = [rows_RD.new_zeros(rows_RD.shape[1]) for _ in range(len(row_TK))]
    for t, of_choices in enumerate(row_TK.tolist()):
        for k, r in enumerate(of_choices):
            if r >= 0:
                y[t] = y[t] + weights_TK[t, k] * rows_RD[r]
    return torch.stack(y) if y else rows_RD.new_zeros(0, rows_RD.shape[1])


def packed_gradient(gradient: Tensor, factor: Tensor, *, before: Tensor | None = None) -> Tensor:
    """Before + factor * gradient, not rounded: [shape of the gradient], float64 or complex128."""
    wide = torch.promote_types(gradient.dtype, torch.float64)
    product = gradient.to(wide) * factor.to(torch.float64)
    return product if before is None else before.to(wide) + product


def gradient_sums(gradient: Tensor) -> Tensor:
    """[7], float64: size, sum, squares, absolutes, non-finite, zeros and largest absolute of what is finite."""
    values = _reals(gradient)
    finite = values[values.isfinite()]
    counts = [float(len(values)), float(len(values) - len(finite)), float((values == 0).sum())]
    size, num_nonfinite, num_zeros = (values.new_tensor(count) for count in counts)
    sums = [finite.sum(), finite.square().sum(), finite.abs().sum()]
    largest = finite.abs().max() if len(finite) else values.new_zeros(())
    return torch.stack([size, *sums, num_nonfinite, num_zeros, largest])


def mate_sums(place: Tensor, mate: Tensor) -> Tensor:
    """[2], float64: dot product over what is finite in both, and the square of the mate."""
    own, other = _reals(place), _reals(mate)
    is_known = own.isfinite() & other.isfinite()
    return torch.stack([(own * other)[is_known].sum(), other[other.isfinite()].square().sum()])


def residual_sums(source: Tensor, before: Tensor) -> Tensor:
    """[2], float64: sums of |before - source| and of |before| over what is finite."""
    difference, own = _reals(before) - _reals(source), _reals(before)
    return torch.stack([difference[difference.isfinite()].abs().sum(), own[own.isfinite()].abs().sum()])


def _reals(tensor: Tensor) -> Tensor:
    """Elements in the order of their indices, in float64; a complex one is two."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return values.reshape(-1).double()
