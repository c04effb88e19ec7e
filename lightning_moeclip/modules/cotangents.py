"""What the backward of both losses shares: gradients in the features' dtype, and that are no graph."""

from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["full_precision", "narrowed", "once_differentiable"]


def narrowed(cotangent: Tensor | None, features: Tensor) -> Tensor | None:
    """A cotangent in the dtype of its features, rounded once at the end."""
    return None if cotangent is None else cotangent.to(features.dtype)


def full_precision(x: Tensor) -> torch.autocast:
    """A context in which autocast leaves the operations on ``x`` in their own dtype."""
    return torch.autocast(x.device.type, enabled=False)


def once_differentiable(grads: tuple[Tensor | None, ...], *sources: Tensor) -> list[Tensor | None]:
    """Gradients that raise when they are differentiated in their turn, and never pass for constants.

    torch's decorator of this name looks at the upstream factor alone: a penalty on the gradients would get a zero
    gradient without a word.

    Args:
        grads: computed without a graph.
        sources: what they depend on.
    """
    if not torch.is_grad_enabled():
        return list(grads)
    anchor = torch.zeros((), requires_grad=True)  # sources of other ranks have no graph here
    return [g if g is None else _RaiseInBackward.apply(g, anchor, *sources) for g in grads]


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> NoReturn:
        raise RuntimeError(
            "The gradients of a loss over the global batch cannot be differentiated once more: they cost a tile at a "
            "time, not a graph. Use lightning_moeclip.kernels.reference in one process for a penalty on gradients."
        )
