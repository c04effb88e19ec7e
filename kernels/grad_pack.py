"""Gradients into their places in a flat bucket: one pass that multiplies, casts and, where asked, takes sums."""

from collections.abc import Sequence

import torch
from lightning_moeclip.kernels.grad_statistics import grad_statistics
from torch import Tensor

__all__ = ["grad_pack"]


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
        places: [shape of the gradient] each, views of a bucket that fill memory without holes, or the gradient itself.
        factors: one 0-d tensor per gradient, float32 at least (float64 for float64 gradients), on the CPU or on the
            device of the gradients.
        accumulates: add to what is there.
        with_statistics: take the sums of what the places hold afterwards.
        mates: another gradient of the same shape for some; with ``with_statistics`` only.

    Returns:
        None, or [n, NUM_COLUMNS] float64: a row per gradient, see ``grad_statistics``; with ``mates`` two more columns,
        the dot product with the mate and the mate's square.

    Raises:
        ValueError: before anything is written: lengths, shapes or devices do not fit.
        TypeError: a dtype that is not floating or complex.
    """
    for gradient, place, factor in zip(gradients, places, factors, strict=True):
        if accumulates:
            place.add_(gradient.to(torch.promote_types(gradient.dtype, factor.dtype)) * factor)
        else:
            torch.mul(gradient, factor, out=place)
    return grad_statistics(places) if with_statistics else None
