"""Whether the two halves of a loss pull the features the same way: three sums over their cotangents.

With a and b the cotangents that the halves send to the same features, both towers together, cos(a, b) =
a.b / sqrt(a.a b.b). The backward has the merged cotangent t and makes a beside it, so that asking changes no bit of t;
b is what is missing: t - a, or a - t where b points the other way.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["DirectionSums", "wide_dtype"]

Pair = tuple[Tensor | None, Tensor | None]


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of log-sum-exps and sums: O(N) numbers, so float64 costs nothing where it exists."""
    return x.dtype if x.device.type == "mps" else torch.float64


class DirectionSums:
    """[a.b, a.a, b.b] over this rank's rows, added up over backwards until somebody takes them."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, half: Pair, merged: Pair, *, is_opposed: bool) -> None:
        """Take in the cotangents of one backward.

        Args:
            half: a by tower, [n_r, dim] each; None for a tower that is not trained.
            merged: t, likewise.
            is_opposed: t = a - b, and not a + b.
        """
        aa, at, tt = _products(zip(half, merged, strict=True))
        ab = aa - at if is_opposed else at - aa
        sums = torch.stack([ab, aa, tt - 2 * at + aa])
        self._sums = sums if self._sums is None else self._sums + sums

    def pop(self) -> Tensor | None:
        """The sums since the last pop, [3] float64; None where no backward was asked for them."""
        sums, self._sums = self._sums, None
        return sums


def _products(pairs: Iterable[Pair]) -> Tensor:
    """[a.a, a.t, t.t] over all pairs (a, t) that there are."""
    products = []
    for half, merged in pairs:
        if half is not None and merged is not None:
            a, t = (x.detach().to(wide_dtype(x)).flatten() for x in (half, merged))
            products.append(torch.stack([a @ a, a @ t, t @ t]))
    return torch.stack(products).sum(0) if products else torch.zeros(3, dtype=torch.float64)
