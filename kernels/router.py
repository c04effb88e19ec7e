"""Choice of experts per token with the weights of their outputs, choices per expert and where an expert's rows end.

Legend of the shape suffixes: T tokens, E experts, K experts chosen per token.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning_moeclip.kernels.backend import runs_triton
from torch import Tensor

__all__ = ["Rule", "route"]

Rule = Literal["exact", "compensated", "dense"]
_RULES = get_args(Rule)

# what the kernels are built for; beyond, torch serves
_MAX_EXPERTS, _MAX_TOP_K = 512, 8


def route(
    logits_TE: Tensor, top_k: int, *, normalize_topk: bool, gradient: Rule = "exact"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ``top_k`` most probable experts of each token; nothing waits for the device.

    Weights are p = softmax(z), or p / sum of the chosen p. Their gradient has a closed form
    (``reference.router_logits_gradient``): with a the cotangent of the weights,
    dz_j = p_j (1[j in K] a_j - sum_K p_e a_e), or dz_j = 1[j in K] w_j (a_j - sum_K w_e a_e) when normalised. A NaN
    counts as the highest logit. Among equal logits the kernel takes the lowest id, torch any.

    Args:
        logits_TE: [T, E], z, any floating dtype; the softmax is taken in float32 at least.
        top_k: K.
        normalize_topk: divide the chosen probabilities by their sum.
        gradient: "exact". "compensated": rows of experts that were not chosen times E / K. "dense": that of the
            softmax over all experts, whatever the weights were divided by.

    Returns:
        Weights [T, K], float32 at least and differentiable; ids [T, K], int64, the most probable first; choices per
        expert [E], int64; the cumulative sum of these [E], int32.

    Raises:
        TypeError: logits that are not floating.
        ValueError: a shape, ``top_k`` or rule that cannot work.
    """
    _check(logits_TE, top_k, normalize_topk, gradient)
    if torch.compiler.is_compiling():
        return torch.ops.moeclip.route(logits_TE, top_k, normalize_topk, gradient)
    if gradient == "exact" and not _runs_triton(logits_TE, top_k):
        # autograd's own nodes give the same cotangents, and cost less than one in Python on a small layer
        return _forward(logits_TE, top_k, normalize_topk, gradient)
    return _Route.apply(logits_TE, top_k, normalize_topk, gradient)


def _check(logits_TE: Tensor, top_k: int, normalize_topk: bool, gradient: str) -> None:
    if not logits_TE.is_floating_point():
        raise TypeError(f"route got logits in {logits_TE.dtype}: they must be floating. Use logits.float().")
    if logits_TE.dim() != 2:
        raise ValueError(
            f"route got logits of shape {tuple(logits_TE.shape)}: they must be [tokens, experts]. "
            "Use logits.reshape(-1, logits.shape[-1])."
        )
    if not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(
            f"route got top_k={top_k} with logits of {logits_TE.shape[1]} experts: it must be from 1 to their number."
        )
    if gradient not in _RULES:
        raise ValueError(f"route got gradient={gradient!r}, which is no rule. Use one of {list(_RULES)}.")
    if gradient == "compensated" and normalize_topk:
        raise ValueError(
            "route got gradient='compensated' with normalize_topk=True, where inactive logits have no gradient to "
            "scale. Use normalize_topk=False, or gradient='exact'."
        )


def _runs_triton(logits_TE: Tensor, top_k: int) -> bool:
    fits = logits_TE.shape[1] <= _MAX_EXPERTS and top_k <= _MAX_TOP_K
    return fits and logits_TE.dtype != torch.float64 and runs_triton(logits_TE)


def _forward(
    logits_TE: Tensor, top_k: int, normalize_topk: bool, gradient: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _runs_triton(logits_TE, top_k):
        from lightning_moeclip.kernels import router_triton

        return router_triton.route(logits_TE, top_k, normalize_topk=normalize_topk)
    z_TE = logits_TE if logits_TE.element_size() >= 4 else logits_TE.float()
    chosen_TK = z_TE.detach().topk(top_k, dim=-1).indices
    # normalised: p / sum of the chosen p, without the detour over the others
    weights_TK = z_TE.gather(1, chosen_TK).softmax(-1) if normalize_topk else z_TE.softmax(-1).gather(1, chosen_TK)
    counts_E = _count(chosen_TK.view(-1), logits_TE.shape[1])
    return weights_TK, chosen_TK, counts_E, counts_E.cumsum(0, dtype=torch.int32)


def _count(chosen_S: Tensor, num_experts: int) -> Tensor:
    if chosen_S.is_cpu:
        return chosen_S.bincount(minlength=num_experts)
    # bincount would wait for the device
    blank_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_S.device)
    return blank_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S))


def _backward(
    grad_TK: Tensor, logits_TE: Tensor, weights_TK: Tensor, chosen_TK: Tensor, within: bool, inactive: float
) -> Tensor:
    """Cotangent of the logits: ``within`` the chosen experts, or over all, that of the others times ``inactive``."""
    if _runs_triton(logits_TE, chosen_TK.shape[1]):
        from lightning_moeclip.kernels import router_triton

        return router_triton.route_backward(grad_TK, logits_TE, weights_TK, chosen_TK, within=within, inactive=inactive)
    grad_TE = torch.zeros(logits_TE.shape, dtype=weights_TK.dtype, device=logits_TE.device)
    if within:
        chosen_grad_TK = torch.ops.aten._softmax_backward_data(grad_TK, weights_TK, -1, weights_TK.dtype)
        return grad_TE.scatter_(1, chosen_TK, chosen_grad_TK).to(logits_TE.dtype)
    grad_TE.scatter_(1, chosen_TK, grad_TK)
    probs_TE = logits_TE.to(weights_TK.dtype).softmax(-1)
    grad_TE = torch.ops.aten._softmax_backward_data(grad_TE, probs_TE, -1, probs_TE.dtype)
    if inactive != 1.0:
        grad_TE.mul_(torch.full_like(grad_TE, inactive).scatter_(1, chosen_TK, 1.0))
    return grad_TE.to(logits_TE.dtype)


def _differentiable_backward(
    grad_TK: Tensor, logits_TE: Tensor, chosen_TK: Tensor, within: bool, inactive: float
) -> Tensor:
    """The same by operations with derivatives of their own, for ``create_graph=True``."""
    z_TE = logits_TE.to(grad_TK.dtype)
    if within:
        w_TK = z_TE.gather(1, chosen_TK).softmax(-1)
        chosen_grad_TK = w_TK * (grad_TK - (w_TK * grad_TK).sum(-1, keepdim=True))
        return torch.zeros_like(z_TE).scatter(1, chosen_TK, chosen_grad_TK).to(logits_TE.dtype)
    p_TE = z_TE.softmax(-1)
    a_TE = torch.zeros_like(z_TE).scatter(1, chosen_TK, grad_TK)
    grad_TE = p_TE * (a_TE - (p_TE * a_TE).sum(-1, keepdim=True))
    factor_TE = torch.full_like(p_TE, inactive).scatter(1, chosen_TK, 1.0)
    return (grad_TE * factor_TE).to(logits_TE.dtype)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, top_k, normalize_topk, gradient = inputs
    weights_TK, chosen_TK, counts_E, ends_E = output
    ctx.save_for_backward(logits_TE, weights_TK, chosen_TK)
    ctx.mark_non_differentiable(chosen_TK, counts_E, ends_E)
    ctx.set_materialize_grads(False)
    ctx.within = normalize_topk and gradient == "exact"
    ctx.inactive = logits_TE.shape[1] / top_k if gradient == "compensated" else 1.0


def _grads(backward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, None, None, None]]:
    def grads(ctx: Any, grad_TK: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
        if grad_TK is None:
            return None, None, None, None
        logits_TE, weights_TK, chosen_TK = ctx.saved_tensors
        if torch.is_grad_enabled():
            grad_TE = _differentiable_backward(grad_TK, logits_TE, chosen_TK, ctx.within, ctx.inactive)
        else:
            grad_TE = backward(grad_TK, logits_TE, weights_TK, chosen_TK, ctx.within, ctx.inactive)
        return grad_TE, None, None, None

    return grads


class _Route(torch.autograd.Function):
    """An eager call of what ``torch.ops.moeclip.route`` is when compiled.

    Not by ``setup_context``: torch would inspect the signature in every call, 30 us of Python.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = _forward(*inputs)
        _set_up(ctx, inputs, output)
        return output

    backward = staticmethod(_grads(_backward))


_library = torch.library.Library("moeclip", "FRAGMENT")
_library.define(
    "route(Tensor logits, int top_k, bool normalize_topk, str gradient) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "route_backward(Tensor grad, Tensor logits, Tensor weights, Tensor chosen, bool within, float inactive) -> Tensor"
)
_library.impl("route", _forward, "CompositeExplicitAutograd")
_library.impl("route_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "moeclip::route", _grads(torch.ops.moeclip.route_backward.default), setup_context=_set_up, lib=_library
)


@torch.library.register_fake("moeclip::route", lib=_library)
def _(logits_TE: Tensor, top_k: int, normalize_topk: bool, gradient: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(num_tokens, top_k, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    counts_E = logits_TE.new_empty(num_experts, dtype=torch.int64)
    return weights_TK, torch.empty_like(weights_TK, dtype=torch.int64), counts_E, counts_E.to(torch.int32)


@torch.library.register_fake("moeclip::route_backward", lib=_library)
def _(
    grad_TK: Tensor, logits_TE: Tensor, weights_TK: Tensor, chosen_TK: Tensor, within: bool, inactive: float
) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape)
