"""Losses over all pairs of a batch that never hold its matrix of logits: their sums, then their gradients.

Legend of the shape suffixes: M own rows of the logits, N columns of all ranks, D feature width.

z_ij = scale * image_i . text_j. A rank has M rows of z, the first of them at ``offset`` among the N samples, and all N
columns; the partner of row i is column offset + i. Statistics cost 2MND operations. The gradients compute each tile of
z once more, turn it into G = dL/dz and serve both towers from it: 6MND. What ranks exchange lies between the two and
is the caller's. Memory is O(M * chunk_size + N * D). CLIP (Radford et al. 2021), figure 3; SigLIP (Zhai et al. 2023),
equation 1.

None of these operations carries a graph. float64 is computed by torch everywhere.
"""

from typing import NamedTuple

import torch
from lightning_moeclip.kernels import contrastive_dispatch
from torch import Tensor

__all__ = [
    "ClipGradients",
    "SigmoidGradients",
    "clip_gradients",
    "clip_statistics",
    "sigmoid_gradients",
    "sigmoid_statistics",
]


class ClipGradients(NamedTuple):
    """What G sends to the features, and the part of it from row softmaxes; None where not needed, float32 at least.

    Attributes:
        image: [M, D].
        text: [N, D], from the own rows alone: summed over ranks by the caller.
        image_half: [M, D].
        text_half: [N, D].
        log_scale: 0-d, the sum of G z, which is the derivative by the log of the scale; from the own rows, float64.
    """

    image: Tensor | None
    text: Tensor | None
    image_half: Tensor | None
    text_half: Tensor | None
    log_scale: Tensor | None


class SigmoidGradients(NamedTuple):
    """What G sends to the features and the bias; None where not needed, float32 at least.

    Attributes:
        image: [M, D].
        text: [N, D], from the own rows alone: summed over ranks by the caller.
        bias: 0-d, the sum of G, float64.
        pull: [M], G of the pairs.
        log_scale: 0-d, the sum of G z, z without the bias: the derivative by the log of the scale, float64.
    """

    image: Tensor | None
    text: Tensor | None
    bias: Tensor | None
    pull: Tensor | None
    log_scale: Tensor | None


def clip_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, *, offset: int = 0, chunk_size: int = 4096
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exps of the logits over each own row and over the own rows of each column, and the logits of the pairs.

    Args:
        image_MD: [M, D], float16, bfloat16, float32 or float64; own rows.
        text_ND: [N, D], likewise; rows of all ranks.
        scale: one number, float32 at least.
        offset: place of the first own row among the N samples.
        chunk_size: columns of the logits that exist at a time, at most.

    Returns:
        [M], [N] and [M], float64; -inf for a column without rows.

    Raises:
        ValueError: shapes or devices do not fit, the pairs lie beyond the columns, or ``chunk_size`` is below 1.
        TypeError: features of another dtype, or a scalar of less than float32.
    """
    if torch.compiler.is_compiling():
        return torch.ops.moeclip.clip_statistics(image_MD, text_ND, scale, offset, chunk_size)
    return contrastive_dispatch.clip_statistics(image_MD, text_ND, scale, offset, chunk_size)


def clip_gradients(
    image_MD: Tensor,
    text_ND: Tensor,
    scale: Tensor,
    by_row_M: Tensor,
    by_column_N: Tensor,
    row_factor: Tensor,
    column_factor_N: Tensor,
    *,
    offset: int = 0,
    chunk_size: int = 4096,
    needs_image: bool = True,
    needs_text: bool = True,
    needs_halves: bool = False,
    needs_log_scale: bool = False,
) -> ClipGradients:
    """G_ij = a (p_ij - d_ij) + b_j (q_ij - d_ij) sent to the features: scale * G text and scale * G' image.

    p is the softmax over a row, q that over a column, d_ij = 1 for pairs, else 0. The half is that of a (p_ij - d_ij).

    Args:
        image_MD: as for ``clip_statistics``.
        text_ND: likewise.
        scale: likewise.
        by_row_M: [M], float64, log-sum-exps over the rows.
        by_column_N: [N], float64, log-sum-exps over all rows of all ranks of each column.
        row_factor: one number, float64; a, the derivative of the objective by an own row's cross-entropy.
        column_factor_N: [N], float64; b_j, likewise of each column.
        offset: as for ``clip_statistics``.
        chunk_size: likewise.
        needs_image: whether the gradient of the images is needed.
        needs_text: whether that of the texts is.
        needs_halves: whether the halves of both are needed beside the whole, whose bits stay the same.
        needs_log_scale: whether the derivative by the log of the scale is needed.

    Raises:
        ValueError: shapes or devices do not fit, the pairs lie beyond the columns, or ``chunk_size`` is below 1.
        TypeError: features of another dtype, or a scalar of less than float32.
    """
    sums = (by_row_M, by_column_N, row_factor, column_factor_N)
    needs = (needs_image, needs_text, needs_halves, needs_log_scale)
    if torch.compiler.is_compiling():
        found = torch.ops.moeclip.clip_gradients(image_MD, text_ND, scale, *sums, offset, chunk_size, *needs)
    else:
        found = contrastive_dispatch.clip_gradients(image_MD, text_ND, scale, *sums, offset, chunk_size, *needs)
    halves = (needs_image and needs_halves, needs_text and needs_halves)
    return ClipGradients(*_placed(found, needs_image, needs_text, *halves, needs_log_scale))


def sigmoid_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor, *, offset: int = 0, chunk_size: int = 4096
) -> Tensor:
    """Sum over own rows and all columns of softplus(-y_ij (z_ij + bias)), y = 1 for pairs and -1 for others.

    Args:
        image_MD: as for ``clip_statistics``.
        text_ND: likewise.
        scale: likewise.
        bias: one number, float32 at least.
        offset: as for ``clip_statistics``.
        chunk_size: likewise.

    Returns:
        0-d, float64.

    Raises:
        ValueError: shapes or devices do not fit, the pairs lie beyond the columns, or ``chunk_size`` is below 1.
        TypeError: features of another dtype, or a scalar of less than float32.
    """
    if torch.compiler.is_compiling():
        return torch.ops.moeclip.sigmoid_statistics(image_MD, text_ND, scale, bias, offset, chunk_size)
    return contrastive_dispatch.sigmoid_statistics(image_MD, text_ND, scale, bias, offset, chunk_size)


def sigmoid_gradients(
    image_MD: Tensor,
    text_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_factor: Tensor,
    *,
    offset: int = 0,
    chunk_size: int = 4096,
    needs_image: bool = True,
    needs_text: bool = True,
    needs_bias: bool = True,
    needs_pull: bool = False,
    needs_log_scale: bool = False,
) -> SigmoidGradients:
    """G_ij = -a y_ij sigmoid(-y_ij (z_ij + bias)) sent to the features and the bias.

    Args:
        image_MD: as for ``sigmoid_statistics``.
        text_ND: likewise.
        scale: likewise.
        bias: likewise.
        row_factor: one number, float32 at least; a, the derivative of the objective by the sum of
            ``sigmoid_statistics``.
        offset: as for ``sigmoid_statistics``.
        chunk_size: likewise.
        needs_image: whether the gradient of the images is needed.
        needs_text: whether that of the texts is.
        needs_bias: whether that of the bias is.
        needs_pull: whether G of the pairs is asked for.
        needs_log_scale: whether the derivative by the log of the scale is needed.

    Raises:
        ValueError: shapes or devices do not fit, the pairs lie beyond the columns, or ``chunk_size`` is below 1.
        TypeError: features of another dtype, or a scalar of less than float32.
    """
    scalars = (scale, bias, row_factor)
    needs = (needs_image, needs_text, needs_bias, needs_pull, needs_log_scale)
    if torch.compiler.is_compiling():
        found = torch.ops.moeclip.sigmoid_gradients(image_MD, text_ND, *scalars, offset, chunk_size, *needs)
    else:
        found = contrastive_dispatch.sigmoid_gradients(image_MD, text_ND, *scalars, offset, chunk_size, *needs)
    return SigmoidGradients(*_placed(found, *needs))


def _placed(found: list[Tensor], *needs: bool) -> list[Tensor | None]:
    """What was returned, with None for what was not needed."""
    rest = iter(found)
    return [next(rest) if is_needed else None for is_needed in needs]
