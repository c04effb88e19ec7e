"""Tensors in one flat buffer of host memory, each with a checksum.

A copy of N bytes reads N and writes N. The checksum is a sum of 64-bit words that wraps around, which a flipped bit
always changes: N more bytes are read. Host tensors are copied and summed in turns, a part at a time that fits the
cache, so that the second pass reads no memory, each by one of torch's number of threads. Small tensors, such as biases
and step counters, would cost more in calls than in bytes: they are copied in one call and summed in another.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_moeclip.state.word_sums import FLOATS, MODULUS, WORD, copy_and_sum, device_sum, in_threads, sum_words

__all__ = ["HostCopy", "Place", "enough_memory", "num_bytes_of", "places_of", "summed_in_copy"]

_ALIGNMENT = 64  # bytes, a cache line
_SMALL_BYTES = 16 * 1024
_OUT_OF_MEMORY = "can't allocate memory"  # of torch's DefaultCPUAllocator, which raises a plain RuntimeError


class Place(NamedTuple):
    """Where a tensor lies in the buffer; strides are those of the live tensor, so that memory is copied in order."""

    offset: int
    num_bytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def bytes_in(self, buffer: Tensor) -> Tensor:
        """[num_bytes] uint8 of ``buffer``."""
        return buffer[self.offset : self.offset + self.num_bytes]

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in ``buffer``."""
        return self.bytes_in(buffer).view(self.dtype).as_strided(self.shape, self.stride)


class HostCopy:
    """Values of named tensors at one time, in host memory.

    Args:
        tensors: live tensors, whose values ``fill`` takes.
        places: of ``places_of``.

    Attributes:
        places: where each tensor lies.
        buffer: [n] uint8, all there is; pinned when a tensor is on a GPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
        self.places = places
        self._large = {name: place for name, place in places.items() if place.num_bytes > _SMALL_BYTES}
        self._small = {name: place for name, place in places.items() if name not in self._large}
        self._checksums: dict[str, int] = {}
        num_words = torch.tensor([-(-place.num_bytes // WORD) for place in self._small.values()], dtype=torch.int64)
        self._owners = torch.arange(len(self._small)).repeat_interleave(num_words)
        self._small_bytes = len(self._owners) * WORD
        self.buffer = _allocate(num_bytes_of(places), tensors.values())
        # also what lies between small tensors, which is summed with them
        self.buffer[len(self.buffer) - self._small_bytes :].zero_()
        self._views = {name: place.view(self.buffer) for name, place in places.items()}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor], *, checked: Collection[str] = ()) -> list[str]:
        """Copy the values of the tensors, and wait until they have arrived.

        Args:
            tensors: with the places of this copy.
            checked: among those of ``summed_in_copy``.

        Returns:
            Names among ``checked`` that are not finite.
        """
        live = {name: _distinct(tensors[name]) for name in self.places}
        # sums are those of the live tensor, so that a bad copy is found as well as a bad buffer
        memories = {name: _memory(live[name], place.stride) for name, place in self._large.items()}
        on_device = {}
        for name, memory in memories.items():
            if not memory.is_cpu:
                _copy(self._views[name], live[name], device=live[name].device)
                on_device[name] = device_sum(memory)

        def keep(name: str) -> tuple[int, bool]:
            place = self._large[name]
            dtype = FLOATS[place.dtype] if name in checked else None
            return copy_and_sum(place.bytes_in(self.buffer), memories[name], dtype)

        names = [name for name, memory in memories.items() if memory.is_cpu]
        kept = dict(zip(names, in_threads(keep, names), strict=True))
        if self._small:
            views = [self._views[name] for name in self._small]
            small = [live[name] for name in self._small]
            torch._foreach_copy_(views, small, non_blocking=all(_is_awaited(tensor.device) for tensor in small))
        _synchronise(tensors.values())
        on_host = {name: number for name, (number, _) in kept.items()}
        self._checksums = on_host | _numbers(on_device) | self._small_sums(self.buffer)
        return [name for name, (_, is_finite) in kept.items() if not is_finite]

    def damaged(self) -> list[str]:
        """Names of tensors whose bytes in the buffer are not those that were copied."""
        sums = _sums_on_host({name: place.bytes_in(self.buffer) for name, place in self._large.items()})
        return self._different(sums | self._small_sums(self.buffer))

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Copy the values back into the tensors, in place.

        Args:
            tensors: live ones, with the names, shapes and dtypes of those that were copied; strides may differ.

        Returns:
            Names of tensors that do not hold what they held then.
        """
        assert tensors.keys() == self.places.keys(), "the same layout"
        live = {name: _distinct(tensors[name]) for name in self.places}
        for name, tensor in live.items():
            _copy(tensor, self._views[name], device=tensor.device)
        _synchronise(tensors.values())
        return self._different(self._sums_of(live))

    def _sums_of(self, live: Mapping[str, Tensor]) -> dict[str, int]:
        large = {name: _memory(live[name], place.stride) for name, place in self._large.items()}
        on_host = _sums_on_host({name: memory for name, memory in large.items() if memory.is_cpu})
        on_device = {name: device_sum(memory) for name, memory in large.items() if not memory.is_cpu}
        again = torch.zeros(self._small_bytes, dtype=torch.uint8)
        begin = len(self.buffer) - self._small_bytes
        for name, place in self._small.items():
            place._replace(offset=place.offset - begin).view(again).copy_(live[name])
        return on_host | _numbers(on_device) | self._small_sums(again)

    def _small_sums(self, buffer: Tensor) -> dict[str, int]:
        words = buffer[len(buffer) - self._small_bytes :].view(torch.int64)
        sums = torch.zeros(len(self._small), dtype=torch.int64).index_add_(0, self._owners, words)
        return {name: number % MODULUS for name, number in zip(self._small, sums.tolist(), strict=True)}

    def _different(self, sums: Mapping[str, int]) -> list[str]:
        return [name for name in self.places if sums[name] != self._checksums[name]]


def places_of(tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    """Places of all tensors, the large ones first, each of which begins at a cache line.

    Small ones begin at a word, and those of complex128, the one dtype of two words, come before the others.
    """
    distinct = {name: _distinct(tensor) for name, tensor in tensors.items()}
    places: dict[str, Place] = {}
    end = 0
    for name, tensor in sorted(distinct.items(), key=_turn):
        size = _num_bytes(tensor)
        places[name] = Place(end, size, tensor.shape, _memory_stride(tensor), tensor.dtype)
        end += _padded(size)
    return places


def _turn(named: tuple[str, Tensor]) -> tuple[bool, bool]:
    _, tensor = named
    return _num_bytes(tensor) <= _SMALL_BYTES, tensor.element_size() <= WORD


def summed_in_copy(tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> set[str]:
    """Names of tensors whose values ``HostCopy.fill`` can look at while they are in the cache."""
    return {
        name
        for name, place in places.items()
        if place.num_bytes > _SMALL_BYTES and place.dtype in FLOATS and tensors[name].is_cpu
    }


def num_bytes_of(places: Mapping[str, Place]) -> int:
    """Bytes of a buffer with these places."""
    return sum(_padded(place.num_bytes) for place in places.values())


@contextlib.contextmanager
def enough_memory(num_bytes: int) -> Iterator[None]:
    """Tell in one way that there is no memory for a copy of that many bytes: torch raises several, Python another.

    Raises:
        MemoryError: the body ran out of memory of the host or of a device.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _OUT_OF_MEMORY in str(error)
        if not is_memory:
            raise
        kind = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        raise MemoryError(
            f"There is no {kind} memory for the {num_bytes:,} bytes of a snapshot. Write "
            f"CosineRollback(max_snapshot_bytes={num_bytes}) to keep one of them, or leave the callback out."
        ) from error


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(num_bytes: int) -> int:
    alignment = _ALIGNMENT if num_bytes > _SMALL_BYTES else WORD
    return -(-num_bytes // alignment) * alignment


def _distinct(tensor: Tensor) -> Tensor:
    """The elements as they lie in memory, once each: an expanded tensor repeats some, a conjugate one has a flag."""
    tensor = tensor.detach()
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    if 0 in tensor.stride():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _memory_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides when it fills a stretch of memory, else those of a contiguous one."""
    if tensor.is_contiguous():
        return tensor.stride()
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


def _sums_on_host(memories: Mapping[str, Tensor]) -> dict[str, int]:
    return dict(zip(memories, in_threads(sum_words, list(memories.values())), strict=True))


def _numbers(sums: Mapping[str, Tensor]) -> dict[str, int]:
    """Values of 0-d tensors, waiting once for each device."""
    found: dict[str, int] = {}
    for device in {tensor.device for tensor in sums.values()}:
        here = [name for name, tensor in sums.items() if tensor.device == device]
        numbers = torch.stack([sums[name] for name in here]).tolist()
        found |= {name: number % MODULUS for name, number in zip(here, numbers, strict=True)}
    return found


def _is_awaited(device: torch.device) -> bool:
    """Whether copies from and to this device have arrived after ``_synchronise``, and need not wait themselves."""
    return device.type in ("cpu", "cuda")


def _copy(target: Tensor, source: Tensor, *, device: torch.device) -> None:
    """Copy between the host and ``device``; the values are there after ``_synchronise``."""
    target.copy_(source, non_blocking=_is_awaited(device))


def _synchronise(tensors: Iterable[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _allocate(size: int, tensors: Iterable[Tensor]) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if size and device is not None:
        _pin(buffer, device)
    return buffer


def _pin(buffer: Tensor, device: torch.device) -> None:
    """Pin the buffer where the driver lets us; else the copies are slower."""
    # torch's own pinned memory comes in powers of two, up to twice of what the bound allows
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()
    if int(runtime.cudaHostRegister(address, len(buffer), 0)) == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    else:
        _forget_last_error(device)


def _forget_last_error(device: torch.device) -> None:
    """Have CUDA forget a refused call, which the check after the next kernel would take for that kernel's own error.

    torch has no binding of ``cudaGetLastError``. Its check after a kernel calls it, so a kernel of no use meets the
    error here; one that has broken the device is raised again by whatever comes next.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
