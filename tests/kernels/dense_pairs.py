"""The losses over pairs by whole matrices, for the rows that one rank holds: truth in float64, plain otherwise."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize


@dataclass(frozen=True)
class Batch:
    """All features of N samples, and which of their rows are own."""

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor
    own: slice

    @classmethod
    def make(
        cls,
        num: int,
        dim: int,
        *,
        own: slice = slice(None),
        scale: float = 14.3,
        bias: float = -10.0,
        dtype: torch.dtype = torch.float64,
        alike: float = 0.5,
    ) -> "Batch":
        """Unit rows rounded to ``dtype``, partners that resemble one another, and scalars that float16 holds."""
        generator = torch.Generator().manual_seed(num + dim)
        image, noise = torch.randn(2, num, dim, generator=generator, dtype=torch.float64)
        text = alike * image + (1 - alike) * noise
        scalars = (torch.tensor(x, dtype=torch.float16).float() for x in (scale, bias))
        own = slice(*own.indices(num)[:2])
        return cls(*(normalize(x, dim=1).to(dtype) for x in (image, text)), *scalars, own)

    def to(self, dtype: torch.dtype) -> "Batch":
        return Batch(*(x.to(dtype) for x in (self.image, self.text, self.scale, self.bias)), self.own)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the operations are given: own images, all texts and the scale."""
        return self.image[self.own], self.text, self.scale

    @property
    def place(self) -> dict[str, int]:
        return {"offset": self.own.start}

    def logits(self) -> Tensor:
        return (self.scale * self.image) @ self.text.T

    def pairs_of(self, x: Tensor) -> Tensor:
        return x.diagonal()[self.own]


def statistics(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    z = batch.logits()
    return z[batch.own].logsumexp(1), z[batch.own].logsumexp(0), batch.pairs_of(z)


def columns_of_others(batch: Batch) -> Tensor:
    """Log-sum-exps of the columns over the rows that are not own."""
    z = batch.logits()
    z[batch.own] = -torch.inf
    return z.logsumexp(0)


def clip_gradients(batch: Batch, a: float, b: Tensor) -> tuple[Tensor, ...]:
    """Of image, text, their halves and the log of the scale."""
    z, identity = batch.logits(), torch.eye(len(batch.text), dtype=batch.image.dtype)
    by_row = a * (z.softmax(1) - identity)
    whole = by_row + b.to(z.dtype) * (z.softmax(0) - identity)
    return *sent(batch, whole), *sent(batch, by_row), (whole * z)[batch.own].sum()


def sigmoid_sum(batch: Batch) -> Tensor:
    return -logsigmoid(signs(batch) * (batch.logits() + batch.bias))[batch.own].sum()


def sigmoid_gradients(batch: Batch, a: float) -> tuple[Tensor, ...]:
    """Of image, text and bias, G of the pairs, and that of the log of the scale."""
    y, z = signs(batch), batch.logits()
    gradient = -a * y * (-y * (z + batch.bias)).sigmoid()
    own = gradient[batch.own]
    return *sent(batch, gradient), own.sum(), batch.pairs_of(gradient), (own * z[batch.own]).sum()


def signs(batch: Batch) -> Tensor:
    return 2 * torch.eye(len(batch.text), dtype=batch.image.dtype) - 1


def sent(batch: Batch, gradient: Tensor) -> tuple[Tensor, Tensor]:
    g = gradient[batch.own]
    return batch.scale * (g @ batch.text), batch.scale * (g.T @ batch.image[batch.own])


def assert_within_twice_plain(
    ours: tuple[Tensor, ...], plain: tuple[Tensor, ...], truth: tuple[Tensor, ...], *, dtype: torch.dtype
) -> None:
    """Error at most twice that of the plain composition, beyond one last digit.

    That is a digit of the dtype for what is sent through a rounded G, and of float32 for sums, which are float64.
    """
    for i, (x, y, z) in enumerate(zip(ours, plain, truth, strict=True)):
        assert x.shape == z.shape
        digit = torch.finfo(torch.float32 if x.dtype is torch.float64 else dtype).eps
        error, allowed = (x.double() - z).norm(), 2 * (y.double() - z).norm() + digit * z.norm()
        assert error <= allowed, f"result {i}: error {error:.1e} of {z.norm():.1e}, allowed {allowed:.1e}"
