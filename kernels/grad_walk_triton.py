"""The Triton kernels under ``grad_triton``: one walk over many tensors.

A program reads one chunk of one tensor through tables of addresses, so that any number of tensors takes one launch per
kind; it finds its tensor by a binary search, so that the tables have a column per tensor and none per chunk. Sums are
taken in float64: each program writes a row, a second kernel folds the rows of a tensor in a fixed order. No atomics:
the same numbers every time. A complex tensor is walked as twice as many real numbers.

Legend: a name ending in _S is one number per element of a step of the walk, _T one per element of the ragged tail.
"""

# the types of a kernel's arguments are those of its launch
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from lightning_moeclip.kernels.backend import num_warps
from lightning_moeclip.kernels.grad_statistics import MAXIMUM
from torch import Tensor

__all__ = ["CHUNK", "NUM_EXTRA", "Kind", "Options", "Span", "Tables", "fold", "row_width", "walk"]

# a step of 1024 elements gives each of 128 threads a 16-byte load of 16-bit elements, and 3 float64 sums of 8 elements
# stay in its registers; a chunk of 8 steps writes 64 bytes of sums per 32 KiB read
_STEP, _NUM_STEPS, _TAIL = 1024, 8, 16
CHUNK = _STEP * _NUM_STEPS
_NUM_THREADS = 128
_FOLD_ROWS, _FOLD_WARPS = 256, 8
_BAD = 2**16  # above the number of zeros in a chunk
NUM_EXTRA = 2  # columns of mates or of the residual

_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class Kind(NamedTuple):
    """What tensors of one launch have in common.

    Attributes:
        source: dtype that is read, real.
        place: dtype that is written, real.
        factor: dtype of the factors.
        is_aligned: all addresses are multiples of 16 bytes.
    """

    source: torch.dtype
    place: torch.dtype
    factor: torch.dtype
    is_aligned: bool


class Options(NamedTuple):
    """What a walk does with each element; without ``writes`` there are no places and no factors.

    ``checks_read``: elements that are not finite are counted as they were read, and not as they were written.
    """

    writes: bool = True
    accumulates: bool = False
    with_sums: bool = False
    with_mates: bool = False
    with_residual: bool = False
    checks_read: bool = False


class Tables(NamedTuple):
    """A number per tensor, [tensors] int64 each, tensors of one kind beside each other.

    Attributes:
        sources: addresses.
        places: addresses.
        mates: addresses, 0 without one.
        factors: addresses.
        sizes: real numbers of the tensor.
        first_rows: [tensors + 1], chunks of all tensors before.
        targets: row of the result.
    """

    sources: Tensor
    places: Tensor
    mates: Tensor
    factors: Tensor
    sizes: Tensor
    first_rows: Tensor
    targets: Tensor


class Span(NamedTuple):
    """The tensors of one launch: ``first`` to ``end``, whose chunks start with ``first_chunk``."""

    first: int
    end: int
    first_chunk: int
    num_chunks: int


def row_width(options: Options) -> int:
    """Numbers per row of sums: a power of two."""
    return 16 if options.with_mates or options.with_residual else 8


def walk(kind: Kind, options: Options, span: Span, tables: Tables, partial: Tensor) -> None:
    """Walk over the chunks of tensors.

    Args:
        kind: of all of them.
        options: what to do.
        span: which they are; at least one chunk.
        tables: of all tensors.
        partial: [chunks, row_width] float64, written with ``with_sums``.
    """
    is_wide = torch.float64 in (kind.source, kind.place)
    _walk_kernel[(span.num_chunks,)](
        *tables[:-1],
        partial,
        span.first,
        span.end,
        span.first_chunk,
        SOURCE=_TYPES[kind.source],
        PLACE=_TYPES[kind.place],
        FACTOR=_TYPES[kind.factor],
        COMPUTE=tl.float64 if is_wide else tl.float32,
        IS_ALIGNED=kind.is_aligned,
        WRITES=options.writes,
        ACCUMULATES=options.accumulates,
        WITH_SUMS=options.with_sums,
        WITH_MATES=options.with_mates,
        WITH_RESIDUAL=options.with_residual,
        CHECKS_READ=options.checks_read,
        # a multiple of 8: two kernels, for 256 tensors and for 65536, in place of one for each power of two
        HALVINGS=8 * max(1, -(-(span.end - span.first - 1).bit_length() // 8)),
        STEP=_STEP,
        NUM_STEPS=_NUM_STEPS,
        TAIL=_TAIL,
        ROW=row_width(options),
        BAD=_BAD,
        num_warps=num_warps(_NUM_THREADS),
        enable_fp_fusion=True,  # what is fused is summed, in float64, or added to a place: one rounding less
    )


def fold(options: Options, partial: Tensor, first_rows: Tensor, targets: Tensor, table: Tensor) -> None:
    """Fold the rows of each tensor.

    Args:
        options: of the walk.
        partial: [chunks, row_width] float64.
        first_rows: as in ``Tables``.
        targets: as in ``Tables``.
        table: [tensors, NUM_COLUMNS (+ NUM_EXTRA)] float64, contiguous; written.
    """
    assert table.is_contiguous(), "the kernel walks it row by row"
    _fold_kernel[(len(table),)](
        partial,
        first_rows,
        targets,
        table,
        ROW=row_width(options),
        WIDTH=table.shape[1],
        MAXIMUM_AT=MAXIMUM,
        ROWS=_FOLD_ROWS,
        num_warps=_FOLD_WARPS,
        enable_fp_fusion=True,
    )


@triton.jit
def _step(
    source, place, factor, offsets, num_valid,
    PLACE: tl.constexpr, COMPUTE: tl.constexpr, WRITES: tl.constexpr, ACCUMULATES: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One step of elements: reads, multiplies, writes; what was written, what was read and what was there before."""
    mask = offsets < num_valid
    read = tl.load(source + offsets, mask=mask, other=0.0).to(COMPUTE)
    before = read
    if WITH_RESIDUAL or ACCUMULATES:
        before = tl.load(place + offsets, mask=mask, other=0.0).to(COMPUTE)
    written = read
    if WRITES:
        product = read * factor
        if ACCUMULATES:
            product += before
        rounded = product.to(PLACE)
        tl.store(place + offsets, rounded, mask=mask)
        written = rounded.to(COMPUTE)
    return written, read, before


@triton.jit
def _finite(value):
    """In float64, and 0 where it is not finite."""
    wide = value.to(tl.float64)
    is_finite = tl.abs(wide) < float("inf")
    return tl.where(is_finite, wide, 0.0), is_finite


@triton.jit
def _sums_of(written, read, offsets, num_valid, CHECKS_READ: tl.constexpr, BAD: tl.constexpr):
    """Per element: value, square, absolute and, as digits of one number, whether it is not finite and whether zero."""
    value, is_finite = _finite(written)
    if CHECKS_READ:
        _, is_finite = _finite(read)
    zero = tl.where(offsets < num_valid, (written == 0.0).to(tl.int32), 0)
    return value, value * value, tl.abs(value), tl.where(is_finite, zero, BAD)


@triton.jit
def _pair_of(first, second, IS_RESIDUAL: tl.constexpr):
    """Per element: dot product and square of the second; or the absolutes of the difference and of the second."""
    other, _ = _finite(second)
    if IS_RESIDUAL:
        difference, _ = _finite(second.to(tl.float64) - first.to(tl.float64))
        return tl.abs(difference), tl.abs(other)
    value, _ = _finite(first)
    return value * other, other * other


@triton.jit
def _tensor_of(first_rows, first, end, chunk, HALVINGS: tl.constexpr):
    """The last tensor of ``first`` to ``end`` that starts at a chunk or before it: the one it is part of."""
    for _ in range(HALVINGS):
        middle = (first + end) // 2
        is_after = tl.load(first_rows + middle) > chunk
        end = tl.where(is_after, middle, end)
        first = tl.where(is_after, first, middle)
    return first


# a number that is 1 or a multiple of 16 would take a kernel of its own
@triton.jit(do_not_specialize=["begin", "end", "first_chunk"])
def _walk_kernel(
    sources, places, mates, factors, sizes, first_rows, partial, begin, end, first_chunk,
    SOURCE: tl.constexpr, PLACE: tl.constexpr, FACTOR: tl.constexpr, COMPUTE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    WRITES: tl.constexpr, ACCUMULATES: tl.constexpr, WITH_SUMS: tl.constexpr, WITH_MATES: tl.constexpr,
    WITH_RESIDUAL: tl.constexpr, CHECKS_READ: tl.constexpr, HALVINGS: tl.constexpr, STEP: tl.constexpr,
    NUM_STEPS: tl.constexpr, TAIL: tl.constexpr, ROW: tl.constexpr, BAD: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor. Tables as in ``Tables``, [tensors] int64 each; partial: [chunks, ROW] float64."""
    chunk = first_chunk + tl.program_id(0)
    tensor = _tensor_of(first_rows, begin, end, chunk, HALVINGS)
    offset = (chunk - tl.load(first_rows + tensor)) * (STEP * NUM_STEPS)
    length = tl.minimum(tl.load(sizes + tensor) - offset, STEP * NUM_STEPS).to(tl.int32)
    source = tl.load(sources + tensor).to(tl.pointer_type(SOURCE))
    place = source
    factor = 1.0
    if WRITES:
        place = tl.load(places + tensor).to(tl.pointer_type(PLACE))
        factor = tl.load(tl.load(factors + tensor).to(tl.pointer_type(FACTOR))).to(COMPUTE)
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
        place = tl.multiple_of(place, 16)
    offset = tl.multiple_of(offset, 16)
    source += offset
    place += offset
    # whole runs of 16 elements take wide loads and stores; the last few follow
    num_whole = length // TAIL * TAIL
    if WITH_MATES:
        mate_address = tl.load(mates + tensor)
        mate = mate_address.to(tl.pointer_type(SOURCE))
        if IS_ALIGNED:
            mate = tl.multiple_of(mate, 16)
        mate += offset
        num_mate_whole = tl.where(mate_address != 0, num_whole, 0)
        num_mate = tl.where(mate_address != 0, length, 0)

    if WITH_SUMS:
        total_S = tl.zeros((STEP,), tl.float64)
        square_S = tl.zeros((STEP,), tl.float64)
        absolute_S = tl.zeros((STEP,), tl.float64)
        count_S = tl.zeros((STEP,), tl.int32)
        largest_S = tl.zeros((STEP,), COMPUTE)
        if WITH_MATES or WITH_RESIDUAL:
            first_S = tl.zeros((STEP,), tl.float64)
            second_S = tl.zeros((STEP,), tl.float64)
    for step in range(NUM_STEPS):
        at_S = step * STEP + tl.arange(0, STEP)
        written_S, read_S, before_S = _step(
            source, place, factor, at_S, num_whole, PLACE, COMPUTE, WRITES, ACCUMULATES, WITH_RESIDUAL
        )
        if WITH_SUMS:
            value, square, absolute, count = _sums_of(written_S, read_S, at_S, num_whole, CHECKS_READ, BAD)
            total_S += value
            square_S += square
            absolute_S += absolute
            count_S += count
            largest_S = tl.maximum(largest_S, absolute.to(COMPUTE))
            if WITH_MATES:
                mate_S = tl.load(mate + at_S, mask=at_S < num_mate_whole, other=0.0).to(COMPUTE)
                first, second = _pair_of(written_S, mate_S, False)
                first_S += first
                second_S += second
            if WITH_RESIDUAL:
                first, second = _pair_of(read_S, before_S, True)
                first_S += first
                second_S += second

    at_T = num_whole + tl.arange(0, TAIL)
    written_T, read_T, before_T = _step(
        source, place, factor, at_T, length, PLACE, COMPUTE, WRITES, ACCUMULATES, WITH_RESIDUAL
    )
    if WITH_SUMS:
        total_T, square_T, absolute_T, count_T = _sums_of(written_T, read_T, at_T, length, CHECKS_READ, BAD)
        count = tl.sum(count_S, 0) + tl.sum(count_T, 0)
        row = partial + chunk.to(tl.int64) * ROW
        tl.store(row + 0, length.to(tl.float64))
        tl.store(row + 1, tl.sum(total_S, 0) + tl.sum(total_T, 0))
        tl.store(row + 2, tl.sum(square_S, 0) + tl.sum(square_T, 0))
        tl.store(row + 3, tl.sum(absolute_S, 0) + tl.sum(absolute_T, 0))
        tl.store(row + 4, (count // BAD).to(tl.float64))
        tl.store(row + 5, (count % BAD).to(tl.float64))
        tl.store(row + 6, tl.maximum(tl.max(largest_S, 0).to(tl.float64), tl.max(absolute_T, 0)))
        if WITH_MATES:
            mate_T = tl.load(mate + at_T, mask=at_T < num_mate, other=0.0).to(COMPUTE)
            first_T, second_T = _pair_of(written_T, mate_T, False)
            tl.store(row + 7, tl.sum(first_S, 0) + tl.sum(first_T, 0))
            tl.store(row + 8, tl.sum(second_S, 0) + tl.sum(second_T, 0))
        if WITH_RESIDUAL:
            first_T, second_T = _pair_of(read_T, before_T, True)
            tl.store(row + 7, tl.sum(first_S, 0) + tl.sum(first_T, 0))
            tl.store(row + 8, tl.sum(second_S, 0) + tl.sum(second_T, 0))
        # the fold reads two at a time
        tl.store(row + (9 if WITH_MATES or WITH_RESIDUAL else 7), 0.0)


@triton.jit
def _fold_kernel(
    partial, first_rows, targets, table,
    ROW: tl.constexpr, WIDTH: tl.constexpr, MAXIMUM_AT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of one tensor into one. Tables as in ``Tables``; table: [tensors, WIDTH] float64."""
    tensor = tl.program_id(0)
    row = tl.load(first_rows + tensor)
    end = tl.load(first_rows + tensor + 1)
    column = tl.arange(0, ROW)
    total = tl.zeros((ROWS, ROW), tl.float64)
    largest = tl.zeros((ROWS, ROW), tl.float64)
    while row < end:
        rows = row + tl.arange(0, ROWS)
        at = rows[:, None] * ROW + column[None, :]
        is_written = (rows < end)[:, None] & (column < WIDTH + WIDTH % 2)[None, :]
        value = tl.load(partial + at, mask=is_written, other=0.0)
        total += value
        largest = tl.maximum(largest, value)
        row += ROWS
    folded = tl.where(column == MAXIMUM_AT, tl.max(largest, 0), tl.sum(total, 0))
    tl.store(table + tl.load(targets + tensor) * WIDTH + column, folded, mask=column < WIDTH)
