"""Whether what is about to be kept is worth keeping: no parameter with NaN or infinity, no NaN elsewhere.

A sum is finite only when all its terms are, and costs one pass of reading; what has another sum is looked into.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_moeclip.state.live import OPTIMIZER_STATE

__all__ = ["checked_names", "not_finite"]

_ONE_THREAD = 2**15 - 1  # elements that torch sums without its other threads


def checked_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that have to be finite: all with a fraction but optimizer state."""
    return [
        name
        for name, tensor in tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex()) and not name.startswith(f"{OPTIMIZER_STATE}/")
    ]


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """Which of the tensors are bad: "parameters/..." that are not finite, others with NaN, since masks hold infinities.

    Args:
        tensors: by name.
        names: of those to look at.
    """
    checked = {name: tensors[name].detach() for name in names}
    suspects: set[str] = set()
    for device in {tensor.device for tensor in checked.values()}:
        here = [name for name, tensor in checked.items() if tensor.device == device]
        is_fine = torch.stack([_sum(checked[name]) for name in here]).isfinite().tolist()
        suspects |= {name for name, fine in zip(here, is_fine, strict=True) if not fine}
    return [name for name, tensor in checked.items() if name in suspects and _is_bad(name, tensor)]


def _sum(tensor: Tensor) -> Tensor:
    """0-d: finite only when all values are; it may overflow where they are finite."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # there is no sum of 8-bit numbers
    if not tensor.is_cpu:
        is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        return tensor.sum(dtype=torch.float32 if is_narrow else None)
    # one thread: where ranks share processors, short calls of many would wait for each other
    return torch.stack([part.sum() for part in tensor.flatten().split(_ONE_THREAD)]).sum()


def _is_bad(name: str, tensor: Tensor) -> bool:
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return bool(~values.isfinite().all() if name.startswith("parameters/") else values.isnan().any())
