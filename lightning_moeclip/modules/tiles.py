"""Tiles of the matrix of logits: the only pieces of it that ever exist.

A rank computes its n_r rows of the N x N logits tile by tile and throws each tile away, so a loss costs
O(n_r * chunk + N * D) memory. On a CPU the rows are cut too; elsewhere one chunk of columns is one tile.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_moeclip.modules.global_batch import GlobalBatch, sum_to_owners

__all__ = [
    "FeatureGradients",
    "Tile",
    "check_chunk_size",
    "feature_gradients",
    "full_precision",
    "once_differentiable",
    "tiles",
]

# at 8192 x 512 float32 on 2 busy threads, tiles of 2048 x 512 took twice the time of these, as each operation waits for
# its slowest thread, and tiles of 4096 x 4096 took 1.4 times the memory
_CPU_COLUMNS, _CPU_NUMEL = 2048, 4096 * 2048


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


@dataclass(frozen=True)
class FeatureGradients:
    """Cotangents of what the logits were made of; None where not needed.

    Attributes:
        image: [n_r, dim], of the own images.
        text: [n_r, dim], of the own texts.
        log_scale: like the scale's log.
        half: of the own images and texts, what one half of the loss sends them.
    """

    image: Tensor | None
    text: Tensor | None
    log_scale: Tensor | None
    half: tuple[Tensor | None, Tensor | None] = (None, None)


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
    half_gradient: Callable[[Tile], Tensor] | None = None,
) -> FeatureGradients:
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
        half_gradient: from a tile that ``logit_gradient`` has had to the gradient that one half of the loss sends its
            logits; None on all ranks or on none.
    """
    scale = log_scale.to(image.dtype).exp()
    needs_image_grad = needs_image or (needs_scale and not batch.wants_text)
    merged = _Cotangents.zeros(image, text_all, needs_image=needs_image_grad, needs_text=batch.wants_text)
    half = None
    if half_gradient is not None:
        half = _Cotangents.zeros(image, text_all, needs_image=needs_image_grad, needs_text=batch.wants_text)
    for tile in tiles(scale * image, text_all, batch, chunk_size):
        merged.add(tile, logit_gradient(tile))
        if half is not None and half_gradient is not None:
            half.add(tile, half_gradient(tile))
    merged.scale_by(scale)
    scale_grad = merged.scale_gradient().to(log_scale.dtype).view_as(log_scale) if needs_scale else None
    text_grad = merged.own_text(batch)
    if half is None:
        return FeatureGradients(merged.image, text_grad, scale_grad)
    half.scale_by(scale)
    # in a collective of its own: a longer one may add up in another order, and asking must not change a bit
    return FeatureGradients(merged.image, text_grad, scale_grad, (half.image, half.own_text(batch)))


@dataclass(frozen=True)
class _Cotangents:
    """What one gradient of the logits sends to images and texts, summed over tiles.

    Attributes:
        features: the images [n_r, dim] and texts [N, dim] themselves.
        image: [n_r, dim] or None.
        text: [N, dim] or None.
    """

    features: tuple[Tensor, Tensor]
    image: Tensor | None
    text: Tensor | None

    @classmethod
    def zeros(cls, image: Tensor, text_all: Tensor, *, needs_image: bool, needs_text: bool) -> "_Cotangents":
        return cls(
            (image, text_all),
            torch.zeros_like(image) if needs_image else None,
            torch.zeros_like(text_all) if needs_text else None,
        )

    def add(self, tile: Tile, gradient: Tensor) -> None:
        image, text_all = self.features
        if self.image is not None:
            self.image[tile.rows].addmm_(gradient, text_all[tile.columns])
        if self.text is not None:
            self.text[tile.columns].addmm_(gradient.T, image[tile.rows])

    def scale_by(self, scale: Tensor) -> None:
        for x in (self.image, self.text):
            if x is not None:
                x *= scale

    def scale_gradient(self) -> Tensor:
        """0-d: of the log of the scale, from whichever side there is."""
        for features, cotangent in zip(self.features, (self.image, self.text), strict=True):
            if cotangent is not None:
                return torch.linalg.vecdot(features, cotangent).sum()
        raise AssertionError("a scale's gradient needs that of the images or of the texts")

    def own_text(self, batch: GlobalBatch) -> Tensor | None:
        """[n_r, dim], summed over ranks; a collective."""
        return None if self.text is None else sum_to_owners(self.text, batch)


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
        width = min(width, _CPU_COLUMNS)
        height = min(height, _CPU_NUMEL // width)
    return max(height, 1), width
