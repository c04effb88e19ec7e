"""A few numbers that stand for a gradient, so that ranks can be compared without sending tensors.

A sketch is a linear map to ``WIDTH`` numbers: the sketch of a sum is the sum of sketches, and a multiple has a multiple
of it. Its weights depend on the name and the place of an element alone, so a slice on one rank adds up with the slices
of others. Two gradients with one sketch are equal but for a coincidence of real numbers.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["WIDTH", "Place", "place_of", "sketch"]

WIDTH = 16


@dataclass(frozen=True)
class Place:
    """Where this rank's part of a parameter lies in the whole.

    Attributes:
        shape: of the whole.
        slices: (first, end) of the part by dim.
    """

    shape: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds everything."""
        return all(first == 0 and end == size for (first, end), size in zip(self.slices, self.shape, strict=True))

    def cut(self, whole: Tensor) -> Tensor:
        """The part of a tensor of ``shape``."""
        return whole[tuple(slice(first, end) for first, end in self.slices)]


def place_of(tensor: Tensor, *, expert_rank: int = 0, expert_size: int = 1, is_spread: bool = False) -> Place:
    """Where a parameter of this rank lies in the one of one process.

    Args:
        tensor: a DTensor knows its place; a plain one is whole unless ``is_spread``.
        expert_rank: place of this rank among those that share out the experts.
        expert_size: how many they are.
        is_spread: dim 0 of ``tensor`` is this rank's slice of the experts.
    """
    if isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        local, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
        return Place(shape, tuple((first, first + size) for first, size in zip(offset, local, strict=True)))
    shape = tuple(tensor.shape)
    if not is_spread:
        return Place(shape, tuple((0, size) for size in shape))
    rows = shape[0]
    own = ((expert_rank * rows, (expert_rank + 1) * rows), *((0, size) for size in shape[1:]))
    return Place((rows * expert_size, *shape[1:]), own)


@torch.no_grad()
def sketch(name: str, part: Tensor, place: Place) -> Tensor:
    """Sketch of a gradient, zero outside of this rank's part.

    Args:
        name: of the parameter.
        part: this rank's part of the gradient, any floating dtype; complex counts as pairs of real numbers.
        place: where it lies.

    Returns:
        [WIDTH] float64.
    """
    part = part.detach().double() if not part.is_complex() else torch.view_as_real(part.detach()).double()
    shape = place.shape if part.ndim == len(place.shape) else (*place.shape, 2)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    numel = torch.Size(shape).numel()
    # none is near zero: a scalar must show in its sketch
    weights = torch.rand(numel, generator=generator, dtype=torch.float32).add_(0.5)
    signs = torch.randint(2, (numel,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    weighted = place.cut(weights.mul_(signs).view(shape)) * part.to("cpu")
    if place.is_whole:
        flat = torch.nn.functional.pad(weighted.reshape(-1), (0, -numel % WIDTH))
        return flat.view(-1, WIDTH).sum(0)
    index = place.cut(torch.arange(numel).remainder_(WIDTH).view(shape))
    return torch.zeros(WIDTH, dtype=torch.float64).index_add_(0, index.reshape(-1), weighted.reshape(-1))
