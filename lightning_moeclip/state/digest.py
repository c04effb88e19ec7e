"""A number of 64 bits for the bits of a tensor, at about the cost of reading it twice.

The tensor is read as 64-bit words and folded by two plain sums, over the columns of one table and over the rows of
another whose width has no factor in common with it: memory bandwidth is all they cost. Of what changes in fewer than
four words, some sum always tells. A sum forgets two changes of its highest bit, which is a sign in float64, so the
widths of rows are odd: a tensor with all its signs changed shows in every row. The few sums are then mixed one by one
and added up with odd pseudo-random weights.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["joint_digest", "tensor_digest"]

_NUM_COLUMNS = 4096
_ROW_WIDTH = 1023  # odd, and without a factor in common with the number of columns
_WORD_BYTES = 8
_MAX_SMALL = 4096  # elements; chosen: to join tensors saves calls and copies each once more
_SHIFT = 29  # takes no sign of a float of 16, 32 or 64 bits in a word to the place of another
# multiplier of Knuth's MMIX generator, The Art of Computer Programming 2, 3.3.4; odd
_SIZE_WEIGHT = 6364136223846793005


@torch.no_grad()
def tensor_digest(tensor: Tensor) -> Tensor:
    """Digest of the bits of a tensor, in the order of its elements, whatever its strides.

    Equal bits have equal digests on every rank and device; 0.0 and -0.0 differ, and so do two NaN with different
    payloads. There is no wait for the device.

    Args:
        tensor: any dtype and shape, strided. One whose elements do not lie in order, or do not start at a multiple of
            8 bytes, is copied first.

    Returns:
        0-d int64, on the device of ``tensor``.
    """
    words, rest = _words(tensor)
    if len(words) > _NUM_COLUMNS:
        sums = torch.cat([*_folded(words, _NUM_COLUMNS, dim=0), *_folded(words, _ROW_WIDTH, dim=1), *rest])
    else:
        sums = torch.cat([words, *rest]) if rest else words
    # times an odd weight the highest bit stays what it was, whatever the weight: let it move another one, too
    mixed = sums ^ ((sums >> _SHIFT) & (2 ** (64 - _SHIFT) - 1))
    return (mixed * _weights(len(sums), sums.device)).sum() + _wrapped(tensor.numel() * _SIZE_WEIGHT)


@torch.no_grad()
def joint_digest(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Digest of several tensors in their order; small ones of a kind are read together, which costs fewer calls.

    Where one tensor ends and the next one begins is not in it: dtypes and shapes have to be compared apart.

    Args:
        tensors: any number, on any devices.
        device: of the result.

    Returns:
        0-d int64; 0 for no tensor.
    """
    parts, small = [], dict[tuple[str, torch.dtype], list[Tensor]]()
    for tensor in tensors:
        if tensor.numel() > _MAX_SMALL:
            parts.append(tensor_digest(tensor))
        else:
            small.setdefault((tensor.device.type, tensor.dtype), []).append(tensor.detach().reshape(-1))
    parts += [tensor_digest(torch.cat(same)) for _, same in sorted(small.items(), key=lambda item: str(item[0]))]
    if not parts:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack([part.to(device) for part in parts]) * _weights(len(parts), device)).sum()


def _words(tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The bits of ``tensor`` as int64, [n], and one more word, [1], where bytes are left over."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()
    num_over = flat.numel() * flat.element_size() % _WORD_BYTES
    if not num_over:
        return flat.view(torch.int64), []
    raw = flat.view(torch.uint8)
    last = torch.nn.functional.pad(raw[-num_over:], (0, _WORD_BYTES - num_over))
    return raw[:-num_over].view(torch.int64), [last.view(torch.int64)]


def _folded(words: Tensor, width: int, *, dim: int) -> list[Tensor]:
    """Sums over a dimension of the table of ``words`` with ``width`` columns, and the words of its last, short row."""
    whole = len(words) // width * width
    return [words[:whole].view(-1, width).sum(dim), words[whole:]]


def _weights(number: int, device: torch.device) -> Tensor:
    """Odd pseudo-random integers, [number], the same ones in every call and on every rank."""
    return _table(max(number - 1, 0).bit_length(), device)[:number]


@functools.lru_cache(maxsize=64)
def _table(num_bits: int, device: torch.device) -> Tensor:
    # splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195, figure 17), in which a shift fills up with zeros
    state = (torch.arange(1, 2**num_bits + 1) * _wrapped(0x9E3779B97F4A7C15)).clone()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = (state ^ ((state >> shift) & (2 ** (64 - shift) - 1))) * _wrapped(factor)
    return (state | 1).to(device)


def _wrapped(number: int) -> int:
    """``number`` modulo 2**64, as an int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63
