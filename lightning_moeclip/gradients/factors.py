"""What gradients are multiplied by on their way into a bucket, as 0-d tensors: nothing is read on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Factors", "ScaleFactors"]


@dataclass(frozen=True)
class Factors:
    """Factors of one bucket, on the CPU, with which a product into a small tensor takes half the time.

    Attributes:
        pack: of a gradient of this rank: 1/W.
        reopen: of a reduced gradient before another is added to it: W/R.
        share: of a reduced gradient that enters a sum again as it is: 1/R.
        one: of what is only moved.
        divisor: W, by which every gradient is divided.
        num_replicas: R, ranks that sum the bucket.
    """

    pack: Tensor
    reopen: Tensor
    share: Tensor
    one: Tensor
    divisor: int
    num_replicas: int

    @classmethod
    def of(cls, dtype: torch.dtype, *, divisor: int, num_replicas: int) -> "Factors":
        """Make them for gradients of ``dtype``; 16-bit ones are multiplied in float32, as by a Python number."""
        wide = torch.promote_types(dtype, torch.float32).to_real()
        pack = 1.0 / divisor

        def number(value: float) -> Tensor:
            return torch.tensor(value, dtype=wide)

        return cls(
            pack=number(pack),
            reopen=number(1.0 / (pack * num_replicas)),
            share=number(1.0 / num_replicas),
            one=number(1.0),
            divisor=divisor,
            num_replicas=num_replicas,
        )


class ScaleFactors:
    """Factors of gradients that carry a scale of their own, which its owner changes between two steps.

    They stay on the device of the scale.
    """

    def __init__(self, scale: Tensor, plain: Factors) -> None:
        """Put the scale into the factors of its bucket.

        Args:
            scale: a, 0-d.
            plain: of gradients without a scale.
        """
        self._scale = scale
        self._plain = plain
        self._version = -1
        self._factors = (scale, scale)

    @property
    def pack(self) -> Tensor:
        """What each gradient is multiplied by: 1/(W a), 0-d."""
        return self._current()[0]

    @property
    def reopen(self) -> Tensor:
        """What a reduced gradient is multiplied by before another is added to it: W a / R, 0-d."""
        return self._current()[1]

    def _current(self) -> tuple[Tensor, Tensor]:
        if self._version != self._scale._version:
            self._version = self._scale._version
            # from the rounded 1/W, so that a power of two changes no bit of a gradient
            pack = self._plain.pack / self._scale.detach()
            self._factors = (pack, 1.0 / (pack * self._plain.num_replicas))
        return self._factors
