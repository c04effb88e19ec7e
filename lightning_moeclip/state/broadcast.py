"""Values of the first rank for all that hold the same copy."""

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_moeclip.gradients.collectives import broadcast_from_first
from lightning_moeclip.parallel.checks import check_same_on_all_ranks
from lightning_moeclip.parallel.interop import listed_names
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.state.canonical import own_expert_names
from lightning_moeclip.state.strided import strided_parts

__all__ = ["broadcast_buffers", "broadcast_state"]


def broadcast_state(module: nn.Module, mesh: Mesh) -> None:
    """Parameters and saved buffers of the first rank of each replica group, to the others.

    Raises:
        RuntimeError: on every rank, when ranks differ in what there is to broadcast.
        TypeError: the elements of a buffer do not lie in memory of its own; those of sparse ones do.
    """
    if mesh.world_size == 1:
        return
    check_same_on_all_ranks(
        _lines({**dict(module.named_parameters()), **_parts(_saved_buffers(module))}), what="The model"
    )
    own = own_expert_names(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    whole = {id(p): p for name, p in parameters.items() if name not in own}
    broadcast_from_first(whole.values(), mesh.gradient_groups["dp"])
    broadcast_buffers(module, mesh)
    slices = {id(p): p for name, p in parameters.items() if name in own}
    broadcast_from_first(slices.values(), mesh.gradient_groups["edp"])


def broadcast_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Buffers that are saved, of the first rank; others, such as counts of a rank's own tokens, are each rank's.

    Raises:
        RuntimeError: on every rank, when ranks hold other numbers of elements in a sparse buffer.
    """
    if mesh.world_size == 1:
        return
    buffers = _saved_buffers(module)
    parts = _parts(buffers)
    if len(parts) > len(buffers):  # some are sparse, and may have got more elements since the start
        check_same_on_all_ranks(_lines(parts), what="A sparse buffer")
    own = listed_names(module)
    of_experts = {name: buffer for name, buffer in buffers.items() if name in own}
    shared = {name: buffer for name, buffer in buffers.items() if name not in own}
    broadcast_from_first(_parts(shared).values(), mesh.gradient_groups["dp"])
    broadcast_from_first(_parts(of_experts).values(), mesh.gradient_groups["edp"])


def _lines(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]


def _parts(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The strided tensors of buffers of any layout."""
    found: dict[str, Tensor] = {}
    for name, buffer in buffers.items():
        found |= strided_parts(name, buffer)
    return found


def _saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
