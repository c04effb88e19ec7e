"""Values of the first rank for all that hold the same copy."""

from torch import nn

from lightning_moeclip.gradients.collectives import broadcast_from_first
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.state.canonical import spread_names

__all__ = ["broadcast_buffers", "broadcast_state"]


def broadcast_state(module: nn.Module, mesh: Mesh) -> None:
    """Parameters and saved buffers of the first rank of each replica group, to the others."""
    spread = spread_names(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole = {id(p): p for name, p in parameters.items() if name not in spread}
    broadcast_from_first(whole.values(), mesh.gradient_groups["dp"])
    broadcast_buffers(module, mesh)
    slices = {id(parameters[name]): parameters[name] for name in spread}
    broadcast_from_first(slices.values(), mesh.gradient_groups["edp"])


def broadcast_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Buffers that are saved, of the first rank; others, such as counts of a rank's own tokens, are each rank's."""
    saved = module.state_dict(keep_vars=True)
    buffers = [buffer for name, buffer in module.named_buffers() if name in saved]
    broadcast_from_first(buffers, mesh.gradient_groups["dp"])
