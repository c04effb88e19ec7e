"""The experts' two-layer perceptrons over rows that are sorted by expert.

Shapes: R rows (copies of tokens), P rows with padding, E experts held here, D model width, H hidden width. Weights are
fused over experts, ``w_in_EDH`` and ``w_out_EHD``, so that an expert without rows gets a gradient of exact zeros, never
None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "Activation", "Path", "Segments", "choose_path", "expert_mlp"]

Path = Literal["grouped", "bmm", "loop"]

# padded rows over rows up to which one batched product beats a product per expert: measured on 2 CPU threads
PADDING_MAX = 1.4

_grouped_mm: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its derivative times a cotangent, written over the cotangent.

    Attributes:
        forward: h -> act(h).
        backward_: (cotangent of act(h), h) -> cotangent of h, in the storage of the first.
    """

    forward: Callable[[Tensor], Tensor]
    backward_: Callable[[Tensor, Tensor], Tensor]


def _gelu_backward_(grad: Tensor, h: Tensor, *, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_backward.grad_input(grad, h, approximate=approximate, grad_input=grad)


def _quick_gelu_backward_(grad: Tensor, h: Tensor) -> Tensor:
    gate = torch.sigmoid(1.702 * h)
    return grad.mul_(gate + 1.702 * h * gate * (1 - gate))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(functional.gelu, lambda grad, h: _gelu_backward_(grad, h, approximate="none")),
    "gelu_tanh": Activation(
        lambda h: functional.gelu(h, approximate="tanh"), lambda grad, h: _gelu_backward_(grad, h, approximate="tanh")
    ),
    # CLIP (Radford et al. 2021), code of the towers: x * sigmoid(1.702 x)
    "quick_gelu": Activation(lambda h: h * torch.sigmoid(1.702 * h), _quick_gelu_backward_),
    "relu": Activation(functional.relu, lambda grad, h: grad.mul_(h > 0)),
    "silu": Activation(
        functional.silu, lambda grad, h: torch.ops.aten.silu_backward.grad_input(grad, h, grad_input=grad)
    ),
}


@dataclass(frozen=True)
class Segments:
    """Where each expert's rows end.

    Attributes:
        ends: [E], cumulative counts, int32, on the device of the rows; the last one is R.
        counts: the counts on the host, where they are known without waiting for the device.
    """

    ends: Tensor
    counts: list[int] | None

    @classmethod
    def of(cls, counts_E: Tensor, counts: list[int] | None = None, *, ends: Tensor | None = None) -> "Segments":
        """Make from counts per expert; on a CPU the host's copy costs nothing and is taken."""
        if counts is None and counts_E.device.type == "cpu":
            counts = counts_E.tolist()
        return cls(counts_E.cumsum(0, dtype=torch.int32) if ends is None else ends, counts)

    def bounds(self) -> list[tuple[int, int]]:
        """First row and end of each expert; waits for the device where the host does not know them."""
        ends = self.ends.tolist() if self.counts is None else torch.tensor(self.counts).cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


def choose_path(num_rows: int, w_in_EDH: Tensor, w_out_EHD: Tensor, segments: Segments) -> Path:
    """The way of multiplying that is fastest among those that can take these tensors.

    ``bmm`` pads each expert's rows to those of the fullest, which the host has to know; ``grouped_mm`` takes no
    float64, and strides of whole 16 bytes only (torch 2.11-2.13).
    """
    counts = segments.counts
    # a GPU has grouped_mm, which needs no padding
    padding_max = PADDING_MAX if w_in_EDH.device.type == "cpu" else 1.0
    if counts and num_rows and max(counts) * len(counts) <= padding_max * num_rows:
        return "bmm"
    if num_rows and can_group(w_in_EDH, w_out_EHD):
        return "grouped"
    return "loop"


def can_group(w_in_EDH: Tensor, w_out_EHD: Tensor) -> bool:
    """Whether ``grouped_mm`` takes these weights and every product of their backward."""
    return (
        _grouped_mm is not None
        and w_in_EDH.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(width * w_in_EDH.element_size() % 16 == 0 for width in w_in_EDH.shape[1:])
        and w_in_EDH.is_contiguous()
        and w_out_EHD.is_contiguous()
    )


def pad_rows(rows_RD: Tensor, segments: Segments) -> Tensor:
    """As many rows for each expert as the fullest has, [E * C, D]; zeros where there are none."""
    counts = segments.counts
    assert counts, "choose_path asks for the host's counts"
    capacity = max(counts)
    if capacity * len(counts) == len(rows_RD):
        return rows_RD.contiguous()
    padded_ECD = rows_RD.new_empty(len(counts), capacity, rows_RD.shape[1])
    for rows_CD, padded_CD in zip(rows_RD.split(counts), padded_ECD.unbind(), strict=True):
        padded_CD[: len(rows_CD)] = rows_CD
        padded_CD[len(rows_CD) :] = 0
    return padded_ECD.view(-1, rows_RD.shape[1])


def unpad_rows(padded_RD: Tensor, segments: Segments) -> Tensor:
    """The inverse of ``pad_rows``."""
    counts = segments.counts
    assert counts, "choose_path asks for the host's counts"
    capacity = max(counts)
    if capacity * len(counts) == sum(counts):
        return padded_RD
    padded = padded_RD.view(len(counts), capacity, -1)
    return torch.cat([rows_CD[:count] for rows_CD, count in zip(padded.unbind(), counts, strict=True)])


def rows_times_weights(rows_RI: Tensor, weights_EIO: Tensor, segments: Segments, path: Path) -> Tensor:
    """Each row times its expert's matrix: [R, O]."""
    if path == "grouped":
        assert _grouped_mm is not None, "choose_path asks for it"
        return _grouped_mm(rows_RI, weights_EIO, offs=segments.ends)
    num_experts, width_in, width_out = weights_EIO.shape
    if path == "bmm":
        return torch.bmm(rows_RI.view(num_experts, -1, width_in), weights_EIO).view(-1, width_out)
    out_RO = rows_RI.new_empty(rows_RI.shape[0], width_out)
    for weight_IO, (first, end) in zip(weights_EIO.unbind(), segments.bounds(), strict=True):
        if end > first:
            torch.mm(rows_RI[first:end], weight_IO, out=out_RO[first:end])
    return out_RO


def rows_outer(left_RI: Tensor, right_RO: Tensor, segments: Segments, path: Path) -> Tensor:
    """Sum over each expert's rows of the outer product of left and right: [E, I, O]."""
    if path == "grouped":
        assert _grouped_mm is not None, "choose_path asks for it"
        return _grouped_mm(left_RI.t(), right_RO, offs=segments.ends)
    num_experts, width_in, width_out = len(segments.ends), left_RI.shape[1], right_RO.shape[1]
    if path == "bmm":
        left_ECI = left_RI.view(num_experts, -1, width_in)
        return torch.bmm(left_ECI.transpose(1, 2), right_RO.view(num_experts, -1, width_out))
    out_EIO = left_RI.new_empty(num_experts, width_in, width_out)
    for out_IO, (first, end) in zip(out_EIO.unbind(), segments.bounds(), strict=True):
        if end > first:
            torch.mm(left_RI[first:end].t(), right_RO[first:end], out=out_IO)
        else:
            out_IO.zero_()
    return out_EIO


class _ExpertMLP(torch.autograd.Function):
    """Both layers in one node: the hidden cotangent is turned in place, which saves passes over [R, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        w_in_EDH: Tensor,
        w_out_EHD: Tensor,
        segments: Segments,
        activation: Activation,
        path: Path,
    ) -> Tensor:
        x_PD = pad_rows(x_RD, segments) if path == "bmm" else x_RD
        h_PH = rows_times_weights(x_PD, w_in_EDH, segments, path)
        a_PH = activation.forward(h_PH)
        out_PD = rows_times_weights(a_PH, w_out_EHD, segments, path)
        ctx.save_for_backward(x_RD, w_in_EDH, w_out_EHD, x_PD, h_PH, a_PH)
        ctx.how = segments, activation, path
        return unpad_rows(out_PD, segments) if path == "bmm" else out_PD

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable_backward(ctx, grad_RD)
        _, w_in_EDH, w_out_EHD, x_PD, h_PH, a_PH = ctx.saved_tensors
        segments, activation, path = ctx.how
        needs_x, needs_in, needs_out = ctx.needs_input_grad[:3]
        # grouped_mm fails on the zero strides of an expanded cotangent
        grad_PD = pad_rows(grad_RD, segments) if path == "bmm" else grad_RD.contiguous()
        grad_out = rows_outer(a_PH, grad_PD, segments, path) if needs_out else None
        grad_in = grad_x = None
        if needs_x or needs_in:
            grad_a_PH = rows_times_weights(grad_PD, w_out_EHD.transpose(1, 2), segments, path)
            grad_h_PH = activation.backward_(grad_a_PH, h_PH)
            grad_in = rows_outer(x_PD, grad_h_PH, segments, path) if needs_in else None
            if needs_x:
                grad_x = rows_times_weights(grad_h_PH, w_in_EDH.transpose(1, 2), segments, path)
                grad_x = unpad_rows(grad_x, segments) if path == "bmm" else grad_x
        return grad_x, grad_in, grad_out, None, None, None


def _differentiable_backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    """The same cotangents by ordinary operations, for ``create_graph=True``."""
    segments, activation, _ = ctx.how
    inputs = ctx.saved_tensors[:3]
    out_RD = torch.cat(
        [
            activation.forward(inputs[0][first:end] @ w_in_DH) @ w_out_HD
            for w_in_DH, w_out_HD, (first, end) in zip(inputs[1], inputs[2], segments.bounds(), strict=True)
        ]
    )
    wanted = [tensor for tensor, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    grads = iter(torch.autograd.grad(out_RD, wanted, grad_RD, create_graph=True))
    return *(next(grads) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None


def expert_mlp(
    rows_RD: Tensor,
    w_in_EDH: Tensor,
    w_out_EHD: Tensor,
    segments: Segments,
    activation: str,
    *,
    path: Path | None = None,
) -> Tensor:
    """act(row @ w_in[e]) @ w_out[e] for each row of expert e.

    Args:
        rows_RD: rows sorted by expert, in the dtype of the weights.
        w_in_EDH: first layers of all experts.
        w_out_EHD: second layers of all experts.
        segments: where each expert's rows end.
        activation: a name in ``ACTIVATIONS``.
        path: how to multiply; None chooses.

    Returns:
        [R, D], in the order of the rows.
    """
    path = path or choose_path(len(rows_RD), w_in_EDH, w_out_EHD, segments)
    return _ExpertMLP.apply(rows_RD, w_in_EDH, w_out_EHD, segments, ACTIVATIONS[activation], path)
