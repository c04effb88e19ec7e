"""Launches of the walk over gradients, and the tables of what a launch has to know of each tensor.

They are sent in one copy per call, which waits for nothing; ``PackPlan`` keeps them at a fixed place, so that a
captured graph finds new addresses there.
"""

import itertools
import struct
from collections.abc import Iterable, Sequence

import torch
from lightning_moeclip.kernels.grad_statistics import NUM_COLUMNS, is_dense, num_reals
from lightning_moeclip.kernels.grad_walk_triton import (
    CHUNK,
    NUM_EXTRA,
    Kind,
    Options,
    Span,
    Tables,
    fold,
    row_width,
    walk,
)
from torch import Tensor

__all__ = ["PackPlan", "pack", "statistics_of", "unpack"]

_ALIGNMENT = 16


class PackPlan:
    """``grad_pack`` into places that stay, as launches that a CUDA graph can capture.

    ``load`` before each launch or replay, outside of the capture and on the stream of the launch; ``launch`` runs
    kernels alone, and compiles them the first time: once before a capture. The tensors of the last ``load`` are kept
    alive until the next, or until ``release``.

    Attributes:
        table: [n, NUM_COLUMNS (+ 2 with mates)] float64, what a launch finds; None without statistics.
    """

    def __init__(
        self,
        places: Sequence[Tensor],
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        factor_dtypes: Sequence[torch.dtype] | None = None,
        accumulates: bool = False,
        with_statistics: bool = False,
        with_mates: bool = False,
    ) -> None:
        """Lay out the tables.

        Args:
            places: parts of a bucket that fill memory without holes, at least one.
            dtypes: of the gradients; None takes those of the places.
            factor_dtypes: of their factors; None takes float32, and float64 for places of it.
            accumulates: as of ``grad_pack``.
            with_statistics: as of ``grad_pack``.
            with_mates: some launch may have mates; needs ``with_statistics``.
        """
        assert all(is_dense(place) for place in places), "places fill memory without holes"
        assert with_statistics or not with_mates, "mates are for the statistics"
        self._places = tuple(places)
        dtypes = [place.dtype for place in places] if dtypes is None else dtypes
        if factor_dtypes is None:
            factor_dtypes = [_at_least_float32(place.dtype) for place in places]
        kinds = [
            Kind(dtype.to_real(), place.dtype.to_real(), factor, _is_aligned(place))
            for dtype, place, factor in zip(dtypes, places, factor_dtypes, strict=True)
        ]
        options = Options(accumulates=accumulates, with_sums=with_statistics, with_mates=with_mates)
        self._walk = _Walk(tuple(map(num_reals, places)), tuple(kinds), options, places[0].device)
        self.table = self._walk.new_table() if with_statistics else None

    def load(
        self, gradients: Sequence[Tensor], factors: Sequence[Tensor], *, mates: Sequence[Tensor | None] | None = None
    ) -> None:
        """Send addresses and factors.

        Args:
            gradients: [shape of its place] each, of the dtypes that were said; one with other strides, or at an
                address that is no multiple of 16 bytes where its place is, is copied.
            factors: 0-d, one per gradient. One on the CPU is read now, one on the device by each launch.
            mates: as of ``grad_pack``.
        """
        self._walk.load(gradients, self._places, factors, mates)

    def launch(self) -> Tensor | None:
        """Run the kernels on the current stream; returns ``table``."""
        self._walk.launch(self.table)
        return self.table

    def release(self) -> None:
        """Let go of the gradients of the last ``load``, once nothing will be launched with them."""
        self._walk.release()


def pack(
    gradients: Sequence[Tensor],
    places: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    accumulates: bool = False,
    with_statistics: bool = False,
    mates: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """``grad_pack`` of at least one gradient, checked before."""
    options = Options(accumulates=accumulates, with_sums=with_statistics, with_mates=mates is not None)
    return _run(options, gradients, places, factors, mates)


def unpack(
    sources: Sequence[Tensor],
    gradients: Sequence[Tensor],
    coefficient: Tensor,
    *,
    with_statistics: bool = False,
    with_residual: bool = False,
    checks_read: bool = False,
) -> Tensor | None:
    """``grad_unpack`` of at least one gradient, checked before; ``checks_read``: count what was not finite before."""
    with_sums = with_statistics or with_residual
    options = Options(with_sums=with_sums, with_residual=with_residual, checks_read=checks_read)
    return _run(options, sources, gradients, [coefficient] * len(sources), None)


def statistics_of(tensors: Sequence[Tensor]) -> Tensor:
    """``grad_statistics`` of at least one tensor, checked before."""
    sources = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    sources = [tensor if is_dense(tensor) else tensor.contiguous() for tensor in sources]
    table = _run(Options(writes=False, with_sums=True), sources, sources, None, None)
    assert table is not None, "sums were asked for"
    return table


def _run(
    options: Options,
    sources: Sequence[Tensor],
    places: Sequence[Tensor],
    factors: Sequence[Tensor] | None,
    mates: Sequence[Tensor | None] | None,
) -> Tensor | None:
    device = places[0].device
    if _is_capturing(device):
        raise RuntimeError(
            "A CUDA graph is being captured, and its replays would read addresses of gradients from memory of the host "
            "that is free by then. Capture PackPlan.launch, and call PackPlan.load before each replay."
        )
    if options.writes:
        _check_places(places)
    dense = [
        place if _is_plain(place) else place.detach().resolve_conj().resolve_neg().contiguous() for place in places
    ]
    factor_dtypes = [torch.float32] * len(places) if factors is None else [factor.dtype for factor in factors]
    kinds = tuple(
        Kind(source.dtype.to_real(), place.dtype.to_real(), factor, _is_aligned(place) and _is_aligned(source))
        for source, place, factor in zip(sources, dense, factor_dtypes, strict=True)
    )
    # memory that is freed is reused in the order of the stream: nothing has to stay until the kernels have run
    found = _Walk(tuple(map(num_reals, dense)), kinds, options, device)
    found.load(sources, dense, factors, mates)
    table = found.new_table() if options.with_sums else None
    found.launch(table)
    if options.writes:
        for place, written in zip(places, dense, strict=True):
            if place is not written:
                place.detach().copy_(written)
    return table


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check_places(places: Sequence[Tensor]) -> None:
    addresses = [place.data_ptr() for place in places if place.numel()]
    if len(set(addresses)) < len(addresses):
        raise ValueError(
            "Two gradients have the same place, which would be written by both at the same time. "
            "Give each place once per call."
        )


class _Walk:
    """Launches for tensors of some sizes and kinds, and the memory where their tables lie."""

    def __init__(self, sizes: tuple[int, ...], kinds: tuple[Kind, ...], options: Options, device: torch.device) -> None:
        self._kinds, self._options, self._device = kinds, options, device
        groups = list(dict.fromkeys(kinds))
        number_of = {kind: number for number, kind in enumerate(groups)}
        self._order = sorted(range(len(sizes)), key=lambda index: number_of[kinds[index]])
        self._sizes = [sizes[index] for index in self._order]
        self._first_rows = [0, *itertools.accumulate(-(-size // CHUNK) for size in self._sizes)]
        self._groups, first = [], 0
        for kind in groups:
            end = first + kinds.count(kind)
            row, end_row = self._first_rows[first], self._first_rows[end]
            if row < end_row:
                self._groups.append((kind, Span(first, end, row, end_row - row)))
            first = end
        # the tables; and the factors that came from the CPU, 8 bytes for each. Rows of an even length, since Triton
        # compiles anew for a table at another multiple of 16 bytes
        self._length = len(sizes) + 2 - len(sizes) % 2
        self._memory = torch.empty(len(Tables._fields) + 1, self._length, dtype=torch.int64, device=device)
        self._tables = Tables(*self._memory[:-1])
        num_rows = max(self._first_rows[-1], 1) if options.with_sums else 1
        self._partial = torch.empty(num_rows, row_width(options), dtype=torch.float64, device=device)
        self._alive: list[Tensor] = []

    def new_table(self) -> Tensor:
        """For one launch."""
        num_extra = NUM_EXTRA if self._options.with_mates or self._options.with_residual else 0
        return torch.empty(len(self._kinds), NUM_COLUMNS + num_extra, dtype=torch.float64, device=self._device)

    def load(
        self,
        sources: Sequence[Tensor],
        places: Sequence[Tensor],
        factors: Sequence[Tensor] | None,
        mates: Sequence[Tensor | None] | None,
    ) -> None:
        """Send the tables."""
        self._alive = [*places]
        nothing = [0] * len(places)
        factor_addresses, bits = (nothing, nothing) if factors is None else self._factors(factors)
        addresses = (
            self._kept(sources, places),
            [place.data_ptr() for place in places],
            nothing if mates is None else self._kept(mates, places),
            factor_addresses,
        )
        # in the order of Tables
        rows = [[row[index] for index in self._order] for row in addresses]
        rows += [self._sizes, self._first_rows, self._order, bits]
        rows = [[*row, *[0] * (self._length - len(row))] for row in rows]
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._memory.copy_(host, non_blocking=True)

    def _kept(self, tensors: Iterable[Tensor | None], places: Sequence[Tensor]) -> list[int]:
        """Addresses of tensors in the layout of their places."""
        found = []
        for tensor, place, kind in zip(tensors, places, self._kinds, strict=True):
            if tensor is None:
                found.append(0)
                continue
            assert tensor.shape == place.shape, "of the shape that was laid out"
            laid_out = _like(tensor, place, is_aligned=kind.is_aligned)
            assert laid_out.dtype.to_real() is kind.source, "of the dtype that was laid out"
            self._alive.append(laid_out)
            found.append(laid_out.data_ptr())
        return found

    def _factors(self, factors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        """Addresses of factors, and the bits of those that are on the CPU, which get addresses here."""
        addresses, bits = [], []
        slot = self._memory[-1].data_ptr()
        for index, (factor, kind) in enumerate(zip(factors, self._kinds, strict=True)):
            assert factor.dtype is kind.factor, "of the dtype that was laid out"
            if factor.is_cpu:
                layout = "<d" if kind.factor is torch.float64 else "<f4x"
                bits.append(struct.unpack("<q", struct.pack(layout, factor.item()))[0])
                addresses.append(slot + 8 * index)
            else:
                self._alive.append(factor)
                bits.append(0)
                addresses.append(factor.data_ptr())
        return addresses, bits

    def launch(self, table: Tensor | None) -> None:
        """Run the kernels."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._launch(table)
        else:
            self._launch(table)

    def _launch(self, table: Tensor | None) -> None:
        for kind, span in self._groups:
            walk(kind, self._options, span, self._tables, self._partial)
        if table is not None:
            fold(self._options, self._partial, self._tables.first_rows, self._tables.targets, table)

    def release(self) -> None:
        """Let go of the tensors behind the addresses; memory that is freed is reused after the launch."""
        self._alive = []


def _like(tensor: Tensor, place: Tensor, *, is_aligned: bool) -> Tensor:
    """``tensor``, or a copy in the layout of ``place``, which is dense."""
    is_like = tensor.stride() == place.stride() or (tensor.is_contiguous() and place.is_contiguous())
    if is_like and not (tensor.is_conj() or tensor.is_neg()) and (_is_aligned(tensor) or not is_aligned):
        return tensor
    laid_out = torch.empty_strided(place.size(), place.stride(), dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor.detach())


def _is_plain(place: Tensor) -> bool:
    return is_dense(place) and not (place.is_conj() or place.is_neg())


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype.to_real(), torch.float32)
