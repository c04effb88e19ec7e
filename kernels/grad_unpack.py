"""Reduced gradients out of a flat bucket, or where they are: one pass that multiplies, casts and, where asked, takes
sums.
"""

from collections.abc import Sequence

import torch
from lightning_moeclip.kernels.backend import runs_triton
from lightning_moeclip.kernels.grad_pack import FACTOR_DTYPES, in_order, multiply, multiply_with_sums
from lightning_moeclip.kernels.grad_statistics import (
    DTYPES,
    NUM_COLUMNS,
    NUM_NONFINITE,
    NUM_ZEROS,
    SIZE,
    check_dtype,
)
from torch import Tensor

__all__ = ["grad_unpack", "unscale_"]

_BLOCK = 2**20
_COUNTED = 2**16  # elements that are compared at once


def grad_unpack(
    sources: Sequence[Tensor],
    gradients: Sequence[Tensor],
    coefficient: Tensor,
    *,
    with_statistics: bool = False,
    with_residual: bool = False,
) -> Tensor | None:
    """gradients[i] = coefficient * sources[i], all of them in one pass.

    The product is taken in float32 at least and rounded once, to the dtype of the gradient.

    Args:
        sources: parts of a bucket, or the gradients themselves; any floating or complex dtype.
        gradients: [shape of the source] each, any floating or complex dtype, in memory that no two of them share and
            that no source shares, unless it is the gradient of that source, element by element.
        coefficient: 0-d, float32 at least, on the CPU or on the device of the gradients.
        with_statistics: take the sums of what was written.
        with_residual: compare with what the gradients held before: two more columns, the sum of |before - source| and
            of |before|, over the elements where they are finite. It implies ``with_statistics``.

    Returns:
        None, or [n, NUM_COLUMNS (+ 2)] float64; see ``grad_statistics``.

    Raises:
        ValueError: before anything is written: lengths, shapes or devices do not fit; on a GPU also a gradient that is
            given twice (other overlaps are not looked for).
        TypeError: a dtype that is not floating or complex, or a coefficient of less than 32 bits.
        RuntimeError: on a GPU, while a CUDA graph is captured.
    """
    with_statistics = with_statistics or with_residual
    if torch.compiler.is_compiling() and gradients:  # the compiler cannot lower a list of none
        found = _grad_unpack_op(list(sources), list(gradients), coefficient, with_statistics, with_residual)
        return found if with_statistics else None
    return _grad_unpack(sources, gradients, coefficient, with_statistics, with_residual)


def _grad_unpack(
    sources: Sequence[Tensor],
    gradients: Sequence[Tensor],
    coefficient: Tensor,
    with_statistics: bool,
    with_residual: bool,
) -> Tensor | None:
    if len(sources) != len(gradients):
        raise ValueError(f"{len(sources)} sources and {len(gradients)} gradients: give one for each.")
    _check_coefficient(coefficient, gradients)
    for source, gradient in zip(sources, gradients, strict=True):
        _check_pair(source, gradient, gradients[0])
    if gradients and runs_triton(gradients[0]):
        from lightning_moeclip.kernels import grad_triton

        return grad_triton.unpack(
            sources, gradients, coefficient, with_statistics=with_statistics, with_residual=with_residual
        )
    residual = _residual(sources, gradients) if with_residual else None
    coefficients = [coefficient] * len(sources)
    if not with_statistics:
        multiply(sources, gradients, coefficients)
        return None
    table = multiply_with_sums(sources, gradients, coefficients)
    return table if residual is None else torch.cat([table, residual], dim=1)


def _check_pair(source: Tensor, gradient: Tensor, first: Tensor) -> None:
    check_dtype(source, "sources")
    check_dtype(gradient, "gradients")
    if source.is_complex() != gradient.is_complex():
        raise TypeError(
            f"A {source.dtype} source has a {gradient.dtype} gradient. Give complex sources to complex gradients alone."
        )
    if source.shape != gradient.shape:
        raise ValueError(f"A source {[*source.shape]} has a gradient {[*gradient.shape]}. Give gradients of its shape.")
    if not source.device == gradient.device == first.device:
        raise ValueError(
            f"Sources and gradients lie on {first.device}, {source.device} and {gradient.device}. "
            "Give those of one device at a time."
        )


def _check_coefficient(coefficient: Tensor, gradients: Sequence[Tensor]) -> None:
    if coefficient.dtype not in FACTOR_DTYPES:
        raise TypeError(f"coefficient is {coefficient.dtype}. Give float32 or float64: 16 bits would round it.")
    if coefficient.dim() != 0:
        raise ValueError(f"coefficient has shape {[*coefficient.shape]}. Give a 0-d tensor.")
    if gradients and not coefficient.is_cpu and coefficient.device != gradients[0].device:
        raise ValueError(
            f"coefficient lies on {coefficient.device}, the gradients on {gradients[0].device}. "
            "Give it there or on the CPU."
        )


def _residual(sources: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """[n, 2]: sums of |gradient - source| and of |gradient|."""
    rows = [torch.zeros(0, 2, dtype=torch.float64)]
    for source, gradient in zip(sources, gradients, strict=True):
        row = torch.zeros(2, dtype=torch.float64, device=gradient.device)
        # a block at a time, as float64 takes twice the memory
        pairs = zip(in_order(source).split(_BLOCK), in_order(gradient).split(_BLOCK), strict=True)
        for one, other in pairs:
            before = other.double()
            terms = (before - one.double(), before)
            row += torch.stack([term.nan_to_num(0.0, 0.0, 0.0).abs().sum() for term in terms])
        rows.append(row[None])
    return torch.cat(rows[1:] or rows)


def unscale_(gradients: Sequence[Tensor], inv_scale: Tensor, *, counts_zeros: bool = False) -> Tensor:
    """Multiply in place and look for non-finite values in the same pass.

    Args:
        gradients: on one device, of any floating or complex dtypes, in memory that no two of them share.
        inv_scale: 0-d or [1], float32, on the CPU or on the device of the gradients: what each element is multiplied
            by, in float32 at least.
        counts_zeros: count what vanished, too.

    Returns:
        [3] float64 on the device of the gradients: above 0 if any element was not finite before, elements that are
        exactly zero afterwards and number of elements; zeros for the last two without ``counts_zeros``.

    Raises:
        ValueError: several devices, or an ``inv_scale`` of several elements; on a GPU also a gradient that is given
            twice.
        RuntimeError: on a GPU, while a CUDA graph is captured.
        TypeError: a dtype that is not floating or complex, or an ``inv_scale`` that is not float32.
    """
    if torch.compiler.is_compiling() and gradients:  # the compiler cannot lower a list of none
        return _unscale_op(list(gradients), inv_scale, counts_zeros)
    return _unscale_(gradients, inv_scale, counts_zeros)


def _unscale_(gradients: Sequence[Tensor], inv_scale: Tensor, counts_zeros: bool) -> Tensor:
    _check_unscaled(gradients, inv_scale)
    inv_scale = inv_scale.reshape(())
    if not gradients:
        return torch.zeros(3, dtype=torch.float64)
    if runs_triton(gradients[0]):
        from lightning_moeclip.kernels import grad_triton

        table = grad_triton.unpack(gradients, gradients, inv_scale, with_statistics=True, checks_read=True)
        assert table is not None, "sums were asked for"
        sums = table.sum(0)
        zeros = [sums[NUM_ZEROS], sums[SIZE]] if counts_zeros else [torch.zeros_like(sums[SIZE])] * 2
        return torch.stack([sums[NUM_NONFINITE], *zeros])
    flag = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
    inv_scale = inv_scale.to(flag.device)
    # a conjugate or a negative that is only marked as one has no real numbers of its own
    is_marked = any(gradient.is_conj() or gradient.is_neg() for gradient in gradients)
    plain = [gradient.resolve_conj().resolve_neg() for gradient in gradients] if is_marked else gradients
    reals = [torch.view_as_real(gradient) if gradient.is_complex() else gradient for gradient in plain]
    for dtype in {real.dtype for real in reals}:
        members = [real for real in reals if real.dtype is dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(members, flag, inv_scale)
    for gradient, written in zip(gradients, plain, strict=True) if is_marked else ():
        gradient.copy_(written)  # onto itself where it is plain, which does nothing
    found = torch.zeros(3, dtype=torch.float64, device=flag.device)
    found[0] = flag
    if counts_zeros:
        size = sum(real.numel() for real in reals)
        found[1] = size - _num_nonzero(reals)
        found[2] = size
    return found


def _check_unscaled(gradients: Sequence[Tensor], inv_scale: Tensor) -> None:
    if inv_scale.dtype is not torch.float32:
        raise TypeError(f"inv_scale is {inv_scale.dtype}. Give float32, as torch's scaler does.")
    if inv_scale.numel() != 1:
        raise ValueError(f"inv_scale has shape {[*inv_scale.shape]}. Give one number.")
    if not {gradient.dtype for gradient in gradients} <= DTYPES:
        for gradient in gradients:
            check_dtype(gradient, "gradients")
    devices = {gradient.device for gradient in gradients}
    if len(devices) > 1:
        raise ValueError(f"gradients lie on {sorted(map(str, devices))}. Give those of one device at a time.")
    if not inv_scale.is_cpu and inv_scale.device not in devices:
        raise ValueError(f"inv_scale lies on {inv_scale.device}, no gradient does. Give it there or on the CPU.")


def _num_nonzero(reals: Sequence[Tensor]) -> Tensor:
    """0-d, int64."""
    ones = torch.empty(_COUNTED) if reals[0].is_cpu else None
    counts = []
    for real in reals:
        if ones is None or real.numel() < _COUNTED // 2:
            counts.append(real.count_nonzero())
            continue
        # on a CPU up to 19 times as fast as a count, which guesses at each element; exact, since a block is short
        counts.extend(torch.ne(p, 0.0, out=ones[: len(p)]).sum().long() for p in real.flatten().split(_COUNTED))
    return torch.stack(counts).sum()


_UNPACK_SCHEMA = (
    "(Tensor[] sources, Tensor(a!)[] gradients, Tensor coefficient, bool with_statistics, bool with_residual) -> Tensor"
)
_UNSCALE_SCHEMA = "(Tensor(a!)[] gradients, Tensor inv_scale, bool counts_zeros) -> Tensor"


@torch.library.custom_op("moeclip::grad_unpack", mutates_args=("gradients",), schema=_UNPACK_SCHEMA)
def _grad_unpack_op(
    sources: list[Tensor], gradients: list[Tensor], coefficient: Tensor, with_statistics: bool, with_residual: bool
) -> Tensor:
    found = _grad_unpack(sources, gradients, coefficient, with_statistics, with_residual)
    return torch.empty(0) if found is None else found


@_grad_unpack_op.register_fake
def _(
    sources: list[Tensor], gradients: list[Tensor], coefficient: Tensor, with_statistics: bool, with_residual: bool
) -> Tensor:
    if not with_statistics:
        return torch.empty(0)
    device = gradients[0].device if gradients else torch.device("cpu")
    return torch.empty(len(sources), NUM_COLUMNS + 2 * with_residual, dtype=torch.float64, device=device)


@torch.library.custom_op("moeclip::unscale_", mutates_args=("gradients",), schema=_UNSCALE_SCHEMA)
def _unscale_op(gradients: list[Tensor], inv_scale: Tensor, counts_zeros: bool) -> Tensor:
    return _unscale_(gradients, inv_scale, counts_zeros)


@_unscale_op.register_fake
def _(gradients: list[Tensor], inv_scale: Tensor, counts_zeros: bool) -> Tensor:
    device = gradients[0].device if gradients else torch.device("cpu")
    return torch.empty(3, dtype=torch.float64, device=device)
