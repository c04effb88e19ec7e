"""Parameters that an optimizer steps and the LightningModule does not have, with a name that a user knows."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.master_parameter import model_parameter

__all__ = ["held_outside"]


def held_outside(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """Parameters that an optimizer steps and the module does not have.

    Returns:
        By the path of the object that holds them, where an attribute of a module leads there; else by their place in
        the optimizer.
    """
    known = {id(p) for p in module.parameters()}
    found = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(map(model_parameter, group["params"])):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    found[_path_to(parameter, module) or f"optimizer{i}.group{j}.{k}"] = parameter
    return found


def _path_to(parameter: nn.Parameter, module: nn.Module) -> str:
    for path, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            prefix = f"{path}." if path else ""
            if value is parameter:
                return f"{prefix}{attribute}"
            inner = getattr(value, "__dict__", {}) if not isinstance(value, (nn.Module, Tensor)) else {}
            for name, held in inner.items():
                if held is parameter:
                    return f"{prefix}{attribute}.{name}"
    return ""
