"""Values of the first rank for all that hold the same copy."""

from torch import Tensor, nn

from lightning_moeclip.gradients.collectives import broadcast_from_first
from lightning_moeclip.parallel.checks import check_same_on_all_ranks
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.state.canonical import spread_names

__all__ = ["broadcast_buffers", "broadcast_state"]


def broadcast_state(module: nn.Module, mesh: Mesh) -> None:
    """Parameters and saved buffers of the first rank of each replica group, to the others.

    Raises:
        RuntimeError: on every rank, when ranks differ in what there is to broadcast.
    """
    kept = [*module.named_parameters(), *_saved_buffers(module).items()]
    described = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in kept]
    check_same_on_all_ranks(described, what="The model")
    spread = spread_names(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole = {id(p): p for name, p in parameters.items() if name not in spread}
    broadcast_from_first(whole.values(), mesh.gradient_groups["dp"])
    broadcast_buffers(module, mesh)
    slices = {id(parameters[name]): parameters[name] for name in spread}
    broadcast_from_first(slices.values(), mesh.gradient_groups["edp"])


def broadcast_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Buffers that are saved, of the first rank; others, such as counts of a rank's own tokens, are each rank's."""
    broadcast_from_first(_saved_buffers(module).values(), mesh.gradient_groups["dp"])


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
