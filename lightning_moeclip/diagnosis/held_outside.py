"""Parameters that an optimizer steps and the LightningModule does not have, with a name that a user knows."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.corridor import optimizer_only_parameters
from lightning_moeclip.parallel.strays import stray_tensors

__all__ = ["held_outside"]


def held_outside(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Parameters that an optimizer steps and the module does not have.

    Returns:
        By the path at which an object of the module holds them, where there is one; else by their place in the
        optimizer.
    """
    paths = {id(tensor): path for path, tensor in stray_tensors(module).items()}
    outside = optimizer_only_parameters(module, optimizers)
    return {paths.get(id(parameter), name): parameter for name, parameter in outside.items()}
