"""Gradients into their places in a flat bucket: one pass that multiplies, casts and, where asked, takes sums."""

from collections.abc import Sequence

import torch
from lightning_moeclip.kernels.backend import runs_triton
from lightning_moeclip.kernels.grad_statistics import (
    DTYPES,
    NUM_COLUMNS,
    HostSums,
    as_reals,
    check_dtype,
    grad_statistics,
    is_dense,
    num_reals,
)
from torch import Tensor

__all__ = ["FACTOR_DTYPES", "grad_pack", "in_order", "multiply", "multiply_with_sums"]

FACTOR_DTYPES = (torch.float32, torch.float64)
_NARROW = frozenset([torch.float16, torch.bfloat16, torch.complex32])


def grad_pack(
    gradients: Sequence[Tensor],
    places: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    accumulates: bool = False,
    with_statistics: bool = False,
    mates: Sequence[Tensor | None] | None = None,
) -> Tensor | None:
    """places[i] = factors[i] * gradients[i] (or += with ``accumulates``), all of them in one pass.

    The product is taken in float32 at least and rounded once, to the dtype of the place. Non-finite values are written
    through, so that every rank meets them, and kept out of the sums.

    Args:
        gradients: any shapes, strides and floating or complex dtypes.
        places: [shape of the gradient] each, views of a bucket that fill memory without holes, or the gradient itself;
            otherwise in memory that no other place and no gradient shares.
        factors: one 0-d tensor per gradient, float32 at least (float64 for float64 gradients), on the CPU or on the
            device of the gradients.
        accumulates: add to what is there.
        with_statistics: take the sums of what the places hold afterwards.
        mates: another gradient of the same shape and dtype for some; with ``with_statistics`` only.

    Returns:
        None, or [n, NUM_COLUMNS] float64: a row per gradient, see ``grad_statistics``; with ``mates`` two more columns,
        the dot product of what the place holds with the mate and the mate's square, zeros where there is none.

    Raises:
        ValueError: before anything is written: lengths, shapes or devices do not fit; on a GPU also a place that is
            given twice (other overlaps are not looked for).
        TypeError: a dtype that is not floating or complex, or a factor of less than 32 bits.
        RuntimeError: on a GPU, while a CUDA graph is captured: see ``grad_triton.PackPlan``.
    """
    if torch.compiler.is_compiling() and gradients:  # the compiler cannot lower a list of none
        found = _grad_pack_op(
            list(gradients),
            list(places),
            list(factors),
            accumulates,
            with_statistics,
            None if mates is None else list(mates),
        )
        return found if with_statistics else None
    return _grad_pack(gradients, places, factors, accumulates, with_statistics, mates)


def _grad_pack(
    gradients: Sequence[Tensor],
    places: Sequence[Tensor],
    factors: Sequence[Tensor],
    accumulates: bool,
    with_statistics: bool,
    mates: Sequence[Tensor | None] | None,
) -> Tensor | None:
    if not len(gradients) == len(places) == len(factors):
        raise ValueError(
            f"{len(gradients)} gradients, {len(places)} places and {len(factors)} factors: give one of each."
        )
    # called for every gradient of a step: cheap checks, in order of their price
    for gradient, place, factor in zip(gradients, places, factors, strict=True):
        if gradient.shape != place.shape:
            raise ValueError(f"A gradient {[*gradient.shape]} has a place {[*place.shape]}. Give places of its shape.")
        if factor.dtype not in FACTOR_DTYPES or gradient.dtype not in DTYPES or place.dtype is not gradient.dtype:
            _check_dtypes(gradient, place, factor)
        if factor.dim() != 0:
            raise ValueError(f"A factor has shape {[*factor.shape]}. Give a 0-d tensor for each gradient.")
        if not (gradient.is_cpu and place.is_cpu and factor.is_cpu):
            _check_devices(gradient, place, factor, gradients[0])
    if mates is not None:
        _check_mates(gradients, mates, with_statistics=with_statistics)
    if gradients and runs_triton(gradients[0]):
        from lightning_moeclip.kernels import grad_triton

        return grad_triton.pack(
            gradients, places, factors, accumulates=accumulates, with_statistics=with_statistics, mates=mates
        )
    if not with_statistics:
        multiply(gradients, places, factors, accumulates=accumulates)
        return None
    table = multiply_with_sums(gradients, places, factors, accumulates=accumulates)
    return table if mates is None else torch.cat([table, _mate_sums(places, mates)], dim=1)


def _check_dtypes(gradient: Tensor, place: Tensor, factor: Tensor) -> None:
    check_dtype(gradient, "gradients")
    check_dtype(place, "places")
    if gradient.is_complex() != place.is_complex():
        raise TypeError(
            f"A {gradient.dtype} gradient has a {place.dtype} place. Give complex places to complex gradients alone."
        )
    if factor.dtype not in FACTOR_DTYPES:
        raise TypeError(f"A factor is {factor.dtype}. Give float32, or float64: 16 bits would round the gradients.")


def _check_devices(gradient: Tensor, place: Tensor, factor: Tensor, first: Tensor) -> None:
    if not gradient.device == place.device == first.device:
        raise ValueError(
            f"Gradients and places lie on {first.device}, {gradient.device} and {place.device}. "
            "Give those of one device at a time."
        )
    if not factor.is_cpu and factor.device != gradient.device:
        raise ValueError(
            f"A factor lies on {factor.device}, its gradient on {gradient.device}. Give it there or on the CPU."
        )


def _check_mates(gradients: Sequence[Tensor], mates: Sequence[Tensor | None], *, with_statistics: bool) -> None:
    if not with_statistics:
        raise ValueError("mates do nothing without with_statistics=True. Leave them out, or set it.")
    if len(mates) != len(gradients):
        raise ValueError(f"{len(gradients)} gradients and {len(mates)} mates: give a mate or None for each.")
    for gradient, mate in zip(gradients, mates, strict=True):
        if mate is not None and (mate.shape, mate.dtype, mate.device) != (
            gradient.shape,
            gradient.dtype,
            gradient.device,
        ):
            raise ValueError(
                f"A gradient {[*gradient.shape]} of {gradient.dtype} on {gradient.device} has a mate {[*mate.shape]} "
                f"of {mate.dtype} on {mate.device}. Give a mate of the same kind, or None."
            )


def multiply(
    gradients: Sequence[Tensor], places: Sequence[Tensor], factors: Sequence[Tensor], *, accumulates: bool = False
) -> None:
    """places[i] = factors[i] * gradients[i] by torch, or += ; see ``grad_pack``."""
    for gradient, place, factor in zip(gradients, places, factors, strict=True):
        if gradient.requires_grad:
            gradient, place = gradient.detach(), place.detach()
        if accumulates and gradient.is_cpu:
            place.add_(gradient, alpha=factor.item())
            continue
        # a product of 16-bit elements is rounded to 16 bits, whatever its place, and off the CPU so is the factor
        if gradient.dtype in _NARROW and not (gradient.is_cpu and place.dtype is gradient.dtype):
            gradient = gradient.to(torch.promote_types(gradient.dtype, factor.dtype))
        if accumulates:
            place.add_(gradient * factor)
        else:
            torch.mul(gradient, factor, out=place)


def multiply_with_sums(
    gradients: Sequence[Tensor], places: Sequence[Tensor], factors: Sequence[Tensor], *, accumulates: bool = False
) -> Tensor:
    """The same, and [n, NUM_COLUMNS]: on the CPU block by block, while what was written is still in cache."""
    if not gradients or not gradients[0].is_cpu:
        multiply(gradients, places, factors, accumulates=accumulates)
        return grad_statistics(places)
    sums = HostSums(max(map(num_reals, places)))
    rows = []
    for gradient, place, factor in zip(gradients, places, factors, strict=True):
        row = [0.0] * NUM_COLUMNS
        if gradient.stride() == place.stride() and is_dense(place) and not (place.is_conj() or place.is_neg()):
            pairs = zip(as_reals(gradient).split(sums.block), as_reals(place).split(sums.block), strict=True)
            for source, target in pairs:
                multiply([source], [target], [factor], accumulates=accumulates)
                sums.add(row, target)
        else:
            multiply([gradient], [place], [factor], accumulates=accumulates)
            row = sums.row(as_reals(place))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def _mate_sums(places: Sequence[Tensor], mates: Sequence[Tensor | None]) -> Tensor:
    """[n, 2]: dot product with the mate over the elements that are finite in both, and the mate's square."""
    rows = []
    for place, mate in zip(places, mates, strict=True):
        if mate is None:
            rows.append(torch.zeros(2, dtype=torch.float64, device=place.device))
            continue
        # in one order; a block at a time, as float64 takes twice the memory
        mate_reals, reals = (in_order(tensor) for tensor in (mate, place))
        row = torch.zeros(2, dtype=torch.float64, device=place.device)
        for one, other in zip(reals.split(2**20), mate_reals.split(2**20), strict=True):
            wide, clean = (part.double().nan_to_num(0.0, 0.0, 0.0) for part in (one, other))
            row += torch.stack([(wide * clean).sum(), clean.square().sum()])
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)


def in_order(tensor: Tensor) -> Tensor:
    """Its elements as real numbers in the order of its indices, flat; a copy where memory has another."""
    return as_reals(tensor.contiguous())


_SCHEMA = (
    "(Tensor[] gradients, Tensor(a!)[] places, Tensor[] factors, bool accumulates, bool with_statistics, "
    "Tensor?[]? mates) -> Tensor"
)


@torch.library.custom_op("moeclip::grad_pack", mutates_args=("places",), schema=_SCHEMA)
def _grad_pack_op(
    gradients: list[Tensor],
    places: list[Tensor],
    factors: list[Tensor],
    accumulates: bool,
    with_statistics: bool,
    mates: list[Tensor | None] | None,
) -> Tensor:
    found = _grad_pack(gradients, places, factors, accumulates, with_statistics, mates)
    return torch.empty(0) if found is None else found


@_grad_pack_op.register_fake
def _(
    gradients: list[Tensor],
    places: list[Tensor],
    factors: list[Tensor],
    accumulates: bool,
    with_statistics: bool,
    mates: list[Tensor | None] | None,
) -> Tensor:
    if not with_statistics:
        return torch.empty(0)
    device = gradients[0].device if gradients else torch.device("cpu")
    return torch.empty(len(gradients), NUM_COLUMNS + 2 * (mates is not None), dtype=torch.float64, device=device)
