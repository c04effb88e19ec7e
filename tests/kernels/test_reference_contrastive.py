"""The dense truths against torch's own losses and the closed form of their gradients, in float64."""

import torch
from lightning_moeclip.kernels import reference
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

NUM, DIM = 7, 5


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(2, NUM, DIM, generator=generator, dtype=torch.float64).requires_grad_()
    scale, bias = torch.tensor([1.3, -0.4], dtype=torch.float64).requires_grad_()
    return image, text, scale, bias


def assert_same(loss: Tensor, expected: Tensor, arguments: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    for x, y in zip(torch.autograd.grad(loss, arguments), torch.autograd.grad(expected, arguments), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_contrastive_loss_is_the_mean_of_two_cross_entropies() -> None:
    image, text, scale, _ = inputs()
    logits, labels = scale.exp() * image @ text.T, torch.arange(NUM)
    expected = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
    assert_same(reference.contrastive_loss(image, text, scale), expected, (image, text, scale))


def test_contrastive_gradients_have_their_closed_form() -> None:
    """G = (p + q - 2 identity) / 2N; dL/dI = s G T, dL/dT = s G' I, dL/d(log s) = sum of G z."""
    image, text, scale, _ = inputs()
    got = torch.autograd.grad(reference.contrastive_loss(image, text, scale), (image, text, scale))
    z = scale.exp() * image @ text.T
    gradient = (z.softmax(1) + z.softmax(0) - 2 * torch.eye(NUM)) / (2 * NUM)
    expected = (scale.exp() * gradient @ text, scale.exp() * gradient.T @ image, (gradient * z).sum())
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_sigmoid_loss_is_the_binary_cross_entropy_of_all_pairs() -> None:
    image, text, scale, bias = inputs()
    logits = scale.exp() * image @ text.T + bias
    expected = binary_cross_entropy_with_logits(logits, torch.eye(NUM, dtype=torch.float64), reduction="sum") / NUM
    assert_same(reference.sigmoid_loss(image, text, scale, bias), expected, (image, text, scale, bias))


def test_truths_keep_the_dtype_they_are_given() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        image, text, scale, bias = (x.detach().to(dtype) for x in inputs())
        assert reference.contrastive_loss(image, text, scale).dtype == dtype
        assert reference.sigmoid_loss(image, text, scale, bias).dtype == dtype
