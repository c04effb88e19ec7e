"""Tensors in one flat buffer of host memory, each with a checksum.

A copy of N bytes reads N and writes N. The checksum is a sum of 64-bit words that wraps around: one more pass that
reads N and writes nothing, so that both together are to cost 1.5 copies, and a flipped bit always changes it.
Both are single calls over whole tensors, which threads share: by chunks that fit the cache the second pass reads no
memory, but on many threads the hundreds of short calls cost more than that saves.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HostCopy", "num_bytes_of"]

_ALIGNMENT = 64  # bytes, a cache line
_WORD = 8


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the buffer; strides are those of the live tensor, so that memory is copied in order."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def bytes_in(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.shape.numel() * self.dtype.itemsize]

    def view(self, buffer: Tensor) -> Tensor:
        return self.bytes_in(buffer).view(self.dtype).as_strided(self.shape, self.stride)


class HostCopy:
    """Values of named tensors at one time, in host memory.

    Args:
        tensors: live tensors, whose values ``fill`` takes.
        buffer: [n] uint8 of an earlier copy, which is used again when it has the right size.

    Attributes:
        buffer: [n] uint8, all there is; pinned when a tensor is on a GPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, buffer: Tensor | None = None) -> None:
        self._places: dict[str, _Place] = {}
        self._checksums: dict[str, int] = {}
        end = 0
        for name, tensor in tensors.items():
            distinct = _distinct(tensor)
            self._places[name] = _Place(end, distinct.shape, _memory_stride(distinct), tensor.dtype)
            end += _padded(distinct)
        has_size = buffer is not None and len(buffer) == end
        self.buffer = buffer if buffer is not None and has_size else _allocate(end, tensors.values())

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the values of the tensors, and wait until they have arrived."""
        sums = []
        for name, place in self._places.items():
            live = _distinct(tensors[name])
            place.view(self.buffer).copy_(live, non_blocking=True)
            # of the live tensor, so that a bad copy is found as well as a bad buffer
            sums.append(_checksum(_memory(live, place.stride)))
        _synchronise(tensors.values())
        self._checksums = dict(zip(self._places, _numbers(sums), strict=True))

    def damaged(self) -> list[str]:
        """Names of tensors whose bytes in the buffer are not those that were copied."""
        sums = [_checksum(place.bytes_in(self.buffer)) for place in self._places.values()]
        return self._different(sums)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Copy the values back into the tensors, in place.

        Args:
            tensors: live ones, with the names, shapes and dtypes of those that were copied; strides may differ.

        Returns:
            Names of tensors that do not hold what they held then.
        """
        assert tensors.keys() == self._places.keys(), "checked by their layout"
        for name, place in self._places.items():
            live = _distinct(tensors[name])
            # a buffer that validation has made is an inference tensor
            with torch.inference_mode(live.is_inference()):
                live.copy_(place.view(self.buffer), non_blocking=True)
        _synchronise(tensors.values())
        sums = [_checksum(_memory(_distinct(tensors[name]), place.stride)) for name, place in self._places.items()]
        return self._different(sums)

    def _different(self, sums: Sequence[Tensor]) -> list[str]:
        found = zip(self._places, _numbers(sums), strict=True)
        return [name for name, number in found if number != self._checksums[name]]


def num_bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of a buffer for these tensors."""
    return sum(_padded(_distinct(tensor)) for tensor in tensors)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _distinct(tensor: Tensor) -> Tensor:
    """The elements that lie in memory, once each: an expanded tensor repeats some."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _memory_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides when it fills a stretch of memory, else those of a contiguous one."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def _memory(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """[n] uint8: the elements in the order of ``stride``, without a copy where the tensor lies like that."""
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _checksum(memory: Tensor) -> Tensor:
    """0-d int64: sum of the 64-bit words of [n] uint8, the last one padded with zeros."""
    if memory.storage_offset() % _WORD:
        memory = memory.clone()  # int64 views start at whole words
    end = len(memory) // _WORD * _WORD
    total = memory[:end].view(torch.int64).sum()
    if end < len(memory):
        rest = torch.nn.functional.pad(memory[end:], (0, end + _WORD - len(memory)))
        total = total + rest.view(torch.int64).sum()
    return total


def _numbers(sums: Sequence[Tensor]) -> list[int]:
    """Values of 0-d tensors, waiting once for each device."""
    found: dict[int, int] = {}
    for device in {tensor.device for tensor in sums}:
        here = [index for index, tensor in enumerate(sums) if tensor.device == device]
        found |= dict(zip(here, torch.stack([sums[index] for index in here]).tolist(), strict=True))
    return [found[index] for index in range(len(sums))]


def _synchronise(tensors: Iterable[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _allocate(size: int, tensors: Iterable[Tensor]) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    if size and any(tensor.is_cuda for tensor in tensors):
        # torch's own pinned memory comes in powers of two, up to twice of what the bound allows
        runtime, address = torch.cuda.cudart(), buffer.data_ptr()
        if int(runtime.cudaHostRegister(address, size, 0)) == 0:  # else the copies are slower
            weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
