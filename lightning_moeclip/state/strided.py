"""The strided tensors that hold the elements of any tensor: what is copied bit by bit, and sent to other ranks."""

import torch
from torch import Tensor

__all__ = ["check_strided", "strided_parts"]

_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def strided_parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensor itself, or indices and values of a sparse one, which share its memory.

    Args:
        name: of the tensor; those of parts also tell its shape, and whether it is coalesced.
        tensor: of any layout.

    Raises:
        TypeError: its elements do not lie in strided tensors.
    """
    live = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        form = f"{list(tensor.shape)}, {'' if tensor.is_coalesced() else 'not '}coalesced"
        parts = {"indices": live._indices(), "values": live._values()}
    elif tensor.layout in _INDICES:
        form = f"{list(tensor.shape)}"
        parts = {part: getattr(live, part)() for part in (*_INDICES[tensor.layout], "values")}
    else:
        check_strided(name, tensor)
        return {name: tensor}
    kind = str(tensor.layout).removeprefix("torch.")
    return {f"{name} ({kind} {form}) {part}": found for part, found in parts.items()}


def check_strided(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements do not lie in memory of its own.

    Raises:
        TypeError: it does not.
    """
    if tensor.is_quantized:
        what = "a quantized tensor"
    elif tensor.is_meta:
        what = "a tensor on the meta device"
    elif tensor.layout != torch.strided:
        what = f"a tensor of {tensor.layout}"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        what = f"a {type(tensor).__name__}"
    else:
        return
    raise TypeError(
        f"{name} is {what}, which can be neither kept in a snapshot bit by bit nor sent to other ranks. Hold it in "
        "plain tensors (of a quantized one int_repr(), with its scale and zero point), or in no buffer, parameter or "
        "optimizer state."
    )
