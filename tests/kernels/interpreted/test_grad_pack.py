"""The Triton source of packing and of sums, interpreted, against float64.

A program takes milliseconds here: tensors are of the sizes at which something changes. 1024 elements are a step of the
walk, 8192 a chunk, 16 the run below which loads are single.
"""

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from lightning_moeclip.kernels import grad_triton, reference
from lightning_moeclip.kernels.grad_pack import grad_pack
from lightning_moeclip.kernels.grad_statistics import NUM_COLUMNS, grad_statistics
from lightning_moeclip.kernels.grad_triton import PackPlan
from lightning_moeclip.kernels.grad_unpack import grad_unpack, unscale_
from torch import Tensor

from tests.kernels.test_grad_pack import bucket_of, factors_of
from tests.kernels.test_grad_statistics import assert_sums, noise

SHAPES = [(0,), (1,), (), (15,), (33, 65), (8192 + 17,)]
FACTORS = [0.5, 1.0 / 3.0, 1e-3, 1.0, 0.7, 1.0 / 7.0]
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ONE = torch.ones(())
PAIRS = [
    (FP32, FP32),
    (BF16, BF16),
    (FP16, FP16),
    (BF16, FP32),
    (FP32, FP16),
    (FP64, FP64),
    (torch.complex64, torch.complex64),
]


def assert_packed(places: list[Tensor], gradients: list[Tensor], factors: list[Tensor]) -> None:
    """Rounded once; to bfloat16 the interpreter cuts off instead, which is less than one unit in the last place."""
    for place, gradient, factor in zip(places, gradients, factors, strict=True):
        exact = reference.packed_gradient(gradient, factor).to(torch.promote_types(gradient.dtype, FP32))
        if place.dtype is BF16:
            assert ((place - exact).abs() <= torch.finfo(BF16).eps * exact.abs()).all()
        else:
            assert torch.equal(place, exact.to(place.dtype))


@pytest.mark.parametrize(("source", "place"), PAIRS)
def test_places_hold_the_product_and_their_sums(source: torch.dtype, place: torch.dtype) -> None:
    gradients = [noise(*shape, dtype=source, seed=seed) for seed, shape in enumerate(SHAPES)]
    gradients[4][::3] = 0
    factors = factors_of(FACTORS, source)
    # the parts of a bucket start anywhere: aligned ones and others
    flat, places = bucket_of(gradients, place)
    found = grad_pack(gradients, places, factors, with_statistics=True)
    assert found is not None
    assert not flat.isnan().any()
    assert_packed(places, gradients, factors)
    assert_sums(found, places)
    again = grad_pack(gradients, places, factors, with_statistics=True)
    assert again is not None
    assert again.equal(found)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_what_is_added_is_as_near_to_float64_as_by_plain_torch(dtype: torch.dtype) -> None:
    gradients = [noise(2000, dtype=dtype), noise(3, dtype=dtype)]
    before = [noise(2000, dtype=FP32, seed=1), noise(3, dtype=FP32, seed=1)]
    factors, places = factors_of([0.3, 0.7], dtype), [tensor.clone() for tensor in before]
    assert grad_pack(gradients, places, factors, accumulates=True) is None
    for gradient, factor, place, old in zip(gradients, factors, places, before, strict=True):
        exact = reference.packed_gradient(gradient, factor, before=old)
        plain = old + gradient.float() * factor
        assert (place - exact).abs().sum() <= 2 * (plain - exact).abs().sum()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, which computes here
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_nonfinite_elements_are_written_through_and_in_no_sum(dtype: torch.dtype) -> None:
    gradient = noise(8192 + 20, dtype=dtype)
    # in a chunk, in its last elements and in the tail of the last chunk
    gradient[[0, 5, 8191, 8211]] = torch.tensor([math.nan, math.inf, -math.inf, math.nan], dtype=dtype)
    place = torch.zeros_like(gradient)
    found = grad_pack([gradient], [place], [torch.tensor(0.5)], with_statistics=True)
    assert found is not None
    assert place[[5, 8191]].tolist() == [math.inf, -math.inf]
    assert place[[0, 8211]].isnan().all()
    assert found.isfinite().all()
    assert found[0, 4] == 4
    assert_sums(found, [place])


def test_tensors_of_other_layouts_lie_where_their_indices_say() -> None:
    wave = noise(6, 5, dtype=torch.complex64)
    gradients = [noise(5, 7).T, noise(3, 1).expand(3, 4), wave.conj(), noise(8, 6)[:, ::2], noise(40)[1:]]
    places = [
        torch.zeros(7, 5),
        torch.zeros(4, 3).T,
        torch.zeros_like(wave),
        torch.zeros(8, 6)[:, ::2],
        torch.zeros(39),
    ]
    factors = [torch.tensor(2.0)] * 5
    found = grad_pack(gradients, places, factors, with_statistics=True)
    assert found is not None
    assert all(torch.equal(place, 2 * gradient) for place, gradient in zip(places, gradients, strict=True))
    assert_sums(found, places)
    assert_sums(grad_statistics(gradients), gradients)
    own = [tensor.clone() for tensor in gradients[:1]] + [noise(4, 6)[:, ::2], wave.conj()]
    wanted = [2 * tensor for tensor in own]
    grad_pack(own, own, factors[:3])
    assert all(torch.equal(tensor, value) for tensor, value in zip(own, wanted, strict=True))


def test_mates_have_their_dot_product_and_square() -> None:
    gradients = [noise(91, 91), noise(5), noise(6, dtype=BF16), noise(4, dtype=torch.complex64), noise(8, 2).T]
    mates = [noise(91, 91, seed=1), None, noise(6, dtype=BF16, seed=1), gradients[3].conj(), noise(2, 8)]
    gradients[0][3, 1], mates[0][2, 0] = math.inf, math.nan
    places = [torch.empty_like(gradient) for gradient in gradients]
    found = grad_pack(gradients, places, [torch.tensor(0.7)] * 5, with_statistics=True, mates=mates)
    assert found is not None
    assert_sums(found[:, :NUM_COLUMNS], places)
    for row, place, mate in zip(found, places, mates, strict=True):
        wanted = torch.zeros(2) if mate is None else reference.mate_sums(place, mate)
        torch.testing.assert_close(row[NUM_COLUMNS:], wanted.double(), rtol=1e-13, atol=1e-13)


def test_a_tensor_of_many_chunks_is_folded_whole() -> None:
    """More rows than the fold takes at once."""
    rows = torch.ones(600, 8, dtype=FP64)
    rows[:, 0], rows[599, 6], rows[:, 7] = torch.arange(600), 5.0, 0.0
    table = torch.full((2, NUM_COLUMNS), math.nan, dtype=FP64)
    first_rows, targets = torch.tensor([0, 0, 600]), torch.tensor([1, 0])
    grad_triton.fold(grad_triton.Options(with_sums=True), rows, first_rows, targets, table)
    assert table.tolist() == [[599 * 300.0, 600.0, 600.0, 600.0, 600.0, 600.0, 5.0], [0.0] * 7]


def test_each_chunk_finds_its_tensor_among_more_than_256() -> None:
    """A search of 8 steps would end too early; most are empty, one has a second chunk, two are of another kind."""
    sizes = {0: 3, 1: 1, 128: 8192 + 3, 255: 2, 256: 1, 301: 7, 302: 4, 513: 5}
    tensors = [torch.full((sizes.get(i, 0),), i + 1.0, dtype=FP64 if i in (1, 256) else FP32) for i in range(514)]
    found = grad_statistics(tensors)
    assert found[:, 0].tolist() == [len(x) for x in tensors]
    assert found[:, 1].tolist() == [len(x) * (i + 1.0) for i, x in enumerate(tensors)]


def test_nothing_is_kept_of_sizes_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Size] = []
    copy = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, *a, **k: copies.append(self.shape) or copy(self, *a, **k))
    monkeypatch.setattr(Tensor, "to", None)  # which would wait for a GPU
    kept = {name: id(value) for name, value in vars(grad_triton).items()}
    for size in (1, 20000, 100000):
        grad_statistics([torch.ones(size)])
    # the tables of one tensor, whatever its size
    assert copies == [(8, 2)] * 3
    assert kept == {name: id(value) for name, value in vars(grad_triton).items()}


def test_one_place_given_twice_is_refused_before_anything_is_written() -> None:
    gradient, place, one = torch.ones(3), torch.zeros(3), ONE
    with pytest.raises(ValueError, match=r"Two gradients have the same place.*Give each place once per call"):
        grad_pack([gradient] * 2, [place] * 2, [one] * 2, accumulates=True)
    with pytest.raises(ValueError, match="Two gradients have the same place"):
        unscale_([gradient, gradient], one)
    assert place.tolist() == [0.0] * 3
    assert gradient.tolist() == [1.0] * 3
    # nothing is written to empty ones, wherever they lie, and what is only read may come twice
    empty = [place[:0], place[:0], place]
    grad_pack([gradient[:0], gradient[:0], gradient], empty, [one] * 3)
    assert grad_statistics([gradient, gradient])[:, 1].tolist() == [3.0, 3.0]


def test_a_capture_is_refused_for_what_a_replay_would_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    assert grad_triton._is_capturing(torch.device("cuda"))
    monkeypatch.setattr(grad_triton, "_is_capturing", lambda _: True)
    x = [torch.ones(3)]
    calls: list[Callable[[], object]] = [
        lambda: grad_pack(x, x, [ONE]),
        lambda: grad_unpack(x, x, ONE),
        lambda: unscale_(x, ONE),
        lambda: grad_statistics(x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"A CUDA graph is being captured.*Capture PackPlan.launch"):
            call()
    plan = PackPlan(x)
    plan.load(x, [ONE])
    assert plan.launch() is None


def test_a_plan_writes_to_its_places_what_was_loaded_last() -> None:
    flat = torch.zeros(200)
    places = [flat[:64].view(8, 8), flat[64:65], flat[65:65], flat[65:]]
    plan = PackPlan(places, dtypes=[FP32, BF16, FP32, FP32], with_statistics=True, with_mates=True)
    table = plan.table
    for seed in range(2):
        # of other strides, and at another distance from a multiple of 16 bytes than its place
        gradients = [noise(8, 8, seed=seed).T, noise(1, dtype=BF16), torch.zeros(0), noise(136, seed=seed)[1:]]
        mates = [noise(8, 8, seed=9), None, None, noise(135, seed=9)]
        factors = factors_of([0.5, 0.25, 1.0, 0.3 + seed], FP32)
        plan.load(gradients, factors, mates=mates if seed == 0 else None)
        for _ in range(2):
            flat.fill_(math.nan)
            assert plan.launch() is table
            assert not flat.isnan().any()
            assert_packed(places, gradients, factors)
            assert table is not None
            assert_sums(table[:, :NUM_COLUMNS], places)
        wanted = [
            reference.mate_sums(p, m) if m is not None and seed == 0 else torch.zeros(2)
            for p, m in zip(places, mates, strict=True)
        ]
        torch.testing.assert_close(table[:, NUM_COLUMNS:], torch.stack(wanted).double(), rtol=1e-13, atol=1e-13)
    plan.release()


def test_only_a_gradient_at_a_worse_address_than_its_place_is_copied() -> None:
    """The interpreter reads from any address: on a GPU, wide loads need multiples of 16 bytes."""
    gradient, flat = noise(41)[1:], torch.zeros(44)
    for place, is_copied in ((flat[4:], True), (flat[1:41], False)):
        plan = PackPlan([place])
        plan.load([gradient], factors_of([1.0], FP32))
        address = int(plan._walk._tables.sources[0])
        assert (address == gradient.data_ptr()) != is_copied
        assert address % 16 == 0 or not is_copied
        plan.launch()
        assert torch.equal(place, gradient)


def test_a_plan_refuses_what_it_was_not_laid_out_for() -> None:
    plan = PackPlan([torch.zeros(3)])
    with pytest.raises(AssertionError, match="of the dtype that was laid out"):
        plan.load([torch.zeros(3, dtype=BF16)], factors_of([1.0], FP32))
    with pytest.raises(AssertionError, match="of the dtype that was laid out"):
        plan.load([torch.zeros(3)], factors_of([1.0], FP64))
    with pytest.raises(AssertionError, match="of the shape that was laid out"):
        plan.load([torch.zeros(1, 3)], factors_of([1.0], FP32))
    with pytest.raises(AssertionError, match="places fill memory without holes"):
        PackPlan([torch.zeros(4, 4)[:, ::2]])
    with pytest.raises(AssertionError, match="mates are for the statistics"):
        PackPlan([torch.zeros(3)], with_mates=True)
