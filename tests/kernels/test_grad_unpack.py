"""Unpacking and unscaling against float64, by torch."""

import math

import pytest
import torch
from lightning_moeclip.kernels import reference
from lightning_moeclip.kernels.grad_pack import grad_pack
from lightning_moeclip.kernels.grad_statistics import NUM_COLUMNS, grad_statistics
from lightning_moeclip.kernels.grad_unpack import grad_unpack, unscale_

from tests.kernels.test_grad_pack import PAIRS, SHAPES, factors_of
from tests.kernels.test_grad_statistics import assert_sums, noise

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ONE = torch.ones(())


@pytest.mark.parametrize(("source", "place"), PAIRS)
def test_gradients_hold_the_product_rounded_once_and_their_residual(source: torch.dtype, place: torch.dtype) -> None:
    sources = [noise(*shape, dtype=source, seed=seed) for seed, shape in enumerate(SHAPES)]
    before = [noise(*shape, dtype=place, seed=9) for shape in SHAPES]
    (coefficient,) = factors_of([1.0 / 3.0], source)
    gradients = [tensor.clone() for tensor in before]
    found = grad_unpack(sources, gradients, coefficient, with_residual=True)
    assert found is not None
    assert_sums(found[:, :NUM_COLUMNS], gradients)
    for row, tensor, old, new in zip(found, sources, before, gradients, strict=True):
        exact = reference.packed_gradient(tensor, coefficient)
        assert torch.equal(new, exact.to(torch.promote_types(source, FP32)).to(place))
        wanted = reference.residual_sums(tensor, old)
        torch.testing.assert_close(row[NUM_COLUMNS:], wanted, rtol=1e-13, atol=0)


def test_gradients_may_be_the_sources() -> None:
    gradients = [noise(5, 7).T, noise(4, 6)[:, ::2], noise(3, dtype=BF16)]
    wanted = [0.3 * gradient for gradient in gradients]
    assert grad_unpack(gradients, gradients, torch.tensor(0.3)) is None
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, wanted, strict=True))


def test_residual_leaves_out_what_is_not_finite() -> None:
    source, gradient = noise(9), noise(3, 3, seed=1).T
    source, before = source.view(3, 3), gradient.clone()
    source[0, 0], gradient[0, 1], before[0, 1] = math.inf, math.nan, math.nan
    found = grad_unpack([source], [gradient], ONE, with_residual=True)
    assert found is not None
    torch.testing.assert_close(found[0, NUM_COLUMNS:], reference.residual_sums(source, before), rtol=1e-14, atol=0)
    assert gradient[0, 0] == math.inf


REFUSED = [
    (ValueError, "1 sources and 2 gradients: give one for each", {"gradients": [torch.zeros(3)] * 2}),
    (ValueError, r"A source \[3\] has a gradient \[4\]. Give gradients of its shape", {"gradients": [torch.zeros(4)]}),
    (ValueError, r"coefficient has shape \[1\]. Give a 0-d tensor", {"coefficient": torch.ones(1)}),
    (TypeError, "coefficient is torch.float16. Give float32 or float64", {"coefficient": ONE.half()}),
    (ValueError, "coefficient lies on meta, the gradients on cpu", {"coefficient": torch.ones((), device="meta")}),
    (TypeError, "sources holds a tensor of torch.int32", {"sources": [torch.ones(3, dtype=torch.int32)]}),
    (TypeError, "gradients holds a tensor of torch.int32", {"gradients": [torch.ones(3, dtype=torch.int32)]}),
    (
        TypeError,
        "A torch.complex64 source has a torch.float32 gradient. Give complex sources to complex gradients alone",
        {"sources": [torch.zeros(3, dtype=torch.complex64)]},
    ),
    (ValueError, "Sources and gradients lie on cpu, meta and cpu", {"sources": [torch.zeros(3, device="meta")]}),
]


@pytest.mark.parametrize(("error", "message", "given"), REFUSED)
def test_what_does_not_fit_is_refused(error: type[Exception], message: str, given: dict[str, object]) -> None:
    arguments = {"sources": [torch.ones(3)], "gradients": [torch.zeros(3)], "coefficient": ONE, **given}
    with pytest.raises(error, match=message):
        grad_unpack(**arguments)


@pytest.mark.parametrize("inv_scale", [torch.tensor(2.0**-10), torch.tensor([2.0**-10])])
@pytest.mark.parametrize("counts_zeros", [False, True])
def test_unscaled_gradients_are_multiplied_and_counted(inv_scale: torch.Tensor, counts_zeros: bool) -> None:
    gradients = [noise(50), noise(5, 7).T, noise(33, dtype=FP16), noise(4, dtype=torch.complex64), noise(3, dtype=FP64)]
    # of several blocks, with zeros in all of them; and one in which every element counts
    gradients += [noise(300, 701).relu().T, torch.zeros(2**16 + 1)]
    gradients[2][3] = 2**-20  # vanishes
    gradients[0][:4] = 0.0
    wanted = [(2.0**-10 * gradient.to(torch.promote_types(gradient.dtype, FP64))) for gradient in gradients]
    wanted = [value.to(gradient.dtype) for value, gradient in zip(wanted, gradients, strict=True)]
    found = unscale_(gradients, inv_scale, counts_zeros=counts_zeros)
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, wanted, strict=True))
    assert found.dtype is FP64
    num_zeros = sum(int((torch.view_as_real(g) if g.is_complex() else g).eq(0).sum()) for g in wanted)
    assert num_zeros >= 65_542
    assert found.tolist() == (
        [0.0, num_zeros, 50 + 35 + 33 + 8 + 3 + 210_300 + 65_537] if counts_zeros else [0.0, 0.0, 0.0]
    )


def test_what_overflows_by_the_factor_was_finite() -> None:
    gradient = torch.tensor([3e38, 0.0, 1.0])
    assert unscale_([gradient], torch.tensor(4.0), counts_zeros=True).tolist() == [0.0, 1.0, 3.0]
    assert gradient.tolist() == [math.inf, 0.0, 4.0]
    assert unscale_([gradient], torch.tensor(0.5)).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_marked_conjugates_and_negatives_are_unscaled_and_counted(dtype: torch.dtype) -> None:
    wave = noise(3, dtype=dtype)
    wave[1] = 0.0
    gradients = [wave.clone().conj(), wave.clone().conj().imag, wave.clone()]
    wanted = [0.5 * wave.conj(), -0.5 * wave.imag, 0.5 * wave]
    assert unscale_(gradients, torch.tensor(0.5), counts_zeros=True).tolist() == [0.0, 2 + 1 + 2, 6 + 3 + 6]
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_element_that_is_not_finite_is_found(planted: float, index: int) -> None:
    gradients = [noise(50), noise(7, dtype=BF16), noise(2, dtype=torch.complex64)]
    gradients[index][1] = planted
    assert unscale_(gradients, ONE)[0] > 0


def test_no_gradients_have_nothing_that_is_not_finite() -> None:
    assert unscale_([], ONE, counts_zeros=True).tolist() == [0.0, 0.0, 0.0]
    assert unscale_([torch.zeros(0)], ONE, counts_zeros=True).tolist() == [0.0, 0.0, 0.0]


NOT_UNSCALED = [
    (TypeError, "inv_scale is torch.float64. Give float32", [torch.ones(3)], ONE.double()),
    (ValueError, r"inv_scale has shape \[2\]. Give one number", [torch.ones(3)], torch.ones(2)),
    (ValueError, "inv_scale lies on meta, no gradient does", [torch.ones(3)], torch.ones((), device="meta")),
    (TypeError, "gradients holds a tensor of torch.int64", [torch.ones(3, dtype=torch.int64)], ONE),
    (ValueError, r"gradients lie on \['cpu', 'meta'\]", [torch.ones(3), torch.ones(3, device="meta")], ONE),
]


@pytest.mark.parametrize(("error", "message", "gradients", "inv_scale"), NOT_UNSCALED)
def test_what_cannot_be_unscaled_is_refused(
    error: type[Exception], message: str, gradients: list[torch.Tensor], inv_scale: torch.Tensor
) -> None:
    with pytest.raises(error, match=message):
        unscale_(gradients, inv_scale)


def test_compiler_keeps_the_operations_whole() -> None:
    sources, coefficient = [noise(3, 4), noise(5, dtype=BF16)], torch.tensor(0.3)

    def step(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.ones(3, 4), torch.ones(5)]
        none = grad_unpack([first, second], gradients, coefficient)
        found = grad_unpack(gradients, gradients, coefficient, with_residual=True)
        counts = unscale_(gradients, coefficient, counts_zeros=True)
        return none, found, counts, *gradients

    wanted = step(*sources)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*sources)
    assert got[0] is wanted[0] is None
    assert all(torch.equal(one, other) for one, other in zip(got[1:], wanted[1:], strict=True))
    ops, gradients = torch.ops.moeclip, [torch.zeros(3, 4), torch.zeros(5)]
    for asks in (False, True):
        torch.library.opcheck(ops.grad_unpack.default, (sources, gradients, coefficient, asks, asks))
        torch.library.opcheck(ops.unscale_.default, (gradients, coefficient, asks))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # by the compiler
def test_compiler_takes_lists_of_none() -> None:
    """Whole and by the compiler that makes code, which has nothing to make it from."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed = grad_pack([], [], [], with_statistics=True, mates=[])
        unpacked = grad_unpack([], [], ONE, with_residual=True)
        return x + 1, grad_pack([], [], []), packed, unpacked, grad_statistics([]), unscale_([], ONE)

    wanted = step(ONE)
    got = torch.compile(step, fullgraph=True)(ONE)
    assert got[1] is wanted[1] is None
    assert [x.shape for x in got if x is not None] == [x.shape for x in wanted if x is not None]
    assert got[-1].tolist() == [0.0, 0.0, 0.0]
