"""The operations on pairs behind their public faces: checked, given to Triton or to torch, and known to torch.library.

Legend of the shape suffixes: M own rows of the logits, N columns of all ranks, D feature width.

Signatures are those of the schemas: no defaults, and lists of what is needed where results are optional. Autocast
leaves products into given memory alone, and there are no others behind them.
"""

from itertools import compress

import torch
from lightning_moeclip.kernels import contrastive_tiles
from lightning_moeclip.kernels.backend import runs_triton
from lightning_moeclip.kernels.contrastive_tiles import logit_dtype, wide_dtype
from torch import Tensor

__all__ = ["check_chunk_size", "clip_gradients", "clip_statistics", "sigmoid_gradients", "sigmoid_statistics"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCALAR_DTYPES = (torch.float32, torch.float64)


def check_chunk_size(chunk_size: int) -> None:
    """Refuse a number of columns that no tile can have.

    Raises:
        ValueError: it is below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 column of logits. Use chunk_size=4096.")


@torch.no_grad()
def clip_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, offset: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``contrastive.clip_statistics``."""
    _check_features(image_MD, text_ND, offset, chunk_size, scale=scale)
    if _runs_triton(image_MD, text_ND):
        from lightning_moeclip.kernels import contrastive_triton

        return contrastive_triton.clip_statistics(image_MD, text_ND, scale, offset, chunk_size)
    return contrastive_tiles.clip_statistics(image_MD, text_ND, scale, offset, chunk_size)


@torch.no_grad()
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
    """See ``contrastive.clip_gradients``; of its results those that are needed."""
    _check_features(image_MD, text_ND, offset, chunk_size, scale=scale, row_factor=row_factor)
    _check_sums(image_MD, len(image_MD), by_row_M=by_row_M)
    _check_sums(image_MD, len(text_ND), by_column_N=by_column_N, column_factor_N=column_factor_N)
    sums = (by_row_M, by_column_N, row_factor, column_factor_N)
    needs = (needs_image, needs_text, needs_halves, needs_log_scale)
    if _runs_triton(image_MD, text_ND):
        from lightning_moeclip.kernels import contrastive_triton

        return contrastive_triton.clip_gradients(image_MD, text_ND, scale, *sums, offset, chunk_size, *needs)
    return contrastive_tiles.clip_gradients(image_MD, text_ND, scale, *sums, offset, chunk_size, *needs)


@torch.no_grad()
def sigmoid_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor, offset: int, chunk_size: int
) -> Tensor:
    """See ``contrastive.sigmoid_statistics``."""
    _check_features(image_MD, text_ND, offset, chunk_size, scale=scale, bias=bias)
    if _runs_triton(image_MD, text_ND):
        from lightning_moeclip.kernels import contrastive_triton

        return contrastive_triton.sigmoid_statistics(image_MD, text_ND, scale, bias, offset, chunk_size)
    return contrastive_tiles.sigmoid_statistics(image_MD, text_ND, scale, bias, offset, chunk_size)


@torch.no_grad()
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
    """See ``contrastive.sigmoid_gradients``; of its results those that are needed."""
    _check_features(image_MD, text_ND, offset, chunk_size, scale=scale, bias=bias, row_factor=row_factor)
    scalars = (scale, bias, row_factor)
    needs = (needs_image, needs_text, needs_bias, needs_pull, needs_log_scale)
    if _runs_triton(image_MD, text_ND):
        from lightning_moeclip.kernels import contrastive_triton

        return contrastive_triton.sigmoid_gradients(image_MD, text_ND, *scalars, offset, chunk_size, *needs)
    return contrastive_tiles.sigmoid_gradients(image_MD, text_ND, *scalars, offset, chunk_size, *needs)


def _runs_triton(image_MD: Tensor, text_ND: Tensor) -> bool:
    """Whether there is anything for a kernel, and in a dtype that its products have."""
    return runs_triton(image_MD) and image_MD.numel() > 0 and logit_dtype(image_MD, text_ND) is torch.float32


def _check_features(image_MD: Tensor, text_ND: Tensor, offset: int, chunk_size: int, **scalars: Tensor) -> None:
    check_chunk_size(chunk_size)
    if image_MD.ndim != 2 or text_ND.ndim != 2 or image_MD.shape[1] != text_ND.shape[1]:
        raise ValueError(
            f"Images {list(image_MD.shape)} and texts {list(text_ND.shape)} must be [M, D] and [N, D]. "
            "Flatten or pool them, and project both towers to the same D."
        )
    for x in (image_MD, text_ND):
        if x.dtype not in _DTYPES:
            raise TypeError(f"Features of {x.dtype} have no logits here. Convert them to torch.float32 first.")
    if not 0 <= offset <= len(text_ND) - len(image_MD):
        raise ValueError(
            f"offset={offset} puts the partners of {len(image_MD)} images beyond the {len(text_ND)} texts. Give the "
            "texts of all ranks, and the place of the first own row among them."
        )
    for name, x in scalars.items():
        if x.numel() != 1:
            raise ValueError(f"{name} must be one number, but its shape is {list(x.shape)}. Use a 0-d tensor.")
        if x.dtype not in _SCALAR_DTYPES:
            raise TypeError(f"{name} is {x.dtype}, but every logit hangs on it. Write {name}.float().")
    _check_devices(image_MD, text_ND=text_ND, **scalars)


def _check_sums(image_MD: Tensor, length: int, **sums: Tensor) -> None:
    for name, x in sums.items():
        if x.shape != (length,):
            raise ValueError(f"{name} has shape {list(x.shape)} for {length} samples. Give one number for each.")
    _check_devices(image_MD, **sums)


def _check_devices(image_MD: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.device != image_MD.device:
            raise ValueError(
                f"{name} lies on {x.device}, the images on {image_MD.device}. Move it with {name}.to(images.device)."
            )


def _fake_clip_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, offset: int, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide = wide_dtype(image_MD)
    rows, columns = image_MD.shape[0], text_ND.shape[0]
    return tuple(image_MD.new_empty(length, dtype=wide) for length in (rows, columns, rows))  # type: ignore[return-value]


def _fake_clip_gradients(
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
    merged = _empty_cotangents(image_MD, text_ND, needs_image, needs_text)
    half = _empty_cotangents(image_MD, text_ND, needs_image and needs_halves, needs_text and needs_halves)
    return merged + half + [_empty_sum(image_MD)] * needs_log_scale


def _fake_sigmoid_statistics(
    image_MD: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor, offset: int, chunk_size: int
) -> Tensor:
    return _empty_sum(image_MD)


def _fake_sigmoid_gradients(
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
    pull_M = image_MD.new_empty(image_MD.shape[0], dtype=logit_dtype(image_MD, text_ND))
    cotangents = _empty_cotangents(image_MD, text_ND, needs_image, needs_text)
    bias_sum, log_scale_sum = _empty_sum(image_MD), _empty_sum(image_MD)
    return cotangents + [bias_sum] * needs_bias + [pull_M] * needs_pull + [log_scale_sum] * needs_log_scale


def _empty_sum(image_MD: Tensor) -> Tensor:
    return image_MD.new_empty((), dtype=wide_dtype(image_MD))


def _empty_cotangents(image_MD: Tensor, text_ND: Tensor, needs_image: bool, needs_text: bool) -> list[Tensor]:
    dtype = logit_dtype(image_MD, text_ND)
    pair = (image_MD, text_ND)
    return [x.new_empty(x.shape, dtype=dtype) for x in compress(pair, (needs_image, needs_text))]


for _name, _op, _fake in (
    ("clip_statistics", clip_statistics, _fake_clip_statistics),
    ("clip_gradients", clip_gradients, _fake_clip_gradients),
    ("sigmoid_statistics", sigmoid_statistics, _fake_sigmoid_statistics),
    ("sigmoid_gradients", sigmoid_gradients, _fake_sigmoid_gradients),
):
    torch.library.custom_op(f"moeclip::{_name}", _op, mutates_args=()).register_fake(_fake)
