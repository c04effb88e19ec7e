"""Contrastive loss over the global batch, exact on any number of ranks with any number of rows.

Each rank computes its own rows of the logits z_ij = s I_i . T_j against the texts of all ranks, in tiles. Row
log-sum-exps are local, column ones are combined over ranks. The backward computes each tile once more and serves
both towers from it: 8 * n_r * N * dim operations with the forward.

Rank r returns l_r = W/(2N) * sum over its own samples of both directions, so the mean of l_r over ranks is the loss
of one process, for uneven n_r and n_r = 0 too. CLIP (Radford et al. 2021), figure 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize as unit_rows

from lightning_moeclip.modules.directions import Directions, DirectionSums, wide_dtype
from lightning_moeclip.modules.global_batch import (
    GlobalBatch,
    gather_rows,
    meet,
    reduce_logsumexp,
)
from lightning_moeclip.modules.tiles import (
    Tile,
    check_chunk_size,
    feature_gradients,
    full_precision,
    once_differentiable,
    tiles,
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
    """Features in the dtype that logits are computed in: float32 at least, float64 if any is."""
    dtype = torch.promote_types(torch.promote_types(image.dtype, text.dtype), torch.float32)
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
            scale = log_scale.to(image.dtype).exp()
            by_row = image.new_full((len(image),), -torch.inf, dtype=wide_dtype(image))
            by_column = by_row.new_full((batch.total,), -torch.inf)
            positives = torch.empty_like(by_row)
            for tile in tiles(scale * image, text_all, batch, chunk_size):
                # from the product and not from the features, so that a loss near 0 is not the noise of two roundings
                positives[tile.pairs] = tile.diagonal(tile.logits).to(positives.dtype)
                _add_logsumexp(by_row[tile.rows], tile.logits, 1, tile.scratch)
                _add_logsumexp(by_column[tile.columns], tile.logits, 0, tile.scratch)
            by_own_column = reduce_logsumexp(by_column, batch)
            ctx.save_for_backward(image, text_all, log_scale, by_row, by_own_column)
            ctx.batch, ctx.chunk_size, ctx.directions = batch, chunk_size, directions
            total = (by_row - positives).sum() + (by_own_column - positives).sum()
            return (batch.world_size / (2 * batch.total) * total).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        image, text_all, log_scale, by_row, by_own_column = ctx.saved_tensors
        needs_image, _, needs_scale, *_ = ctx.needs_input_grad
        with full_precision(image), torch.no_grad():
            gradient = _LogitGradient.build(upstream, by_row, by_own_column, image.dtype, ctx.batch)
            found = feature_gradients(
                image,
                text_all,
                log_scale,
                ctx.batch,
                ctx.chunk_size,
                gradient.of,
                needs_image=needs_image,
                needs_scale=needs_scale,
                half_gradient=gradient.image_half_of if ctx.batch.wants_directions else None,
            )
            if ctx.directions is not None:
                rows = (image, text_all[ctx.batch.own])
                ctx.directions.add(found.half, (found.image, found.text), rows=rows, is_opposed=False)
            grads = (found.image, found.text, found.log_scale)
        return *once_differentiable(grads, image, text_all, log_scale, upstream), None, None, None


def _add_logsumexp(total: Tensor, logits: Tensor, dim: int, scratch: Tensor) -> None:
    """Take the log-sum-exp of ``logits`` over ``dim`` into the running ``total``, in place.

    Each tile is shifted by its own maximum: exp(100) overflows float32.
    """
    top = logits.amax(dim, keepdim=True)
    torch.sub(logits, top, out=scratch).exp_()
    tile = top.squeeze(dim).to(total.dtype) + scratch.sum(dim).to(total.dtype).log_()
    torch.logaddexp(total, tile, out=total)


@dataclass(frozen=True)
class _LogitGradient:
    """G_ij = a (p_ij - d_ij) + b_j (q_ij - d_ij), with p = softmax over a row and q over a column.

    a and b_j are W/(2N) times the upstream factor of the rank that owns row i, and column j: they differ where ranks
    scale their losses differently. A log-sum-exp near 100 is rounded by 4e-6 in float32; what the rounding took
    away goes into the weights, which are multiplied anyway.
    """

    row_shift: Tensor
    row_weight: Tensor
    column_shift: Tensor
    column_weight: Tensor
    pair_weight: Tensor

    @classmethod
    def build(
        cls, upstream: Tensor, by_row: Tensor, by_own_column: Tensor, dtype: torch.dtype, batch: GlobalBatch
    ) -> "_LogitGradient":
        """Gather what the columns of other ranks need: their log-sum-exps and upstream factors. A collective."""
        factor = upstream.to(by_row.dtype) * (batch.world_size / (2 * batch.total))
        columns = gather_rows(torch.stack([by_own_column, factor.expand_as(by_own_column)], dim=1), batch)
        by_column, column_factor = columns.unbind(1)
        row_shift, column_shift = by_row.to(dtype), by_column.to(dtype)
        row_weight = (factor * (row_shift - by_row).exp()).to(dtype)
        column_weight = (column_factor * (column_shift - by_column).exp()).to(dtype)
        return cls(row_shift[:, None], row_weight[:, None], column_shift, column_weight, (2 * factor).to(dtype))

    def of(self, tile: Tile) -> Tensor:
        """The gradient of a tile's logits, in the tile's own memory."""
        gradient = torch.sub(tile.logits, self.column_shift[tile.columns], out=tile.scratch).exp_()
        gradient.mul_(self.column_weight[tile.columns])
        by_row = tile.logits.sub_(self.row_shift[tile.rows]).exp_()
        gradient.addcmul_(by_row, self.row_weight[tile.rows])
        tile.diagonal(gradient).sub_(self.pair_weight)
        return gradient

    def image_half_of(self, tile: Tile) -> Tensor:
        """The part a (p_ij - d_ij), which looks for texts of images, of a tile that ``of`` has had; in its memory."""
        by_row = tile.logits.mul_(self.row_weight[tile.rows])
        tile.diagonal(by_row).sub_(self.pair_weight / 2)
        return by_row
