"""Whether the two halves of a loss pull the features the same way: three sums over their cotangents.

With a and b the cotangents that the halves send to the same features, both towers together, cos(a, b) =
a.b / sqrt(a.a b.b). The backward has the merged cotangent t and makes a beside it, so that asking changes no bit of t;
b is what is missing: t - a, or a - t where b points the other way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_moeclip.kernels.contrastive_tiles import wide_dtype

__all__ = ["DirectionSums", "Directions"]

Pair = tuple[Tensor | None, Tensor | None]
_SHORTEST = 1e-12  # the eps of torch.nn.functional.normalize


class DirectionSums:
    """[a.b, a.a, b.b] over this rank's rows, added up over backwards until somebody takes them."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, sums: Tensor) -> None:
        """Take in the sums of one backward, [3] float64."""
        self._sums = sums if self._sums is None else self._sums + sums

    def pop(self) -> Tensor | None:
        """The sums since the last pop, [3] float64; None where no backward was asked for them."""
        sums, self._sums = self._sums, None
        return sums


@dataclass(frozen=True)
class Directions:
    """What one forward keeps for the sums of its backward.

    Attributes:
        sums: where they go.
        lengths: of the features by tower, [n_r, 1] each, where the loss brought their rows to unit length; None where
            it used them as given.
    """

    sums: DirectionSums
    lengths: tuple[Tensor, Tensor] | None = None

    @classmethod
    def begin(cls, sums: DirectionSums | None, image: Tensor, text: Tensor, *, normalize: bool) -> "Directions | None":
        """Before the rows [n_r, dim] are brought to unit length; None where nobody asks."""
        if sums is None:
            return None
        if not normalize:
            return cls(sums)
        image_length, text_length = (
            torch.linalg.vector_norm(x.detach().to(wide_dtype(x)), dim=1, keepdim=True).clamp_min(_SHORTEST)
            for x in (image, text)
        )
        return cls(sums, (image_length, text_length))

    def add(self, half: Pair, merged: Pair, *, rows: tuple[Tensor, Tensor], is_opposed: bool) -> None:
        """Take in the cotangents of one backward.

        Args:
            half: a of the rows that the logits are made of, by tower, [n_r, dim] each; None for a tower that is not
                trained.
            merged: t, likewise.
            rows: the rows themselves.
            is_opposed: t = a - b, and not a + b.
        """
        lengths = (None, None) if self.lengths is None else self.lengths
        towers = zip(half, merged, rows, lengths, strict=True)
        products = [_products(a, t, row, length) for a, t, row, length in towers if a is not None and t is not None]
        # on the device of the rows, since other backwards are added to it
        none = torch.zeros(3, dtype=wide_dtype(rows[0]), device=rows[0].device)
        aa, at, tt = torch.stack(products).sum(0) if products else none
        self.sums.add(torch.stack([aa - at if is_opposed else at - aa, aa, tt - 2 * at + aa]))


def _products(a: Tensor, t: Tensor, row: Tensor, length: Tensor | None) -> Tensor:
    """[a.a, a.t, t.t] of one tower, [3] float64, for the features as given.

    Through x / |x| = u a cotangent c becomes (c - (c.u) u) / |x|: products of rows say it all, and nothing of the
    features' size is made.
    """
    wide = wide_dtype(a)
    products = torch.stack([torch.linalg.vecdot(x, y) for x, y in ((a, a), (a, t), (t, t))]).to(wide)
    if length is not None:
        along_a, along_t = (torch.linalg.vecdot(x, row).to(wide) for x in (a, t))
        products -= torch.stack([along_a * along_a, along_a * along_t, along_t * along_t])
        products /= length.squeeze(1) ** 2
    return products.sum(1)
