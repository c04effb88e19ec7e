"""The global batch of a loss: which rank holds which rows, and the exchanges of features and cotangents.

Every function here that takes a ``GlobalBatch`` with more than one rank is a collective: all ranks of its group
call it, in the same order, also with no rows of their own. What is called depends on numbers that all ranks share.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["GlobalBatch", "gather_rows", "meet", "reduce_logsumexp", "sum_to_owners"]

# torch 2.13 renamed both, and warns under the names that 2.11 has
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GlobalBatch:
    """Rows that each rank holds, and which gradients any of them wants.

    Attributes:
        rows: n_r, number of samples by rank; may differ, may be 0.
        rank: place of this rank in the group.
        group: the ranks that share the batch; None for the default group, or without a process group.
        wants_text: some rank needs the gradient of its text features.
        wants_any: some rank needs any gradient at all.
        wants_directions: some rank asks how far the two halves of the loss agree.
    """

    rows: tuple[int, ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None
    wants_text: bool = True
    wants_any: bool = True
    wants_directions: bool = False

    @property
    def world_size(self) -> int:
        """W, number of ranks that share the batch."""
        return len(self.rows)

    @property
    def total(self) -> int:
        """N, number of samples over all ranks."""
        return sum(self.rows)

    @property
    def offset(self) -> int:
        """Place of this rank's first row among the N rows."""
        return sum(self.rows[: self.rank])

    @property
    def own(self) -> slice:
        """This rank's rows among the N rows."""
        return slice(self.offset, self.offset + self.rows[self.rank])


@dataclass(frozen=True)
class _Card:
    """What one rank brought to the batch: as many whole numbers, so that it travels in one small collective."""

    image_ndim: int
    num_images: int
    image_dim: int
    image_dtype: int
    text_ndim: int
    num_texts: int
    text_dim: int
    text_dtype: int
    wants_image: int
    wants_text: int
    wants_other: int
    wants_directions: int

    def __str__(self) -> str:
        image = _described(self.image_ndim, self.num_images, self.image_dim, self.image_dtype)
        text = _described(self.text_ndim, self.num_texts, self.text_dim, self.text_dtype)
        return f"image features {image} and text features {text}"


def meet(
    image: Tensor,
    text: Tensor,
    *others: Tensor,
    group: dist.ProcessGroup | None = None,
    wants_directions: bool = False,
) -> GlobalBatch:
    """Learn how many rows each rank holds, and refuse features that do not belong together.

    Twelve whole numbers per rank are gathered and read on the host, since shapes of uneven ranks hang on them.

    Args:
        image: [n_r, dim], this rank's image features.
        text: [n_r, dim], this rank's text features.
        others: further tensors that may need a gradient.
        group: ranks that share the batch; None for the default group.
        wants_directions: whether this rank asks how far the two halves of the loss agree.

    Raises:
        ValueError: on every rank alike, when shapes, widths or dtypes do not fit, or no rank holds a sample.
    """
    wants = (_wants(image), _wants(text), any(map(_wants, others)), wants_directions)
    mine = _Card(*_numbers(image), *_numbers(text), *map(int, wants))
    rank, cards = 0, [mine]
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("This rank is not in the given group. Call the loss on the ranks of its group only.")
        if world_size > 1:
            sent = torch.tensor(list(vars(mine).values()), dtype=torch.int64, device=image.device)
            received = sent.new_empty(world_size * len(sent))
            _all_gather(received, sent, group=group)
            cards = [_Card(*numbers) for numbers in received.view(world_size, -1).tolist()]
    _check(cards)
    wants_text = any(c.wants_text for c in cards)
    wants_any = wants_text or any(c.wants_image or c.wants_other for c in cards)
    rows = tuple(c.num_images for c in cards)
    return GlobalBatch(rows, rank, group, wants_text, wants_any, any(c.wants_directions for c in cards))


def gather_rows(x: Tensor, batch: GlobalBatch) -> Tensor:
    """Bring the rows of all ranks together: [n_r, ...] on each rank to [N, ...] on all."""
    if batch.world_size == 1:
        return x
    most = max(batch.rows)
    received = x.new_empty(batch.world_size * most, *x.shape[1:])
    _all_gather(received, _padded(x, most), group=batch.group)
    return _unpadded(received, batch)


def sum_to_owners(x: Tensor, batch: GlobalBatch) -> Tensor:
    """Add up what every rank computed for each of the N rows, and keep the own rows: [N, ...] to [n_r, ...]."""
    if batch.world_size == 1:
        return x
    most = max(batch.rows)
    if most * batch.world_size != batch.total:
        x = torch.cat([_padded(part, most) for part in x.split(batch.rows)])
    received = x.new_empty(most, *x.shape[1:])
    _reduce_scatter(received, x.contiguous(), group=batch.group)
    return received[: batch.rows[batch.rank]]


def reduce_logsumexp(partial: Tensor, batch: GlobalBatch) -> Tensor:
    """Combine log-sum-exps over ranks for the own columns: [N] of partial ones on each rank to [n_r].

    The reduce-scatter form of a log-sum-exp reduction, in one collective of N numbers per rank: each owner is sent the
    W partial values of its columns and combines them with a running maximum. A MAX followed by a SUM would be
    two collectives, and gloo's MAX loses NaN; a gather of all values on all ranks would take W x N numbers.
    """
    if batch.world_size == 1:
        return partial
    own = batch.rows[batch.rank]
    received = partial.new_empty(batch.world_size * own)
    dist.all_to_all_single(
        received, partial.contiguous(), [own] * batch.world_size, list(batch.rows), group=batch.group
    )
    return received.view(batch.world_size, own).logsumexp(dim=0)


def _wants(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _numbers(x: Tensor) -> tuple[int, int, int, int]:
    num, dim = x.shape if x.ndim == 2 else (-1, -1)
    return x.ndim, num, dim, _DTYPES.index(x.dtype) if x.dtype in _DTYPES else -1


def _described(ndim: int, num: int, dim: int, dtype: int) -> str:
    shape = f"[{num}, {dim}]" if ndim == 2 else f"with {ndim} dimensions"
    return f"{shape} {str(_DTYPES[dtype]).removeprefix('torch.') if dtype >= 0 else 'of another dtype'}"


def _check(cards: list[_Card]) -> None:
    if any(c.image_ndim != 2 or c.text_ndim != 2 for c in cards):
        raise ValueError(f"Features must be [samples, dim], but {_listed(cards, str)}. Flatten or pool them first.")
    if any(min(c.image_dtype, c.text_dtype) < 0 for c in cards):
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(f"Features must be one of {known}, but {_listed(cards, str)}. Convert them first.")
    if any(c.num_images != c.num_texts for c in cards):
        raise ValueError(
            f"Row i of the image features and row i of the text features are a pair, but {_listed(cards, str)}. "
            "Give as many images as texts on each rank."
        )
    if len({dim for c in cards for dim in (c.image_dim, c.text_dim)}) > 1:
        widths = _listed(cards, lambda c: f"image features of width {c.image_dim}, text features of width {c.text_dim}")
        raise ValueError(f"All features must have one width, but {widths}. Project both towers to the same dim.")
    if len({(c.image_dtype, c.text_dtype) for c in cards}) > 1:
        raise ValueError(f"All ranks must give the same dtypes, but {_listed(cards, str)}. Use one precision on all.")
    if not sum(c.num_images for c in cards):
        raise ValueError("No rank holds a sample: the mean over an empty batch is undefined. Skip such a batch.")


def _listed(cards: list[_Card], describe: Callable[[_Card], str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        ranks.setdefault(describe(card), []).append(rank)
    named = {what: f"rank {r[0]}" if len(r) == 1 else f"ranks {', '.join(map(str, r))}" for what, r in ranks.items()}
    return "; ".join(f"{who} gave {what}" for what, who in named.items())


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def _unpadded(received: Tensor, batch: GlobalBatch) -> Tensor:
    most = max(batch.rows)
    if most * batch.world_size == batch.total:
        return received
    return torch.cat([part[:n] for part, n in zip(received.split(most), batch.rows, strict=True)])
