"""Parameters that an optimizer steps and the module does not have: no state dict of the module holds them.

They go by their place in the optimizers, which every rank and every later run must lay out alike.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.master_parameter import parameter_names
from lightning_moeclip.parallel.rules import warn_on_first_rank

__all__ = ["CHECKPOINT_KEY", "check_number_of_optimizers", "checkpoint_entry", "load_parameters", "placement"]

CHECKPOINT_KEY = "moeclip"


def placement(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """One line for each parameter of each optimizer: place, name in the module, shape and dtype."""
    names = parameter_names(module, optimizers)
    return [
        f"optimizer{i}.group{j}.{k}: {names.get(id(p), 'no parameter of the module')} {list(p.shape)} {p.dtype}"
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
    ]


def checkpoint_entry(own: Mapping[str, Tensor], *, expert_parallel_size: int) -> dict[str, Any]:
    """What a checkpoint holds under ``CHECKPOINT_KEY``: ``own`` by place, and the layout that wrote it."""
    values = {name: value.detach().clone() for name, value in own.items()}
    return {"expert_parallel_size": expert_parallel_size, "optimizer_parameters": values}


def check_number_of_optimizers(states: Sequence[object], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a checkpoint that would leave an optimizer without its state.

    Raises:
        ValueError: it has more or fewer optimizers.
    """
    if len(states) != len(optimizers):
        raise ValueError(
            f"The checkpoint holds the state of {len(states)} optimizers and configure_optimizers made "
            f"{len(optimizers)}. Resume with the optimizers of the run that saved it (after spawn and fork the main "
            "process has none: save in a callback), or load weights with load_from_checkpoint."
        )


@torch.no_grad()
def load_parameters(entry: Mapping[str, Any] | None, own: Mapping[str, nn.Parameter]) -> None:
    """Give parameters that only an optimizer holds their values of a checkpoint.

    Args:
        entry: of ``checkpoint_entry``; None when the checkpoint is of another strategy, which saves none: a warning.
        own: parameters of this run by place.

    Raises:
        ValueError: the checkpoint has them in other places, or with other shapes.
    """
    if entry is None:
        if own:
            warn_on_first_rank(
                f"The checkpoint holds no values of {', '.join(own)}, which are in an optimizer and not in the "
                "LightningModule: they start as configure_optimizers made them. Make them attributes of the module."
            )
        return
    saved: Mapping[str, Tensor] = entry["optimizer_parameters"]
    shapes = [{name: list(value.shape) for name, value in values.items()} for values in (saved, own)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The checkpoint holds parameters outside the LightningModule at {shapes[0]}, and this run has them at "
            f"{shapes[1]}. Make parameter groups in configure_optimizers in the order of the run that saved it, or "
            "make these parameters attributes of the module."
        )
    for name, parameter in own.items():
        parameter.copy_(saved[name])
