"""Packing against float64, by torch: the product rounded once, sums of what was written, errors before any write."""

import math

import pytest
import torch
from lightning_moeclip.kernels import reference
from lightning_moeclip.kernels.grad_pack import grad_pack
from lightning_moeclip.kernels.grad_statistics import NUM_COLUMNS, grad_statistics
from torch import Tensor

from tests.kernels.test_grad_statistics import assert_sums, noise

SHAPES = [(0,), (1,), (), (17,), (33, 65), (70_001,)]
FACTORS = [0.5, 1.0 / 3.0, 1e-3, 1.0, 0.7, 1.0 / 7.0]
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PAIRS = [
    (FP32, FP32),
    (BF16, BF16),
    (FP16, FP16),
    (BF16, FP32),
    (FP16, BF16),
    (FP32, BF16),
    (FP64, FP64),
    (torch.complex64, torch.complex64),
    (torch.complex128, torch.complex128),
]


def factors_of(values: list[float], dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(value, dtype=FP64 if dtype.to_real() is FP64 else FP32) for value in values]


def bucket_of(gradients: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A flat buffer that nothing of may stay as it was, and its parts."""
    flat = torch.full((sum(g.numel() for g in gradients),), math.nan, dtype=dtype)
    parts = flat.split([g.numel() for g in gradients])
    return flat, [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]


@pytest.mark.parametrize(("source", "place"), PAIRS)
@pytest.mark.parametrize("with_statistics", [False, True])
def test_places_hold_the_product_rounded_once(source: torch.dtype, place: torch.dtype, with_statistics: bool) -> None:
    gradients = [noise(*shape, dtype=source, seed=seed) for seed, shape in enumerate(SHAPES)]
    factors = factors_of(FACTORS, source)
    flat, places = bucket_of(gradients, place)
    found = grad_pack(gradients, places, factors, with_statistics=with_statistics)
    for gradient, factor, packed in zip(gradients, factors, places, strict=True):
        # the product of two float32 numbers is exact in float64
        exact = reference.packed_gradient(gradient, factor)
        wide = torch.promote_types(source, FP32)
        assert torch.equal(packed, exact.to(wide).to(place))
    assert not flat.isnan().any()
    if found is not None:
        assert_sums(found, places)
    assert (found is not None) == with_statistics


@pytest.mark.parametrize(("source", "place"), PAIRS)
def test_what_is_added_is_as_near_to_float64_as_by_plain_torch(source: torch.dtype, place: torch.dtype) -> None:
    gradients = [noise(*shape, dtype=source, seed=seed) for seed, shape in enumerate(SHAPES)]
    factors = factors_of(FACTORS, source)
    before = [noise(*shape, dtype=place, seed=9) for shape in SHAPES]
    places = [tensor.clone() for tensor in before]
    found = grad_pack(gradients, places, factors, accumulates=True, with_statistics=True)
    assert found is not None
    assert_sums(found, places)
    for gradient, factor, packed, old in zip(gradients, factors, places, before, strict=True):
        exact = reference.packed_gradient(gradient, factor, before=old)
        plain = old + (gradient * factor).to(place)
        # the truth rounds, too: the product and the sum by half an epsilon of float64 each
        rounding = torch.finfo(FP64).eps * (exact.abs() + old.abs()).sum()
        assert (packed - exact).abs().sum() <= 2 * (plain - exact).abs().sum() + rounding


def test_places_may_be_the_gradients() -> None:
    gradients = [noise(5, 7).T, noise(3, dtype=BF16), noise(4, 6)[:, ::2], noise(3, dtype=torch.complex64).conj()]
    wanted = [0.3 * gradient for gradient in gradients]
    found = grad_pack(gradients, gradients, [torch.tensor(0.3)] * 4, with_statistics=True)
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, wanted, strict=True))
    assert found is not None
    assert_sums(found, gradients)


def test_a_gradient_of_other_strides_than_its_place_lies_where_its_indices_say() -> None:
    image = noise(2, 3, 5, 5).to(memory_format=torch.channels_last)
    gradients = [noise(5, 7).T, image, image.contiguous(), noise(3, 1).expand(3, 4), noise(6).requires_grad_()]
    places = [torch.zeros(7, 5), torch.zeros(2, 3, 5, 5), torch.zeros_like(image), torch.zeros(3, 4), torch.zeros(6)]
    found = grad_pack(gradients, places, [torch.tensor(2.0)] * 5, with_statistics=True)
    assert all(torch.equal(place, 2 * gradient) for place, gradient in zip(places, gradients, strict=True))
    assert found is not None
    assert_sums(found, places)
    for place in places:
        place.fill_(math.nan)
    assert grad_pack(gradients, places, [torch.tensor(2.0)] * 5) is None
    assert all(torch.equal(place, 2 * gradient) for place, gradient in zip(places, gradients, strict=True))


def test_nonfinite_elements_are_written_through_and_in_no_sum() -> None:
    gradient = noise(100_000)
    gradient[[0, 5, 99_999]] = torch.tensor([math.nan, math.inf, -math.inf])
    gradient[7] = 3e38  # beyond float32 after the product
    place = torch.zeros(100_000)
    found = grad_pack([gradient], [place], [torch.tensor(2.0)], with_statistics=True)
    assert place[[5, 7, 99_999]].tolist() == [math.inf, math.inf, -math.inf]
    assert place[0].isnan()
    assert found is not None
    assert found.isfinite().all()
    assert_sums(found, [place])


def test_mates_have_their_dot_product_and_square() -> None:
    gradients = [noise(70, 3), noise(5), noise(6, dtype=BF16), noise(4, dtype=torch.complex64), noise(8, 2).T]
    mates = [noise(70, 3, seed=1), None, noise(6, dtype=BF16, seed=1), gradients[3].conj(), noise(2, 8)]
    gradients[0][3, 1], mates[0][2, 0] = math.inf, math.nan
    places = [torch.empty_like(gradient) for gradient in gradients]
    found = grad_pack(gradients, places, [torch.tensor(0.7)] * 5, with_statistics=True, mates=mates)
    assert found is not None
    assert found.shape == (5, NUM_COLUMNS + 2)
    assert torch.equal(found[:, :NUM_COLUMNS], grad_statistics(places))
    for row, place, mate in zip(found, places, mates, strict=True):
        wanted = torch.zeros(2) if mate is None else reference.mate_sums(place, mate)
        torch.testing.assert_close(row[NUM_COLUMNS:], wanted.double(), rtol=1e-13, atol=1e-13)


def test_nothing_has_no_rows() -> None:
    assert grad_pack([], [], []) is None
    found = grad_pack([], [], [], with_statistics=True, mates=[])
    assert found is not None
    assert found.shape == (0, NUM_COLUMNS + 2)


ONE = torch.ones(())
REFUSED = [
    (ValueError, "1 gradients, 2 places and 1 factors: give one of each", {"places": [torch.zeros(3)] * 2}),
    (ValueError, r"A gradient \[3\] has a place \[1, 3\]. Give places of its shape", {"places": [torch.zeros(1, 3)]}),
    (ValueError, r"A factor has shape \[1\]. Give a 0-d tensor", {"factors": [torch.ones(1)]}),
    (TypeError, "A factor is torch.bfloat16. Give float32, or float64", {"factors": [ONE.bfloat16()]}),
    (TypeError, "gradients holds a tensor of torch.int64", {"gradients": [torch.ones(3, dtype=torch.int64)]}),
    (TypeError, "places holds a tensor of torch.bool", {"places": [torch.ones(3, dtype=torch.bool)]}),
    (
        TypeError,
        "A torch.float32 gradient has a torch.complex64 place. Give complex places to complex gradients alone",
        {"places": [torch.zeros(3, dtype=torch.complex64)]},
    ),
    (ValueError, "Gradients and places lie on cpu, cpu and meta", {"places": [torch.zeros(3, device="meta")]}),
    (ValueError, "A factor lies on meta, its gradient on cpu", {"factors": [torch.ones((), device="meta")]}),
    (ValueError, "mates do nothing without with_statistics=True", {"mates": [None]}),
    (ValueError, "1 gradients and 2 mates", {"mates": [None, None], "with_statistics": True}),
    (
        ValueError,
        r"A gradient \[3\] of torch.float32 on cpu has a mate \[3\] of torch.float64 on cpu. Give a mate of the same",
        {"mates": [torch.ones(3, dtype=torch.float64)], "with_statistics": True},
    ),
]


@pytest.mark.parametrize(("error", "message", "given"), REFUSED)
def test_what_does_not_fit_is_refused(error: type[Exception], message: str, given: dict[str, object]) -> None:
    arguments = {"gradients": [torch.ones(3)], "places": [torch.zeros(3)], "factors": [ONE], **given}
    with pytest.raises(error, match=message):
        grad_pack(**arguments)


def test_nothing_is_written_when_one_of_many_does_not_fit() -> None:
    places = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(ValueError, match=r"A gradient \[5\] has a place \[4\]"):
        grad_pack([torch.ones(3), torch.ones(5)], places, [ONE, ONE])
    assert places[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("accumulates", "with_statistics", "has_mates"), [(False, False, False), (True, True, True)])
def test_compiler_keeps_the_operation_whole(accumulates: bool, with_statistics: bool, has_mates: bool) -> None:
    gradients, factors = [noise(3, 4), noise(5)], factors_of([0.5, 0.3], FP32)
    mates = [None, noise(5)] if has_mates else None

    def step(*given: Tensor) -> tuple[Tensor | None, Tensor]:
        flat = torch.ones(17)
        places = [flat[:12].view(3, 4), flat[12:]]
        found = grad_pack(given, places, factors, accumulates=accumulates, with_statistics=with_statistics, mates=mates)
        return found, 2 * flat

    wanted = step(*gradients)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*gradients)
    assert torch.equal(got[1], wanted[1])
    assert got[0] is wanted[0] is None or torch.equal(got[0], wanted[0])
    places = [torch.zeros(3, 4), torch.zeros(5)]
    arguments = (gradients, places, factors, accumulates, with_statistics, mates)
    torch.library.opcheck(torch.ops.moeclip.grad_pack.default, arguments)
