"""Sums over gradients against float64, by torch: exact counts, and sums that still hold where they cancel."""

import math

import pytest
import torch
from lightning_moeclip.kernels import grad_statistics as module
from lightning_moeclip.kernels import reference
from lightning_moeclip.kernels.grad_statistics import NUM_COLUMNS, NUM_NONFINITE, NUM_ZEROS, SIZE, grad_statistics
from torch import Tensor

COUNTS = [SIZE, NUM_NONFINITE, NUM_ZEROS]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def assert_sums(found: Tensor, tensors: list[Tensor], bound: float = 1e-12) -> None:
    """Within a share of the sum of absolutes, as a sum may cancel."""
    wanted = torch.stack([reference.gradient_sums(tensor) for tensor in tensors])
    assert found.dtype is torch.float64
    assert torch.equal(found[:, COUNTS], wanted[:, COUNTS])
    scale = wanted.clone()
    scale[:, module.TOTAL] = wanted[:, module.ABSOLUTE]
    assert ((found - wanted).abs() <= bound * scale).all()
    assert torch.equal(found[:, module.MAXIMUM], wanted[:, module.MAXIMUM])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_ragged_sizes_are_those_of_float64(dtype: torch.dtype) -> None:
    sizes = [(0,), (1,), (), (3, 0, 2), (17,), (33, 65), (70_001,), (2**16,)]
    tensors = [noise(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]
    tensors[5][::3] = 0
    assert_sums(grad_statistics(tensors), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_planted_elements_are_counted_and_in_no_sum(dtype: torch.dtype) -> None:
    tensors = [noise(150_000, dtype=dtype, seed=1), noise(5, dtype=dtype), torch.full((3,), math.nan, dtype=dtype)]
    # in the first block, in the last, and next to zeros of both signs
    tensors[0][[0, 7, 149_999]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    tensors[0][[1, 140_000]] = torch.tensor([0.0, -0.0], dtype=dtype)
    tensors[1][2] = -math.inf
    found = grad_statistics(tensors)
    assert_sums(found, tensors)
    assert found.isfinite().all()


def test_sums_of_strided_tensors_are_those_of_their_elements() -> None:
    image = noise(4, 3, 5, 7).to(memory_format=torch.channels_last)
    wave = noise(6, 5, dtype=torch.complex64)
    tensors = [
        image,
        noise(8, 9).T,
        noise(8, 9)[:, ::2],
        noise(3, 1).expand(3, 4),
        wave.conj(),
        wave.real,
        wave.conj().imag,
        torch._neg_view(noise(4, 4)).T,
        noise(7).requires_grad_(),
    ]
    kinds = [grad_statistics([tensor]) for tensor in tensors]
    assert_sums(torch.cat(kinds), tensors)


def test_square_of_nearly_equal_elements_has_the_rounding_of_float64() -> None:
    tensor = (1e4 + noise(300_000).double()).float()
    found = grad_statistics([tensor])[0]
    wanted = tensor.double()
    # sums in pairs: a few epsilons, of which a dot product over as many elements has 60
    epsilon = torch.finfo(torch.float64).eps
    assert abs(found[module.SQUARE] - wanted.square().sum()) <= 4 * epsilon * wanted.square().sum()
    assert abs(found[module.TOTAL] - wanted.sum()) <= 4 * epsilon * wanted.sum()


def test_a_square_beyond_float64_is_infinite_and_its_element_is_not() -> None:
    found = grad_statistics([torch.tensor([1e200, -1.0], dtype=torch.float64)])[0]
    assert found.tolist() == [2.0, 1e200 - 1.0, math.inf, 1e200 + 1.0, 0.0, 0.0, 1e200]


def test_other_devices_take_the_same_sums_without_a_look_at_them() -> None:
    """By the path of a device without Triton, whose operations the CPU has as well."""
    tensor = noise(5000)
    tensor[[1, 2, 3]] = torch.tensor([math.nan, -math.inf, 0.0])
    assert_sums(module._row_on_device(tensor)[None], [tensor])
    assert_sums(module._row_on_device(torch.zeros(0))[None], [torch.zeros(0)])


def test_nothing_has_no_rows() -> None:
    assert grad_statistics([]).shape == (0, NUM_COLUMNS)


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tensors holds a tensor of torch.int64. Give floating or complex ones"):
        grad_statistics([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"tensors lie on cpu and meta. Give those of one device at a time"):
        grad_statistics([torch.ones(2), torch.ones(2, device="meta")])


def test_compiler_keeps_the_operation_whole() -> None:
    tensors = [noise(33, 5), noise(7, dtype=torch.bfloat16)]
    torch.library.opcheck(torch.ops.moeclip.grad_statistics.default, (tensors,))
    compiled = torch.compile(lambda *given: 2 * grad_statistics(given), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), 2 * grad_statistics(tensors))
