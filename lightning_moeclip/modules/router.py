"""Choice of experts per token and its gradient rules.

Shapes: T tokens, D width, E experts, K experts chosen per token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_moeclip.kernels.router import Rule as RouterGradient
from lightning_moeclip.kernels.router import route

__all__ = ["OutputMean", "Router", "RouterGradient", "Routing"]


@dataclass(frozen=True)
class Routing:
    """What a router decided for a batch of tokens.

    Attributes:
        logits: [T, E], float32 at least.
        weights: [T, K], of each chosen expert, differentiable.
        chosen: [T, K], expert ids, int64, the most probable first.
        counts: [E], choices per expert, int64.
        ends: [E], the cumulative sum of ``counts``, int32.
    """

    logits: Tensor
    weights: Tensor
    chosen: Tensor
    counts: Tensor
    ends: Tensor


def _at_least_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A cast or move of a module's tensors that stops at float32."""

    def cast(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.is_floating_point() and moved.element_size() < 4:
            # from the original: through 16 bits it would lose what a router resolves
            return tensor.to(device=moved.device, dtype=torch.float32)
        return moved

    return cast


def check_router(num_experts: int, top_k: int, normalize_topk: bool, router_gradient: str) -> None:
    """Refuse settings that cannot train.

    Raises:
        ValueError: with what was given, what must hold and what to write.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k={top_k} experts per token out of num_experts={num_experts}: top_k must be from 1 to num_experts. "
            f"Use top_k={min(max(top_k, 1), max(num_experts, 1))}."
        )
    if normalize_topk and top_k == 1:
        raise ValueError(
            "normalize_topk=True with top_k=1 makes every weight 1, so the router would get no gradient at all. "
            "Use normalize_topk=False, or top_k=2."
        )
    if router_gradient not in get_args(RouterGradient):
        raise ValueError(
            f"router_gradient={router_gradient!r} is not a rule. Use one of {list(get_args(RouterGradient))}."
        )
    if router_gradient == "compensated" and normalize_topk:
        raise ValueError(
            "router_gradient='compensated' scales the gradient of inactive logits, which is zero when the weights are "
            "renormalised. Use normalize_topk=False, or router_gradient='exact'."
        )


class Router(nn.Module):
    """Linear router with softmax over all experts, in float32 at least whatever dtype the module is cast to.

    Args:
        dim: D, width of a token.
        num_experts: E.
        top_k: K.
        normalize_topk: divide the chosen probabilities by their sum.
        gradient: rule for the gradient of the logits, see ``MoE``.
    """

    def __init__(
        self, dim: int, num_experts: int, *, top_k: int, normalize_topk: bool, gradient: RouterGradient
    ) -> None:
        super().__init__()
        check_router(num_experts, top_k, normalize_topk, gradient)
        self.top_k = top_k
        self.normalize_topk = normalize_topk
        self.gradient = gradient
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does."""
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        return super()._apply(_at_least_float32(fn), recurse)

    @override
    def forward(self, x_TD: Tensor) -> Routing:
        """Route tokens.

        Args:
            x_TD: any floating dtype.

        Returns:
            Logits, weights, choice and counts.
        """
        dtype = torch.promote_types(x_TD.dtype, self.weight.dtype)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = functional.linear(x_TD.to(dtype), self.weight.to(dtype))
            return Routing(
                logits_TE, *route(logits_TE, self.top_k, normalize_topk=self.normalize_topk, gradient=self.gradient)
            )


class OutputMean(nn.Module):
    """Running mean of each expert's outputs, which stands for experts that were not chosen in the dense rule.

    A forward uses the mean of the forwards before it and prepares the next one, so that a recomputation in backward
    uses the same.

    Args:
        num_experts: E.
        dim: D.
    """

    DECAY = 0.9  # Default MoE (Panda et al. 2025), section 3

    mean: Tensor
    upcoming: Tensor

    def __init__(self, num_experts: int, dim: int) -> None:
        super().__init__()
        blank_ED = torch.zeros(num_experts, dim, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        self.register_buffer("mean", blank_ED)
        self.register_buffer("upcoming", blank_ED.clone())

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OutputMean":
        return super()._apply(_at_least_float32(fn), recurse)

    def advance(self) -> None:
        """Start to use what the last forward prepared."""
        self.mean = self.upcoming.clone()

    @torch.no_grad()
    def update(self, sums_ED: Tensor, counts_E: Tensor) -> None:
        """Prepare the next mean.

        Args:
            sums_ED: sum of the outputs of each expert over the tokens of all ranks.
            counts_E: number of these tokens; an expert without any keeps its mean.
        """
        batch_ED = sums_ED / counts_E.clamp(min=1).unsqueeze(1)
        moved_ED = self.DECAY * self.mean + (1 - self.DECAY) * batch_ED
        self.upcoming = torch.where(counts_E.unsqueeze(1) > 0, moved_ED, self.mean).to(self.mean.dtype)

    def straight_through(self, y_TD: Tensor, routing: Routing) -> Tensor:
        """The value of y, with the gradient of y + sum over inactive e of p_e mean_e for the router."""
        probs_TE = routing.logits.softmax(-1)
        inactive_TE = probs_TE.scatter(1, routing.chosen, 0.0)
        extra_TD = (inactive_TE.to(self.mean.dtype) @ self.mean).to(y_TD.dtype)
        return y_TD + (extra_TD - extra_TD.detach())
