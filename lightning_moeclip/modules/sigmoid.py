"""Pairwise sigmoid loss over the global batch, exact on any number of ranks with any number of rows.

Each rank sums its own rows of the logits against the texts of all ranks, in tiles that do not know of one another:
l_r = (W/N) * sum over own rows i and all j of softplus(-y_ij (s I_i . T_j + b)). SigLIP (Zhai et al. 2023), equation 1.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip.kernels.contrastive import sigmoid_gradients, sigmoid_statistics
from lightning_moeclip.kernels.contrastive_dispatch import check_chunk_size
from lightning_moeclip.kernels.contrastive_tiles import logit_dtype
from lightning_moeclip.modules.contrastive import anchored, check_scalar, widened
from lightning_moeclip.modules.cotangents import full_precision, narrowed, once_differentiable
from lightning_moeclip.modules.directions import Directions, DirectionSums
from lightning_moeclip.modules.global_batch import GlobalBatch, gather_rows, meet, sum_to_owners
from lightning_moeclip.parallel import ledger

__all__ = ["global_sigmoid_loss", "sigmoid_loss"]


def sigmoid_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor,
    *,
    chunk_size: int = 4096,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """SigLIP's loss of the batch that all ranks share, from this rank's rows, with a scale and bias of the caller's.

    A collective, forward and backward: every rank of the group calls it, also with no rows. Without a process
    group it is the loss of one process.

    Args:
        image_features: [n_r, dim], used as given; n_r may differ by rank and be 0.
        text_features: [n_r, dim], row i is the partner of image i.
        logit_scale: one number, the log of the scale.
        logit_bias: one number, added to every logit.
        chunk_size: columns of the logits that exist at a time, at most.
        group: ranks that share the batch; None for the default group.

    Returns:
        0-d, float32 at least. Its mean over ranks is the loss of one process.

    Raises:
        TypeError: ``logit_scale`` or ``logit_bias`` is not a tensor.
        ValueError: ``chunk_size`` is below 1, or the scale or bias is not one number.
        ValueError: on every rank alike, when shapes, widths or dtypes do not fit, or no rank holds a sample.
    """
    check_chunk_size(chunk_size)
    return global_sigmoid_loss(
        image_features, text_features, logit_scale, logit_bias, chunk_size, group, normalize=False
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def global_sigmoid_loss(
    image: Tensor,
    text: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    chunk_size: int,
    group: dist.ProcessGroup | None,
    *,
    normalize: bool,
    directions: DirectionSums | None = None,
) -> Tensor:
    """Sigmoid loss of the batch that all ranks share, from this rank's rows; a collective.

    Args:
        image: [n_r, dim]; n_r may differ by rank and be 0.
        text: [n_r, dim], row i is the partner of image i.
        log_scale: one number, the log of the scale.
        bias: one number, added to every logit.
        chunk_size: columns of the logits that exist at a time, at most.
        group: ranks that share the batch; None for the default group.
        normalize: whether rows are brought to unit length first.
        directions: takes the sums over the cotangents of the features as given: a of the pull of the positives, b of
            the push of the negatives turned round.

    Returns:
        0-d, float32 at least. Its mean over ranks is the loss of one process.
    """
    check_scalar("logit_scale", log_scale)
    check_scalar("logit_bias", bias)
    batch = meet(image, text, log_scale, bias, group=group, wants_directions=directions is not None)
    with full_precision(image):
        asked = Directions.begin(directions, image, text, normalize=normalize)
        image, text = widened(image, text, normalize=normalize)
        log_scale, bias = anchored(batch, image, text, log_scale, bias)
        loss: Tensor = _Sigmoid.apply(image, text, log_scale, bias, batch, chunk_size, asked)
    return ledger.enter(loss) if batch.world_size > 1 else loss


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        log_scale: Tensor,
        bias: Tensor,
        batch: GlobalBatch,
        chunk_size: int,
        directions: Directions | None,
    ) -> Tensor:
        with full_precision(image):
            text_all = gather_rows(text, batch)
            dtype = logit_dtype(image)
            scale, shift = log_scale.to(dtype).exp(), bias.to(dtype)
            total = sigmoid_statistics(image, text_all, scale, shift, offset=batch.offset, chunk_size=chunk_size)
            ctx.save_for_backward(image, text_all, log_scale, bias)
            ctx.batch, ctx.chunk_size, ctx.directions = batch, chunk_size, directions
            return (batch.world_size / batch.total * total).to(dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        image, text_all, log_scale, bias = ctx.saved_tensors
        batch: GlobalBatch = ctx.batch
        needs_image, _, needs_scale, needs_bias, *_ = ctx.needs_input_grad
        with full_precision(image), torch.no_grad():
            dtype = logit_dtype(image)
            scale = log_scale.to(dtype).exp()
            found = sigmoid_gradients(
                image,
                text_all,
                scale,
                bias.to(dtype),
                upstream.to(dtype) * (batch.world_size / batch.total),
                offset=batch.offset,
                chunk_size=ctx.chunk_size,
                needs_image=needs_image,
                needs_text=batch.wants_text,
                needs_bias=needs_bias,
                needs_pull=ctx.directions is not None,
                needs_log_scale=needs_scale,
            )
            scale_grad = None if found.log_scale is None else found.log_scale.to(log_scale.dtype).view_as(log_scale)
            text = None if found.text is None else sum_to_owners(found.text, batch)
            if found.pull is not None:
                weight = (found.pull * scale)[:, None]
                rows = (image, text_all[batch.own])
                half = (weight * rows[1], weight * rows[0])
                ctx.directions.add(half, (found.image, text), rows=rows, is_opposed=True)
            bias_grad = None if found.bias is None else found.bias.to(bias.dtype).view_as(bias)
            grads = (narrowed(found.image, image), narrowed(text, text_all), scale_grad, bias_grad)
        return *once_differentiable(grads, image, text_all, log_scale, bias, upstream), None, None, None
