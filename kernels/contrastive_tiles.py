"""The losses over pairs in torch, tile by tile: right on any device and in float64, fast on a CPU.

Legend of the shape suffixes: M own rows of the logits, N columns of all ranks, D feature width.

The M x N logits are computed in tiles that are thrown away, so a loss costs O(M * chunk + N * D) memory. On a CPU the
rows are cut too; elsewhere one chunk of columns is one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

__all__ = [
    "clip_gradients",
    "clip_statistics",
    "logit_dtype",
    "sigmoid_gradients",
    "sigmoid_statistics",
    "wide_dtype",
]

# at 8192 x 512 float32 on 2 busy threads, tiles of 2048 x 512 took twice the time of these, as each operation waits for
# its slowest thread, and tiles of 4096 x 4096 took 1.4 times the memory
_CPU_COLUMNS, _CPU_NUMEL = 2048, 4096 * 2048


def logit_dtype(*features: Tensor) -> torch.dtype:
    """The dtype that logits of these features are computed in: float32 at least, float64 if any is."""
    dtype = torch.float32
    for x in features:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of log-sum-exps and sums: O(N) numbers, so float64 costs nothing where it exists."""
    return logit_dtype(x) if x.device.type == "mps" else torch.float64


def clip_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, offset: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``contrastive.clip_statistics``."""
    image_MD, text_ND = _widened(image_MD, text_ND)
    by_row_M = image_MD.new_full((len(image_MD),), -torch.inf, dtype=wide_dtype(image_MD))
    by_column_N = by_row_M.new_full((len(text_ND),), -torch.inf)
    positives_M = torch.empty_like(by_row_M)
    for tile in _tiles(scale.to(image_MD.dtype) * image_MD, text_ND, offset, chunk_size):
        # from the product and not from the features, so that a loss near 0 is not the noise of two roundings
        positives_M[tile.pairs] = tile.diagonal(tile.logits).to(positives_M.dtype)
        _add_logsumexp(by_row_M[tile.rows], tile.logits, 1, tile.scratch)
        _add_logsumexp(by_column_N[tile.columns], tile.logits, 0, tile.scratch)
    return by_row_M, by_column_N, positives_M


def clip_gradients(
    image_MD: Tensor,
    text_ND: Tensor,
    scale: Tensor,
    by_row_M: Tensor,
    by_column_N: Tensor,
    row_factor: Tensor,
    column_factor_N: Tensor,
    offset: int,
    chunk_size: int,
    needs_image: bool,
    needs_text: bool,
    needs_halves: bool,
    needs_log_scale: bool,
) -> list[Tensor]:
    """See ``contrastive.clip_gradients``: those of image and text that are needed, their halves, the scale's."""
    image_MD, text_ND = _widened(image_MD, text_ND)
    scale = scale.to(image_MD.dtype)
    gradient = _LogitGradient.build(by_row_M, by_column_N, row_factor, column_factor_N, image_MD.dtype)
    merged = _Cotangents.zeros(image_MD, text_ND, needs_image, needs_text, needs_log_scale)
    half = _Cotangents.zeros(image_MD, text_ND, needs_image and needs_halves, needs_text and needs_halves)
    for tile in _tiles(scale * image_MD, text_ND, offset, chunk_size):
        merged.add(tile, gradient.of(tile, offset))
        if needs_halves:
            half.add(tile, gradient.image_half_of(tile))
    sent, log_scale_sums = merged.scaled(scale)
    return sent + half.scaled(scale)[0] + log_scale_sums


def sigmoid_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor, offset: int, chunk_size: int
) -> Tensor:
    """See ``contrastive.sigmoid_statistics``."""
    image_MD, text_ND = _widened(image_MD, text_ND)
    scale, bias = scale.to(image_MD.dtype), bias.to(image_MD.dtype)
    total = image_MD.new_zeros((), dtype=wide_dtype(image_MD))
    for tile in _tiles(scale * image_MD, text_ND, offset, chunk_size):
        _signed(tile, bias).neg_()
        total -= logsigmoid(tile.logits).sum()
    return total


def sigmoid_gradients(
    image_MD: Tensor,
    text_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    row_factor: Tensor,
    offset: int,
    chunk_size: int,
    needs_image: bool,
    needs_text: bool,
    needs_bias: bool,
    needs_pull: bool,
    needs_log_scale: bool,
) -> list[Tensor]:
    """See ``contrastive.sigmoid_gradients``: those of image, text, bias, the pull, the scale that are needed."""
    image_MD, text_ND = _widened(image_MD, text_ND)
    scale, bias, row_factor = (x.to(image_MD.dtype) for x in (scale, bias, row_factor))
    merged = _Cotangents.zeros(image_MD, text_ND, needs_image, needs_text, needs_log_scale)
    bias_sum = image_MD.new_zeros((), dtype=wide_dtype(image_MD))
    pull_M = image_MD.new_zeros(len(image_MD))
    for tile in _tiles(scale * image_MD, text_ND, offset, chunk_size):
        gradient = _signed(tile, bias).sigmoid_()
        tile.diagonal(gradient).neg_()
        gradient.mul_(row_factor)
        if needs_bias:
            bias_sum.add_(gradient.sum())
        if needs_pull:
            pull_M[tile.pairs] = tile.diagonal(gradient)
        merged.add(tile, gradient)
    sent, log_scale_sums = merged.scaled(scale)
    return sent + [bias_sum] * needs_bias + [pull_M] * needs_pull + log_scale_sums


def _widened(image_MD: Tensor, text_ND: Tensor) -> tuple[Tensor, Tensor]:
    dtype = logit_dtype(image_MD, text_ND)
    return image_MD.to(dtype), text_ND.to(dtype)


@dataclass(frozen=True)
class _Tile:
    """A block of logits.

    Attributes:
        rows: slice of the M rows.
        columns: slice of the N columns.
        logits: [rows, columns], to be overwritten at will.
        scratch: [rows, columns], uninitialised.
        pairs: rows of this tile whose partner is among its columns, as a slice of the M rows.
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


def _tiles(image_MD: Tensor, text_ND: Tensor, offset: int, chunk_size: int) -> Iterator[_Tile]:
    """Compute ``image_MD @ text_ND.T`` tile by tile, all rows of a few columns before the next columns."""
    height, width = _shape(image_MD, text_ND, chunk_size)
    buffers = image_MD.new_empty(2, height * width)
    for first_column in range(0, len(text_ND), width):
        columns = slice(first_column, min(first_column + width, len(text_ND)))
        for first_row in range(0, len(image_MD), height):
            rows = slice(first_row, min(first_row + height, len(image_MD)))
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            logits, scratch = (buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers)
            torch.mm(image_MD[rows], text_ND[columns].T, out=logits)
            shift = offset + first_row - first_column
            start = first_row + max(0, -shift)
            pairs = slice(start, start + logits.diagonal(shift).numel())
            yield _Tile(rows, columns, logits, scratch, pairs, shift)


def _shape(image_MD: Tensor, text_ND: Tensor, chunk_size: int) -> tuple[int, int]:
    height, width = len(image_MD), max(min(chunk_size, len(text_ND)), 1)
    if image_MD.device.type == "cpu":
        width = min(width, _CPU_COLUMNS)
        height = min(height, _CPU_NUMEL // width)
    return max(height, 1), width


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

    A log-sum-exp near 100 is rounded by 4e-6 in float32; what the rounding took away goes into the weights, which are
    multiplied anyway.
    """

    row_shift: Tensor
    row_weight: Tensor
    column_shift: Tensor
    column_weight: Tensor
    image_pair_weight: Tensor
    pair_weight: Tensor

    @classmethod
    def build(
        cls, by_row_M: Tensor, by_column_N: Tensor, row_factor: Tensor, column_factor_N: Tensor, dtype: torch.dtype
    ) -> "_LogitGradient":
        """Split sums and factors into what an exponential takes and what it is multiplied by, in ``dtype``."""
        row_shift, column_shift = by_row_M.to(dtype), by_column_N.to(dtype)
        row_weight = (row_factor * (row_shift - by_row_M).exp()).to(dtype)
        column_weight = (column_factor_N * (column_shift - by_column_N).exp()).to(dtype)
        pair_weight = (row_factor + column_factor_N).to(dtype)
        return cls(
            row_shift[:, None], row_weight[:, None], column_shift, column_weight, row_factor.to(dtype), pair_weight
        )

    def of(self, tile: _Tile, offset: int) -> Tensor:
        """The gradient of a tile's logits, in the tile's own memory."""
        gradient = torch.sub(tile.logits, self.column_shift[tile.columns], out=tile.scratch).exp_()
        gradient.mul_(self.column_weight[tile.columns])
        by_row = tile.logits.sub_(self.row_shift[tile.rows]).exp_()
        gradient.addcmul_(by_row, self.row_weight[tile.rows])
        partners = slice(tile.pairs.start + offset, tile.pairs.stop + offset)
        tile.diagonal(gradient).sub_(self.pair_weight[partners])
        return gradient

    def image_half_of(self, tile: _Tile) -> Tensor:
        """The part a (p_ij - d_ij), which looks for texts of images, of a tile that ``of`` has had; in its memory."""
        by_row = tile.logits.mul_(self.row_weight[tile.rows])
        tile.diagonal(by_row).sub_(self.image_pair_weight)
        return by_row


def _signed(tile: _Tile, bias: Tensor) -> Tensor:
    """-y_ij z_ij in the tile's own memory; signs are turned before and after, so nothing cancels near 0 loss."""
    logits = tile.logits.add_(bias)
    tile.diagonal(logits).neg_()
    return logits


@dataclass(frozen=True)
class _Cotangents:
    """What one gradient of the logits sends to image_MD and text_ND, summed over tiles; None where not needed."""

    features: tuple[Tensor, Tensor]
    image: Tensor | None
    text: Tensor | None
    is_asked_for: bool
    needs_log_scale: bool

    @classmethod
    def zeros(
        cls, image_MD: Tensor, text_ND: Tensor, needs_image: bool, needs_text: bool, needs_log_scale: bool = False
    ) -> "_Cotangents":
        """Start from zeros, contiguous ones as the fake says, for what is needed."""
        is_asked_for = needs_image or needs_text
        # the scale's gradient comes from either, so that one is computed for it alone
        image, text = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) if is_needed else None
            for x, is_needed in (
                (image_MD, needs_image or (needs_log_scale and not is_asked_for)),
                (text_ND, needs_text),
            )
        )
        return cls((image_MD, text_ND), image, text, is_asked_for, needs_log_scale)

    def add(self, tile: _Tile, gradient: Tensor) -> None:
        image_MD, text_ND = self.features
        if self.image is not None:
            self.image[tile.rows].addmm_(gradient, text_ND[tile.columns])
        if self.text is not None:
            self.text[tile.columns].addmm_(gradient.T, image_MD[tile.rows])

    def scaled(self, scale: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of z = scale * (image . text): those that were asked for, and the sum of G z if it was.

        That is sum_i I_i . dL/dI_i = sum_j T_j . dL/dT_j, which costs no pass over the logits.
        """
        known = [
            (x, sent.mul_(scale))
            for x, sent in zip(self.features, (self.image, self.text), strict=True)
            if sent is not None
        ]
        sums = [torch.linalg.vecdot(*known[0]).sum().to(wide_dtype(known[0][0]))] if self.needs_log_scale else []
        return [sent for _, sent in known if self.is_asked_for], sums
