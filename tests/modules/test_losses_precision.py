"""Losses in narrow dtypes, under autocast and compilation, and what they refuse."""

from collections.abc import Callable

import pytest
import torch
from lightning_moeclip.kernels import reference
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from lightning_moeclip.modules import ContrastiveLoss, SigmoidLoss, contrastive_loss
from lightning_moeclip.modules.sigmoid import global_sigmoid_loss

NUM, DIM = 48, 16
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

OURS: dict[str, Loss] = {
    "contrastive": lambda image, text, scale, bias: contrastive_loss(image, text, scale, chunk_size=10),
    "sigmoid": lambda image, text, scale, bias: global_sigmoid_loss(
        image, text, scale, bias, 10, None, normalize=False
    ),
}
PLAIN: dict[str, Loss] = {
    "contrastive": lambda image, text, scale, bias: dense(scale.exp().to(image.dtype) * image @ text.T),
    "sigmoid": lambda image, text, scale, bias: reference.sigmoid_loss(image, text, scale, bias),
}
TRUTH: dict[str, Loss] = {
    "contrastive": lambda image, text, scale, bias: reference.contrastive_loss(image, text, scale),
    "sigmoid": reference.sigmoid_loss,
}


def dense(logits: Tensor) -> Tensor:
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def inputs(dtype: torch.dtype, *, alike: float) -> list[Tensor]:
    """Unit rows in ``dtype``; ``alike`` near 1 makes pairs that a trained model would give."""
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, NUM, DIM, generator=generator, dtype=torch.float64)
    text = alike * image + (1 - alike) * noise
    scale, bias = torch.tensor([4.5, -10.0], dtype=torch.float64)
    return [normalize(image, dim=1).to(dtype), normalize(text, dim=1).to(dtype), scale, bias]


def results(loss: Loss, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in given]
    value = loss(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return [x.double() for x in (value.detach(), *grads) if x is not None]


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", OURS)
def test_error_is_at_most_twice_that_of_the_plain_composition(kind: str, dtype: torch.dtype, alike: float) -> None:
    # scalars are exact in every dtype, so that the truth is of what both arms were given
    given = [x.to(dtype).double() for x in inputs(dtype, alike=alike)]
    truth = results(TRUTH[kind], given, torch.float64)
    ours, plain = results(OURS[kind], given, dtype), results(PLAIN[kind], given, dtype)
    for x, y, z in zip(ours, plain, truth, strict=True):
        # a value of its dtype can be no nearer than its last digit
        floor = torch.finfo(dtype).eps * z.norm()
        assert (x - z).norm() <= 2 * (y - z).norm() + floor


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_narrow_features_is_float32_and_their_gradients_are_narrow(kind: str, dtype: torch.dtype) -> None:
    leaves = [x.requires_grad_() for x in inputs(dtype, alike=0.0)]
    loss = OURS[kind](*leaves)
    loss.backward()
    assert loss.dtype == torch.float32
    assert [x.grad.dtype for x in leaves[:3]] == [dtype, dtype, torch.float64]


def test_logits_beyond_the_range_of_exp_give_a_finite_exact_loss() -> None:
    image, text, *_ = inputs(torch.float32, alike=0.9)
    scale = torch.tensor(200.0).log()
    assert (200 * image @ text.T).exp().isinf().any()
    got = contrastive_loss(image, text, scale, chunk_size=10)
    expected = reference.contrastive_loss(image.double(), text.double(), scale.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [ContrastiveLoss, SigmoidLoss])
def test_module_normalizes_in_float32_unless_told_not_to(kind: type) -> None:
    image, text, *_ = inputs(torch.bfloat16, alike=0.0)
    image, text = 3 * image, 5 * text
    unit = [normalize(x.float(), dim=1) for x in (image, text)]
    assert torch.equal(kind()(image, text), kind(normalize=False)(*unit))
    assert not torch.equal(kind()(image, text), kind(normalize=False)(image, text))


@pytest.mark.parametrize("kind", [ContrastiveLoss, SigmoidLoss])
def test_autocast_does_not_touch_the_loss_or_its_gradients(kind: type) -> None:
    found = []
    for enabled in (False, True):
        loss = kind()
        image, text = (x.requires_grad_() for x in inputs(torch.float32, alike=0.0)[:2])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = loss(image, text)
            value.backward()
        found.append([value.detach(), image.grad, text.grad, loss.logit_scale.grad])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("kind", OURS)
def test_create_graph_gives_the_gradients_and_differentiating_them_raises(kind: str) -> None:
    leaves = [x.requires_grad_() for x in inputs(torch.float64, alike=0.0)]
    leaves = leaves if kind == "sigmoid" else leaves[:3]
    loss = OURS[kind](*leaves, *[torch.zeros(())] * (4 - len(leaves)))
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    once = torch.autograd.grad(OURS[kind](*leaves, *[torch.zeros(())] * (4 - len(leaves))), leaves)
    for x, y in zip(grads, once, strict=True):
        assert torch.equal(x, y)
        with pytest.raises(RuntimeError, match="cannot be differentiated once more"):
            torch.autograd.grad(x.sum(), leaves, retain_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", [ContrastiveLoss, SigmoidLoss])
def test_compiled_caller_gets_the_same_loss_and_gradients(kind: type) -> None:
    loss = kind()
    image, text = (x.requires_grad_() for x in inputs(torch.float32, alike=0.0)[:2])

    def step(image: Tensor, text: Tensor) -> Tensor:
        return loss(2 * image, text) + 1

    expected = torch.autograd.grad(step(image, text), (image, text, loss.logit_scale))
    compiled = torch.compile(step, backend="aot_eager")(image, text)
    got = torch.autograd.grad(compiled, (image, text, loss.logit_scale))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_largest_tensor_of_the_loss_is_far_from_n_by_n() -> None:
    num, dim = 1024, 8
    image, text = (x.requires_grad_() for x in torch.randn(2, num, dim))
    scale = torch.tensor(1.0, requires_grad=True)
    with Largest() as seen:
        contrastive_loss(image, text, scale, chunk_size=16).backward()
    assert seen.numel <= 2 * 16 * num  # two buffers of n_r * chunk


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest storage that an operation returned, in elements."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_one_element_scale_keeps_its_shape() -> None:
    image, text, scale, bias = inputs(torch.float64, alike=0.0)
    scale, bias = scale.reshape(1).requires_grad_(), bias.reshape(1).requires_grad_()
    for loss in OURS.values():
        value = loss(image, text, scale, bias)
        assert value.ndim == 0
        assert torch.autograd.grad(value, scale)[0].shape == (1,)
        assert torch.equal(value, loss(image, text, scale[0], bias[0]))


def test_what_is_no_scale_or_chunk_is_refused() -> None:
    image, text, *_ = inputs(torch.float32, alike=0.0)
    with pytest.raises(TypeError, match=r"logit_scale must be a tensor, not float. Use torch.tensor\(2.5\)"):
        contrastive_loss(image, text, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logit_scale must be one number, but its shape is \[2\]"):
        contrastive_loss(image, text, torch.zeros(2))
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        contrastive_loss(image, text, torch.zeros(()), chunk_size=0)
