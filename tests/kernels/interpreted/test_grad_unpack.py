"""The Triton source of unpacking and unscaling, interpreted, against float64."""

import math

import pytest
import torch
from lightning_moeclip.kernels import reference
from lightning_moeclip.kernels.grad_statistics import NUM_COLUMNS
from lightning_moeclip.kernels.grad_unpack import grad_unpack, unscale_

from tests.kernels.interpreted.test_grad_pack import assert_packed
from tests.kernels.test_grad_pack import factors_of
from tests.kernels.test_grad_statistics import assert_sums, noise

SHAPES = [(0,), (1,), (15,), (33, 65), (8192 + 17,)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE = torch.ones(())


@pytest.mark.parametrize(
    ("source", "place"), [(FP32, FP32), (FP32, BF16), (BF16, BF16), (torch.complex64, torch.complex64)]
)
def test_gradients_hold_the_product_and_their_residual(source: torch.dtype, place: torch.dtype) -> None:
    sources = [noise(*shape, dtype=source, seed=seed) for seed, shape in enumerate(SHAPES)]
    before = [noise(*shape, dtype=place, seed=9) for shape in SHAPES]
    sources[3][0, 0], before[3][0, 1] = math.inf, math.nan
    (coefficient,) = factors_of([1.0 / 3.0], source)
    gradients = [tensor.clone() for tensor in before]
    found = grad_unpack(sources, gradients, coefficient, with_residual=True)
    assert found is not None
    assert gradients[3].reshape(-1)[0].abs() == math.inf
    assert_sums(found[:, :NUM_COLUMNS], gradients)
    for row, tensor, old in zip(found, sources, before, strict=True):
        wanted = reference.residual_sums(tensor, old)
        torch.testing.assert_close(row[NUM_COLUMNS:], wanted, rtol=1e-13, atol=0)
    for tensors in (sources, gradients):
        tensors[3][0, 0] = 0.0
    assert_packed(gradients, sources, [coefficient] * len(SHAPES))


def test_gradients_may_be_the_sources() -> None:
    gradients = [noise(5, 7).T, noise(4, 6)[:, ::2], noise(3000)]
    wanted = [0.3 * gradient for gradient in gradients]
    assert grad_unpack(gradients, gradients, torch.tensor(0.3)) is None
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("inv_scale", [torch.tensor(2.0**-10), torch.tensor([2.0**-10])])
def test_unscaled_gradients_are_multiplied_and_counted(inv_scale: torch.Tensor) -> None:
    gradients = [noise(50), noise(5, 7).T, noise(33, dtype=FP16), noise(4, dtype=torch.complex64), noise(9000)]
    gradients[2][3] = 2**-20  # vanishes
    gradients[4][::2] = 0.0
    wanted = [(2.0**-10 * gradient.to(torch.promote_types(gradient.dtype, FP32))) for gradient in gradients]
    wanted = [value.to(gradient.dtype) for value, gradient in zip(wanted, gradients, strict=True)]
    found = unscale_(gradients, inv_scale, counts_zeros=True)
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, wanted, strict=True))
    assert found.tolist() == [0.0, 4501.0, 50 + 35 + 33 + 8 + 9000]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, which computes here
def test_what_overflows_by_the_factor_was_finite() -> None:
    """As torch's own unscaling says it."""
    gradient = torch.tensor([3e38, 0.0, 1.0])
    assert unscale_([gradient], torch.tensor(4.0), counts_zeros=True).tolist() == [0.0, 1.0, 3.0]
    assert gradient.tolist() == [math.inf, 0.0, 4.0]
    assert unscale_([gradient], torch.tensor(0.5)).tolist() == [1.0, 0.0, 0.0]


def test_marked_conjugates_are_unscaled() -> None:
    wave = noise(3, dtype=torch.complex64)
    gradient = wave.clone().conj()
    unscale_([gradient], torch.tensor(0.5))
    assert torch.equal(gradient, 0.5 * wave.conj())


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_element_that_is_not_finite_is_found(planted: float, index: int) -> None:
    gradients = [noise(50), noise(7, dtype=BF16), noise(2, dtype=torch.complex64)]
    gradients[index][1] = planted
    assert unscale_(gradients, ONE)[0] > 0
    gradients[index][1] = 1.0
    assert unscale_(gradients, ONE)[0] == 0
