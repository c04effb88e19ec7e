"""Contrastive loss over the global batch, exact on any number of ranks with any number of rows.

Each rank computes its own rows of the logits z_ij = s I_i . T_j against the texts of all ranks, in tiles. Row
log-sum-exps are local, column ones are combined over ranks. The backward computes each tile once more and serves
both towers from it: 8 * n_r * N * dim operations with the forward.

Rank r returns l_r = W/(2N) * sum over its own samples of both directions, so the mean of l_r over ranks is the loss
of one process, for uneven n_r and n_r = 0 too. CLIP (Radford et al. 2021), figure 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from lightning_moeclip.kernels.backend import runs_triton
from lightning_moeclip.kernels.contrastive import clip_gradients, clip_statistics
from lightning_moeclip.kernels.contrastive_dispatch import check_chunk_size
from lightning_moeclip.kernels.contrastive_tiles import logit_dtype
from lightning_moeclip.modules.cotangents import full_precision, narrowed, once_differentiable
from lightning_moeclip.modules.directions import Directions, DirectionSums
from lightning_moeclip.modules.global_batch import (
    GlobalBatch,
    gather_rows,
    meet,
    reduce_logsumexp,
    sum_to_owners,
)
from lightning_moeclip.parallel import ledger

__all__ = ["contrastive_loss"]


def contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    *,
    chunk_size: int = 4096,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Symmetric InfoNCE of the batch that all ranks share, from this rank's rows.

    A collective, forward and backward: every rank of the group calls it, also with no rows. Without a process
    group it is the loss of one process.

    Args:
        image_features: [n_r, dim], used as given; n_r may differ by rank and be 0.
        text_features: [n_r, dim], row i is the partner of image i.
        logit_scale: one number, the log of the scale.
        chunk_size: columns of the logits that exist at a time, at most.
        group: ranks that share the batch; None for the default group.

    Returns:
        0-d, float32 at least. Its mean over ranks is the loss of one process.

    Raises:
        TypeError: ``logit_scale`` is not a tensor.
        ValueError: ``chunk_size`` is below 1, or ``logit_scale`` is not one number.
        ValueError: on every rank alike, when shapes, widths or dtypes do not fit, or no rank holds a sample.
    """
    check_chunk_size(chunk_size)
    return global_contrastive_loss(image_features, text_features, logit_scale, chunk_size, group, normalize=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def global_contrastive_loss(
    image: Tensor,
    text: Tensor,
    log_scale: Tensor,
    chunk_size: int,
    group: dist.ProcessGroup | None,
    *,
    normalize: bool,
    directions: DirectionSums | None = None,
) -> Tensor:
    """The loss of ``contrastive_loss``, with rows brought to unit length first if asked.

    With ``directions`` the backward adds to them the sums over the cotangents of the features as given: a of the mean
    over images (image to text), b of the mean over texts (text to image).
    """
    check_scalar("logit_scale", log_scale)
    batch = meet(image, text, log_scale, group=group, wants_directions=directions is not None)
    with full_precision(image):
        asked = Directions.begin(directions, image, text, normalize=normalize)
        image, text = widened(image, text, normalize=normalize)
        (log_scale,) = anchored(batch, image, text, log_scale)
        loss: Tensor = _Contrastive.apply(image, text, log_scale, batch, chunk_size, asked)
    return ledger.enter(loss) if batch.world_size > 1 else loss


def check_scalar(name: str, value: Tensor) -> None:
    """Refuse a scale or bias that is not one number in a tensor.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it holds more than one number.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}. Use torch.tensor({value!r}).")
    if value.numel() != 1:
        raise ValueError(f"{name} must be one number, but its shape is {list(value.shape)}. Use a 0-d parameter.")


def widened(image: Tensor, text: Tensor, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Features in the dtype that logits are computed in: float32 at least, float64 if any is.

    Where kernels take narrow features into exact products, and sum those in float32, they stay narrow.
    """
    if not normalize and image.dtype is text.dtype and runs_triton(image):
        return image, text
    dtype = logit_dtype(image, text)
    image, text = image.to(dtype), text.to(dtype)
    return (unit_rows(image, dim=-1), unit_rows(text, dim=-1)) if normalize else (image, text)


def anchored(batch: GlobalBatch, image: Tensor, text: Tensor, *scalars: Tensor) -> list[Tensor]:
    """Scalars that put this rank's loss into the graph whenever another rank's loss is in one.

    The backward is a collective: a rank with no rows, whose features come from no layer, has to enter it too.
    """
    if batch.wants_any and torch.is_grad_enabled() and not any(x.requires_grad for x in (image, text, *scalars)):
        return [x.detach().requires_grad_() for x in scalars]
    return list(scalars)


class _Contrastive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        log_scale: Tensor,
        batch: GlobalBatch,
        chunk_size: int,
        directions: Directions | None,
    ) -> Tensor:
        with full_precision(image):
            text_all = gather_rows(text, batch)
            scale = log_scale.to(logit_dtype(image)).exp()
            by_row, by_column, positives = clip_statistics(
                image, text_all, scale, offset=batch.offset, chunk_size=chunk_size
            )
            by_own_column = reduce_logsumexp(by_column, batch)
            ctx.save_for_backward(image, text_all, log_scale, by_row, by_own_column)
            ctx.batch, ctx.chunk_size, ctx.directions = batch, chunk_size, directions
            total = (by_row - positives).sum() + (by_own_column - positives).sum()
            return (batch.world_size / (2 * batch.total) * total).to(scale.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        image, text_all, log_scale, by_row, by_own_column = ctx.saved_tensors
        batch: GlobalBatch = ctx.batch
        needs_image, _, needs_scale, *_ = ctx.needs_input_grad
        with full_precision(image), torch.no_grad():
            # W/(2N) times the upstream factor: it differs where ranks scale their losses differently
            factor = upstream.to(by_row.dtype) * (batch.world_size / (2 * batch.total))
            columns = gather_rows(torch.stack([by_own_column, factor.expand_as(by_own_column)], dim=1), batch)
            by_column, column_factor = columns.unbind(1)
            found = clip_gradients(
                image,
                text_all,
                log_scale.to(logit_dtype(image)).exp(),
                by_row,
                by_column,
                factor,
                column_factor,
                offset=batch.offset,
                chunk_size=ctx.chunk_size,
                needs_image=needs_image,
                needs_text=batch.wants_text,
                needs_halves=batch.wants_directions,
                needs_log_scale=needs_scale,
            )
            scale_grad = None if found.log_scale is None else found.log_scale.to(log_scale.dtype).view_as(log_scale)
            text = None if found.text is None else sum_to_owners(found.text, batch)
            # in a collective of its own: a longer one may add up in another order, and asking must not change a bit
            text_half = None if found.text_half is None else sum_to_owners(found.text_half, batch)
            if ctx.directions is not None:
                rows = (image, text_all[batch.own])
                half = (found.image_half, text_half)
                ctx.directions.add(half, (found.image, text), rows=rows, is_opposed=False)
            grads = (narrowed(found.image, image), narrowed(text, text_all), scale_grad)
        return *once_differentiable(grads, image, text_all, log_scale, upstream), None, None, None
