"""What a reduction in 16 bits loses: a sample of elements is reduced in float32 as well, and compared.

Only in steps that are asked for; these read the outcome on the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_moeclip.gradients.buckets import Bucket
from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.report import ReductionResidual
from lightning_moeclip.gradients.slabs import places_of
from lightning_moeclip.parallel.mesh import Mesh

__all__ = ["ResidualSample"]

_SAMPLES_PER_BUCKET = 4096


class ResidualSample:
    """Elements of the buckets that travel in 16 bits, drawn with a seed that all ranks share."""

    def __init__(self, mesh: Mesh, *, seed: int) -> None:
        """Start without elements.

        Args:
            mesh: axes and groups.
            seed: the same on all ranks; another one draws other elements.
        """
        self._mesh = mesh
        self._seed = seed
        self._taken: list[tuple[Bucket, Tensor, Tensor]] = []

    @staticmethod
    def covers(bucket: Bucket) -> bool:
        """Whether the bucket loses anything on its way."""
        return bucket.group is not None and bucket.flat.numel() > 0 and bucket.wire.dtype.itemsize < 4

    def take(self, bucket: Bucket) -> None:
        """Keep elements of a bucket that is about to be launched."""
        if not self.covers(bucket):
            return
        generator = torch.Generator().manual_seed(self._seed + len(self._taken))
        places = _draw(places_of(bucket.plan), generator).to(bucket.flat.device)
        self._taken.append((bucket, places, bucket.flat[places].float()))

    def compare(self, buckets: Sequence[Bucket]) -> ReductionResidual | None:
        """Reduce the sample in float32 and compare; a collective over all ranks when there is anything to compare.

        Args:
            buckets: all of them, after their reduction.
        """
        if not any(self.covers(bucket) for bucket in buckets):
            return None
        sums = torch.zeros(3, dtype=torch.float64, device=buckets[0].flat.device)
        epsilon = 0.0
        for bucket, places, kept in self._taken:
            exact = sum_over(kept, bucket.group).double()
            error = (bucket.flat[places].double() - exact).abs().sum()
            # all replicas find the same numbers
            own = torch.stack([error, exact.abs().sum(), error.new_tensor(float(len(places)))]) / bucket.num_replicas
            sums += own.to(sums.device)
            epsilon = max(epsilon, torch.finfo(bucket.wire.dtype).eps)
        total, norm, number = sum_over(sums, self._mesh.gradient_groups["dp"]).tolist()
        return ReductionResidual(total, norm, epsilon, round(number))


def _draw(places: Sequence[tuple[int, int]], generator: torch.Generator) -> Tensor:
    """Indices into a flat buffer of elements of gradients, none of the gaps between them."""
    first, end = torch.tensor(places).unbind(1)
    size = int((end - first).sum())
    drawn = torch.randint(size, (min(size, _SAMPLES_PER_BUCKET),), generator=generator)
    ends = (end - first).cumsum(0)
    return drawn + (end - ends)[torch.bucketize(drawn, ends, right=True)]
