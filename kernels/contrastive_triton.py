"""The losses over pairs by Triton's tiles and library products: 2MND for statistics, 6MND for both gradients.

Legend of the shape suffixes: M own rows, N columns of all ranks, C columns of a chunk, D feature width.

Only one chunk of G exists at a time, and of the statistics two numbers for each of its tiles' rows and columns. G of
16-bit features is stored in their dtype for the tensor cores, and products with it are summed and handed over in
float32. What is stored are softmaxes and sigmoids, at most 2: scale, upstream factors and 1/N, which a loss scale of
65536 or a batch of a million take out of float16's range, multiply the float32 result. Sums of G, for scale and bias,
are taken before it is rounded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning_moeclip.kernels.backend import is_interpreted
from lightning_moeclip.kernels.contrastive_tile_triton import (
    clip_gradient_kernel,
    clip_statistics_kernel,
    fold_kernel,
    sigmoid_gradient_kernel,
    sigmoid_sum_kernel,
)
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "Tile",
    "clip_gradients",
    "clip_statistics",
    "input_precision",
    "sigmoid_gradients",
    "sigmoid_statistics",
    "tile_for",
]


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time.

    Attributes:
        rows: of the tile; a power of 2, 16 at least, as the next two.
        columns: of the tile.
        step: along the feature width.
        warps: that share the tile.
        stages: of the pipeline of loads.
    """

    rows: int = 128
    columns: int = 128
    step: int = 64
    warps: int = 8
    stages: int = 3


# elements: 16 bytes and more in every dtype
_ALIGNMENT = 16
# programs of fold_kernel: tiles taken at a time, and lines of each program
_FOLD_TILES, _FOLD_LINES, _FOLD_WARPS = 32, 32, 4
# the largest power of 2 that times 2, the bound of G without its factors, is within float16. It leaves 2^-38 as the
# smallest step, where a softmax of a million columns has entries near 2^-20
_HALF_GAIN = 2.0**14
_BEYOND = 2.0**100  # a number of float32, so that nothing is rounded away


def tile_for(kernel: str, dtype: torch.dtype, *, arch: int) -> Tile:
    """The tile of a kernel: the largest that leaves every target without a spilled register.

    128 x 128 spills with float32's products of three parts on sm_80, with the sigmoid's two exponents on sm_90, and
    with the weights of 128 columns beside G: on sm_100, whose accumulators lie by rows, and elsewhere for odd N.

    Args:
        kernel: "clip_statistics", "clip_gradient" or "sigmoid".
        dtype: of the features.
        arch: of an NVIDIA GPU, such as 90; 0 for AMD's, whose shared memory holds two stages, and for the interpreter.
    """
    columns = 128 if kernel == "clip_statistics" and dtype is not torch.float32 else 64
    return Tile(columns=columns, step=32 if dtype is torch.float32 else 64, stages=3 if arch else 2)


def input_precision(dtype: torch.dtype, *, arch: int) -> str:
    """How float32 features enter a product.

    Three products of tf32 parts carry 22 bits each into tensor cores; plain tf32 would move a logit of 100 by 0.05.
    AMD's matrix cores take float32 itself, as does the interpreter. Says nothing to 16-bit features.
    """
    return "tf32x3" if dtype is torch.float32 and arch >= 80 else "ieee"


def clip_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, offset: int, chunk_size: int, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``contrastive.clip_statistics``; for at least one row, and not in float64."""
    walk = _Walk.over("clip_statistics", image_MD, text_ND, offset, chunk_size, tile)
    num_rows, tile = len(image_MD), walk.tile
    row_tiles, column_tiles = _ceil(num_rows, tile.rows), _ceil(walk.width, tile.columns)
    row_parts = image_MD.new_empty(2, column_tiles * num_rows, dtype=torch.float32)
    column_parts = row_parts.new_empty(2, row_tiles * walk.width)
    by_row_M = image_MD.new_full((num_rows,), -torch.inf, dtype=torch.float64)
    by_column_N = by_row_M.new_full((len(text_ND),), -torch.inf)
    positives_M = torch.empty_like(by_row_M)
    for columns in walk.chunks():
        walk.launch(clip_statistics_kernel, columns, (scale, *row_parts, *column_parts, positives_M))
        _fold(row_parts, by_row_M, _ceil(columns.stop - columns.start, tile.columns))
        _fold(column_parts, by_column_N[columns], row_tiles)
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
    tile: Tile | None = None,
) -> list[Tensor]:
    """See ``contrastive.clip_gradients``; for at least one row, and not in float64."""
    walk = _Walk.over("clip_gradient", image_MD, text_ND, offset, chunk_size, tile)
    by_row_M, by_column_N = by_row_M.double().contiguous(), by_column_N.double().contiguous()
    row_factor, column_factor_N = row_factor.double().reshape(()), column_factor_N.double()
    unit: Tensor | float = 1.0
    if image_MD.dtype is torch.float16:
        unit = _magnitude(row_factor, column_factor_N) / _HALF_GAIN
        row_factor, column_factor_N = row_factor / unit, column_factor_N / unit
    column_factor_N = column_factor_N.contiguous()
    # of the half: no factors of columns, and log-sum-exps beyond all logits: q is 0 even where the true one is NaN
    no_factor_N, beyond_N = torch.zeros_like(column_factor_N), torch.full_like(by_column_N, _BEYOND)
    gradient = walk.new_gradient()
    merged = _Cotangents.zeros(walk, needs_image=needs_image, needs_text=needs_text)
    half = _Cotangents.zeros(walk, needs_image=needs_image and needs_halves, needs_text=needs_text and needs_halves)
    log_scale_sum = image_MD.new_zeros((), dtype=torch.float64)
    for columns in walk.chunks():
        # by one kernel, since another might round the whole otherwise where the half is asked for
        parts = [(merged, by_column_N, column_factor_N), (half, beyond_N, no_factor_N)]
        for cotangents, column_N, factor_N in parts[: 1 + needs_halves]:
            weights, sums = (by_row_M, column_N[columns], row_factor, factor_N[columns]), walk.new_row_sums(columns)
            walk.launch(clip_gradient_kernel, columns, (scale, *weights, gradient, sums), gradient.stride(0))
            cotangents.add(gradient, columns)
            if cotangents is merged:
                log_scale_sum += sums.sum(dtype=torch.float64)
    found = merged.scaled(scale * unit) + half.scaled(scale * unit)
    return found + [log_scale_sum * unit] * needs_log_scale


def sigmoid_statistics(
    image_MD: Tensor,
    text_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    offset: int,
    chunk_size: int,
    tile: Tile | None = None,
) -> Tensor:
    """See ``contrastive.sigmoid_statistics``; for at least one row, and not in float64."""
    walk = _Walk.over("sigmoid", image_MD, text_ND, offset, chunk_size, tile)
    total = image_MD.new_zeros((), dtype=torch.float64)
    for columns in walk.chunks():
        sums = walk.new_sums(columns)
        walk.launch(sigmoid_sum_kernel, columns, (scale, bias, sums))
        total += sums.sum(dtype=torch.float64)
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
    tile: Tile | None = None,
) -> list[Tensor]:
    """See ``contrastive.sigmoid_gradients``; for at least one row, and not in float64."""
    walk = _Walk.over("sigmoid", image_MD, text_ND, offset, chunk_size, tile)
    gain = _HALF_GAIN if image_MD.dtype is torch.float16 else 1.0
    row_factor = row_factor.double().reshape(())
    gradient = walk.new_gradient()
    merged = _Cotangents.zeros(walk, needs_image=needs_image, needs_text=needs_text)
    bias_sum, log_scale_sum = image_MD.new_zeros(2, dtype=torch.float64).unbind()
    pull_M = image_MD.new_empty(len(image_MD), dtype=torch.float32)
    for columns in walk.chunks():
        sums, row_sums = walk.new_sums(columns), walk.new_row_sums(columns)
        arguments = (scale, bias, gradient, sums, row_sums, pull_M)
        walk.launch(sigmoid_gradient_kernel, columns, arguments, gradient.stride(0), GAIN=gain)
        bias_sum += sums.sum(dtype=torch.float64)
        log_scale_sum += row_sums.sum(dtype=torch.float64)
        merged.add(gradient, columns)
    found = merged.scaled(scale * (row_factor / gain))
    log_scale_sum = (log_scale_sum - bias.double().reshape(()) * bias_sum) * row_factor
    bias_sum, pull_M = bias_sum * row_factor, (pull_M * row_factor).float()
    return found + [bias_sum] * needs_bias + [pull_M] * needs_pull + [log_scale_sum] * needs_log_scale


@dataclass(frozen=True)
class _Walk:
    """The chunks of columns of a matrix of logits, and how their tiles are computed."""

    images: Tensor
    texts: Tensor
    dim: int
    offset: int
    width: int
    tile: Tile
    precision: str

    @classmethod
    def over(
        cls, kernel: str, image_MD: Tensor, text_ND: Tensor, offset: int, chunk_size: int, tile: Tile | None
    ) -> "_Walk":
        """Lay out features as the tiles of ``kernel`` read them; ``tile`` None takes the one of its target."""
        if image_MD.dtype is not text_ND.dtype:
            image_MD, text_ND = image_MD.float(), text_ND.float()
        dim = image_MD.shape[1]
        if dim % _ALIGNMENT:
            # rows that begin at odd places would be loaded number by number
            image_MD, text_ND = (pad(x, (0, -dim % _ALIGNMENT)) for x in (image_MD, text_ND))
        dtype, arch = image_MD.dtype, _arch(image_MD)
        tile = tile or tile_for(kernel, dtype, arch=arch)
        width = min(chunk_size, len(text_ND))
        precision = input_precision(dtype, arch=arch)
        return cls(image_MD.contiguous(), text_ND.contiguous(), dim, offset, width, tile, precision)

    def chunks(self) -> list[slice]:
        total = len(self.texts)
        return [slice(first, min(first + self.width, total)) for first in range(0, total, self.width)]

    def num_programs(self, columns: slice) -> int:
        return _ceil(len(self.images), self.tile.rows) * _ceil(columns.stop - columns.start, self.tile.columns)

    def new_gradient(self) -> Tensor:
        """[M, C] with rows that stores of 16 bytes can fill; the last columns are nobody's."""
        return self.images.new_empty(len(self.images), _ceil(self.width, _ALIGNMENT) * _ALIGNMENT)

    def new_sums(self, columns: slice) -> Tensor:
        """[programs], float32."""
        return self.images.new_empty(self.num_programs(columns), dtype=torch.float32)

    def new_row_sums(self, columns: slice) -> Tensor:
        """[programs * rows of a tile], float32."""
        return self.images.new_empty(self.num_programs(columns) * self.tile.rows, dtype=torch.float32)

    def launch(self, kernel: Any, columns: slice, arguments: tuple[Tensor, ...], *sizes: int, **constants: Any) -> None:
        """Run a kernel over the tiles of a chunk."""
        tile, texts = self.tile, self.texts[columns]
        with torch.cuda.device_of(self.images):
            kernel[(self.num_programs(columns),)](
                self.images,
                texts,
                *arguments,
                len(self.images),
                len(texts),
                self.offset - columns.start,
                *sizes,
                D=self.images.shape[1],
                B=tile.rows,
                C=tile.columns,
                K=tile.step,
                PRECISION=self.precision,
                WIDENS=is_interpreted(),
                num_warps=tile.warps,
                num_stages=tile.stages,
                **constants,
                enable_fp_fusion=True,
            )


@dataclass(frozen=True)
class _Cotangents:
    """What G sends to images and texts, float32, summed over chunks; None where not needed."""

    walk: _Walk
    image: Tensor | None
    text: Tensor | None

    @classmethod
    def zeros(cls, walk: _Walk, *, needs_image: bool, needs_text: bool) -> "_Cotangents":
        new = [
            torch.zeros_like(x, dtype=torch.float32) if is_needed else None
            for x, is_needed in ((walk.images, needs_image), (walk.texts, needs_text))
        ]
        return cls(walk, *new)

    def add(self, gradient: Tensor, columns: slice) -> None:
        """Take in a chunk of G, [M, C] and the columns that are nobody's."""
        gradient_MC = gradient[:, : columns.stop - columns.start]
        if self.image is not None:
            _add_product(self.image, gradient_MC, self.walk.texts[columns])
        if self.text is not None:
            _add_product(self.text[columns], gradient_MC.T, self.walk.images)

    def scaled(self, factor: Tensor) -> list[Tensor]:
        """Those that there are, in the width that was given."""
        found = [x.mul_(factor.float()) for x in (self.image, self.text) if x is not None]
        return [x[:, : self.walk.dim].contiguous() for x in found]


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Total += x @ y, float32, by a library."""
    if x.is_cuda and x.dtype is not torch.float32:
        # not addmm, whose out_dtype is broken (pytorch#154086)
        total += torch.mm(x, y, out_dtype=torch.float32)
    else:
        total.addmm_(x.float(), y.float())


def _fold(parts: Tensor, result: Tensor, num_tiles: int) -> None:
    """Take maxima and sums, [2, at least num_tiles * len(result)], into running log-sum-exps."""
    with torch.cuda.device_of(result):
        fold_kernel[(_ceil(len(result), _FOLD_LINES),)](
            *parts,
            result,
            num_tiles,
            len(result),
            T=_FOLD_TILES,
            B=_FOLD_LINES,
            num_warps=_FOLD_WARPS,
            enable_fp_fusion=True,
        )


def _magnitude(*factors: Tensor) -> Tensor:
    """0-d, float64: the largest of all, 1 where that is no divisor."""
    largest = torch.stack([x.abs().max() for x in factors]).max()
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _arch(x: Tensor) -> int:
    if not x.is_cuda or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def _ceil(length: int, step: int) -> int:
    return -(-length // step)
