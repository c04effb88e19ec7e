"""Tiles of the matrix of logits: the only pieces of it that ever exist.

A rank computes its n_r rows of the N x N logits tile by tile and throws each tile away, so a loss costs
O(n_r * chunk + N * D) memory. On a CPU a tile and its copy stay in the cache, where the passes over them are
nearly free beside the matrix products; elsewhere one chunk of columns is one tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_moeclip.modules.global_batch import GlobalBatch, sum_to_owners

__all__ = ["Tile", "check_chunk_size", "feature_gradients", "full_precision", "once_differentiable", "tiles"]

# 2048 x 512 was the fastest of nine shapes at 8192 x 512 float32 (tests/benchmarks/contrastive_loss.py), 4 MiB
_CPU_ROWS, _CPU_COLUMNS = 2048, 512


@dataclass(frozen=True)
class Tile:
    """A block of logits of own rows against columns of the global batch.

    Attributes:
        rows: slice of this rank's n_r rows.
        columns: slice of the N columns.
        logits: [rows, columns], to be overwritten at will.
        scratch: [rows, columns], uninitialised.
        pairs: rows of this tile whose partner is among its columns, as a slice of the n_r rows.
        shift: place of the pairs, for ``Tensor.diagonal``.
    """

    rows: slice
    columns: slice
    logits: Tensor
    scratch: Tensor
    pairs: slice
    shift: int

    def diagonal(self, of: Tensor) -> Tensor:
        """The entries of ``of`` [rows, columns] that belong to pairs, as a view."""
        return of.diagonal(self.shift)


def tiles(image: Tensor, text_all: Tensor, batch: GlobalBatch, chunk_size: int) -> Iterator[Tile]:
    """Compute ``image @ text_all.T`` tile by tile, all rows of a few columns before the next columns.

    Args:
        image: [n_r, dim], own rows.
        text_all: [N, dim], rows of all ranks.
        batch: places the own rows among the N.
        chunk_size: largest number of columns in a tile.
    """
    height, width = _shape(image, text_all, chunk_size)
    buffers = image.new_empty(2, height * width)
    for first_column in range(0, len(text_all), width):
        columns = slice(first_column, min(first_column + width, len(text_all)))
        for first_row in range(0, len(image), height):
            rows = slice(first_row, min(first_row + height, len(image)))
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            logits, scratch = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
            torch.mm(image[rows], text_all[columns].T, out=logits)
            shift = batch.offset + first_row - first_column
            start = first_row + max(0, -shift)
            pairs = slice(start, start + logits.diagonal(shift).numel())
            yield Tile(rows, columns, logits, scratch, pairs, shift)


def feature_gradients(
    image: Tensor,
    text_all: Tensor,
    log_scale: Tensor,
    batch: GlobalBatch,
    chunk_size: int,
    logit_gradient: Callable[[Tile], Tensor],
    *,
    needs_image: bool,
    needs_scale: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Carry the gradient of the logits to what they were made of; a collective when any rank needs its texts'.

    With G the gradient of z = s I . T: dL/dI = s G T, dL/dT = s G' I summed over ranks, and
    dL/d(log s) = sum G z = sum_i I_i . dL/dI_i, which costs no pass over the tiles.

    Args:
        image: [n_r, dim], own rows.
        text_all: [N, dim], rows of all ranks.
        log_scale: one number.
        batch: says whether any rank needs the gradient of its texts.
        chunk_size: as in the forward.
        logit_gradient: from a tile to the gradient of its logits, [rows, columns]; may overwrite the tile.
        needs_image: whether this rank's images need a gradient.
        needs_scale: whether this rank's scale needs one.

    Returns:
        Gradients of the own images and the own texts, [n_r, dim], and of ``log_scale``; None where not needed.
    """
    scale = log_scale.to(image.dtype).exp()
    text_grad = torch.zeros_like(text_all) if batch.wants_text else None
    image_grad = torch.zeros_like(image) if needs_image or (needs_scale and text_grad is None) else None
    for tile in tiles(scale * image, text_all, batch, chunk_size):
        gradient = logit_gradient(tile)
        if image_grad is not None:
            image_grad[tile.rows].addmm_(gradient, text_all[tile.columns])
        if text_grad is not None:
            text_grad[tile.columns].addmm_(gradient.T, image[tile.rows])
    scale_grad = None
    if image_grad is not None:
        image_grad *= scale
        scale_grad = torch.linalg.vecdot(image, image_grad).sum()
    if text_grad is not None:
        text_grad *= scale
        if scale_grad is None:
            scale_grad = torch.linalg.vecdot(text_all, text_grad).sum()
        text_grad = sum_to_owners(text_grad, batch)
    if scale_grad is not None:
        scale_grad = scale_grad.to(log_scale.dtype).view_as(log_scale)
    return image_grad, text_grad, scale_grad if needs_scale else None


def check_chunk_size(chunk_size: int) -> None:
    """Refuse a number of columns that no tile can have.

    Raises:
        ValueError: it is below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 column of logits. Use chunk_size=4096.")


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


def _shape(image: Tensor, text_all: Tensor, chunk_size: int) -> tuple[int, int]:
    height, width = len(image), min(chunk_size, len(text_all))
    if image.device.type == "cpu":
        height, width = min(height, _CPU_ROWS), min(width, _CPU_COLUMNS)
    return max(height, 1), width
