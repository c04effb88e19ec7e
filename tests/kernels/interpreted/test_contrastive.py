"""Triton's tiles of the losses over pairs, interpreted, against whole matrices in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning_moeclip.kernels import contrastive, contrastive_tiles, contrastive_triton
from lightning_moeclip.kernels.contrastive_triton import Tile
from torch import Tensor

from tests.kernels import dense_pairs
from tests.kernels.dense_pairs import Batch, assert_within_twice_plain

SMALL = Tile(rows=32, columns=16, step=16, warps=4, stages=1)
WIDE = Tile(rows=16, columns=64, step=32, warps=4, stages=1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# samples, width, own rows, columns at a time, tile: ragged edges, tiles and chunks without pairs
CASES = [
    (1, 1, slice(None), 4096, SMALL),
    (33, 17, slice(32, 33), 4096, WIDE),
    (67, 40, slice(21, 58), 25, SMALL),
    (64, 32, slice(None), 32, SMALL),
]
LARGE = (200, 512, slice(60, 190), 4096, None)
IDS = ["one", "one-row", "ragged", "even"]


def clip(batch: Batch, chunk_size: int, tile: Tile | None, a: float, b: Tensor) -> tuple[Tensor, ...]:
    """Statistics and then gradients; the rows of other ranks add what they are in float64 to the columns."""
    place = (batch.own.start, chunk_size)
    found = contrastive_triton.clip_statistics(*batch.arguments, *place, tile=tile)
    by_column = torch.logaddexp(found[1], dense_pairs.columns_of_others(batch.to(torch.float64)))
    sums = (found[0], by_column, torch.tensor(a, dtype=torch.float64), b)
    gradients = contrastive_triton.clip_gradients(*batch.arguments, *sums, *place, True, True, True, True, tile=tile)
    return (*found, *gradients)


def sigmoid(batch: Batch, chunk_size: int, tile: Tile | None, a: float) -> tuple[Tensor, ...]:
    arguments, place = (*batch.arguments, batch.bias), (batch.own.start, chunk_size)
    total = contrastive_triton.sigmoid_statistics(*arguments, *place, tile=tile)
    needs = (True,) * 5
    return (total, *contrastive_triton.sigmoid_gradients(*arguments, torch.tensor(a), *place, *needs, tile=tile))


def check_clip(num: int, dim: int, own: slice, chunk_size: int, tile: Tile | None, dtype: torch.dtype, **how) -> None:
    batch = Batch.make(num, dim, own=own, dtype=dtype, **how)
    a, b = 0.5 / num, torch.linspace(0.25, 1, num, dtype=torch.float64) / num  # ranks scale their losses differently
    ours = clip(batch, chunk_size, tile, a, b)
    plain, truth = (
        (*dense_pairs.statistics(x), *dense_pairs.clip_gradients(x, a, b)) for x in (batch, batch.to(torch.float64))
    )
    assert [x.dtype for x in ours] == [torch.float64] * 3 + [torch.float32] * 4 + [torch.float64]
    # one number that is a sum near 0 may be right by chance: the scale's is compared over many blocks of rows
    assert_within_twice_plain(ours[:-1], plain[:-1], truth[:-1], dtype=dtype)


def check_sigmoid(
    num: int, dim: int, own: slice, chunk_size: int, tile: Tile | None, dtype: torch.dtype, **how
) -> None:
    batch = Batch.make(num, dim, own=own, dtype=dtype, **how)
    ours = sigmoid(batch, chunk_size, tile, 1 / num)
    plain, truth = (
        (dense_pairs.sigmoid_sum(x), *dense_pairs.sigmoid_gradients(x, 1 / num))
        for x in (batch.to(dtype), batch.to(torch.float64))
    )
    # one number that is a sum near 0 may be right by chance: the scale's is compared over many blocks of rows
    assert_within_twice_plain(ours[:-1], plain[:-1], truth[:-1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_clip_errs_at_most_twice_as_much_as_the_plain_composition(case: tuple, dtype: torch.dtype) -> None:
    check_clip(*case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_sigmoid_errs_at_most_twice_as_much_as_the_plain_composition(case: tuple, dtype: torch.dtype) -> None:
    check_sigmoid(*case, dtype)


def test_tiles_of_the_gpu_and_a_scale_of_100_err_at_most_twice_as_much() -> None:
    check_clip(*LARGE, torch.float32, scale=100.0)
    check_clip(*LARGE, torch.bfloat16, scale=100.0)
    check_sigmoid(*LARGE, torch.float16, scale=100.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ["clip", "sigmoid"])
def test_the_gradient_of_the_scale_errs_at_most_twice_as_much_as_plain_float32(loss: str, dtype: torch.dtype) -> None:
    """As narrow as the features may be: G is summed before it is rounded for the products."""
    whole = Batch.make(67, 40, dtype=dtype, scale=100.0)
    by_row, by_column, _ = contrastive_triton.clip_statistics(*whole.arguments, 0, 25, tile=SMALL)
    a, b = torch.tensor(1 / 67, dtype=torch.float64), torch.linspace(0.25, 1, 67, dtype=torch.float64) / 67
    found: list[list[Tensor]] = [[], [], []]
    for first in range(0, 67, 7):
        own = slice(first, min(first + 7, 67))
        batch, place = replace(whole, own=own), (first, 25)
        if loss == "clip":
            sums, needs = (by_row[own], by_column, a, b), (False, False, False, True)
            ours = contrastive_triton.clip_gradients(*batch.arguments, *sums, *place, *needs, tile=SMALL)
            dense = [dense_pairs.clip_gradients(batch.to(x), a.item(), b) for x in (torch.float32, torch.float64)]
        else:
            needs = (False, False, False, False, True)
            ours = contrastive_triton.sigmoid_gradients(*batch.arguments, batch.bias, a, *place, *needs, tile=SMALL)
            dense = [dense_pairs.sigmoid_gradients(batch.to(x), a.item()) for x in (torch.float32, torch.float64)]
        assert [(x.shape, x.dtype) for x in ours] == [((), torch.float64)]
        for results, x in zip(found, (ours[0], dense[0][-1], dense[1][-1]), strict=True):
            results.append(x)
    assert_within_twice_plain(*((torch.stack(x),) for x in found), dtype=torch.float32)


def test_softplus_far_below_zero_keeps_its_digits() -> None:
    """exp(-20) = 2e-9 is lost beside 1 in float32."""
    check_sigmoid(40, 16, slice(None), 4096, SMALL, torch.float32, scale=1.0, bias=-20.0)


# numpy's word on a maximum of nothing but NaN
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("poisoned", ["image", "text"])
def test_non_finite_rows_spread_as_they_do_in_torch(poisoned: str, poison: float) -> None:
    batch = Batch.make(40, 16, own=slice(5, 30), dtype=torch.float32)
    getattr(batch, poisoned)[12, 3] = poison
    arguments, place = batch.arguments, (batch.own.start, 25)
    factor, factors = torch.tensor(0.1, dtype=torch.float64), torch.full((40,), 0.1, dtype=torch.float64)
    found: list[list[Tensor]] = [[], []]
    with np.errstate(all="ignore"):
        for results, by in zip(found, (contrastive_triton, contrastive_tiles), strict=True):
            tile = {"tile": SMALL} if by is contrastive_triton else {}
            by_row, by_column, positives = by.clip_statistics(*arguments, *place, **tile)
            sums = (by_row, by_column, factor, factors)
            needs = (True,) * 4
            results += [by_row, by_column, positives, *by.clip_gradients(*arguments, *sums, *place, *needs, **tile)]
            results.append(by.sigmoid_statistics(*arguments, batch.bias, *place, **tile))
            scalars, needs = (batch.bias, factor), (True,) * 5
            results += by.sigmoid_gradients(*arguments, *scalars, *place, *needs, **tile)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.isfinite(), y.isfinite())
    assert not any(x.isfinite().all() for x in found[0][:2])


def test_gradients_of_a_trained_model_are_not_lost_below_float16() -> None:
    """Pairs with a logit of 16 have a G of 1e-7, two of its smallest steps, and nothing else weighs more."""
    batch = Batch.make(30, 256, dtype=torch.float16, scale=40.0, bias=-24.0, alike=1.0)
    _, *ours = sigmoid(batch, 4096, SMALL, 1.0)
    truth = dense_pairs.sigmoid_gradients(batch.to(torch.float64), 1.0)
    for x, y in zip(ours, truth, strict=True):
        assert (x - y).norm() <= torch.finfo(torch.float16).eps * y.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_upstream_factor_of_any_size_scales_the_gradients_and_nothing_else(dtype: torch.dtype) -> None:
    """Loss scales and 1/N would take G out of float16 if it held them."""
    batch, ones = Batch.make(20, 16, dtype=dtype), torch.ones(20, dtype=torch.float64)
    _, *gradients = sigmoid(batch, 4096, SMALL, 1.0)
    expected = [*clip(batch, 4096, SMALL, 1.0, ones)[3:], *gradients]
    for factor in (2.0**20, 2.0**-40):
        _, *gradients = sigmoid(batch, 4096, SMALL, factor)
        got = [*clip(batch, 4096, SMALL, factor, factor * ones)[3:], *gradients]
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x, factor * y)


def test_factors_that_are_no_numbers_reach_the_gradients() -> None:
    batch, ones = Batch.make(20, 16, dtype=torch.float16), torch.ones(20, dtype=torch.float64)
    with np.errstate(all="ignore"):
        for factor, is_it in ((torch.nan, torch.isnan), (torch.inf, lambda x: ~x.isfinite())):
            gradients = clip(batch, 4096, SMALL, factor, factor * ones)[3:5] + sigmoid(batch, 4096, SMALL, factor)[1:3]
            assert all(is_it(x).all() for x in gradients)
        one_of_them = torch.where(torch.arange(20) == 3, torch.inf, ones)
        text = clip(batch, 4096, SMALL, 1.0, one_of_them)[4]
    assert text.isfinite().all(1).logical_not().nonzero().tolist() == [[3]]
    gradients = clip(batch, 4096, SMALL, 0.0, 0 * ones)[3:] + sigmoid(batch, 4096, SMALL, 0.0)[1:]
    assert all(x.eq(0).all() for x in gradients)


def test_asking_for_halves_and_doing_it_again_changes_no_bit() -> None:
    batch, ones = Batch.make(40, 24, dtype=torch.bfloat16), torch.ones(40, dtype=torch.float64)
    first, again = (clip(batch, 25, SMALL, 1.0, ones) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    sums = (*contrastive_triton.clip_statistics(*batch.arguments, 0, 25, tile=SMALL)[:2], ones[0], ones)
    alone = contrastive_triton.clip_gradients(*batch.arguments, *sums, 0, 25, True, True, False, True, tile=SMALL)
    assert all(torch.equal(x, y) for x, y in zip(alone, (*first[3:5], first[7]), strict=True))
    assert not torch.equal(first[3], first[5])


def test_what_is_not_needed_is_not_computed_and_the_rest_stays_the_same() -> None:
    batch, ones = Batch.make(40, 16, dtype=torch.float32), torch.ones(40, dtype=torch.float64)
    sums = (*contrastive.clip_statistics(*batch.arguments)[:2], ones[0], ones)
    both = contrastive.clip_gradients(*batch.arguments, *sums)
    image, text = (
        contrastive.clip_gradients(*batch.arguments, *sums, needs_image=i, needs_text=not i) for i in (True, False)
    )
    assert torch.equal(image.image, both.image)
    assert torch.equal(text.text, both.text)
    assert (image.text, text.image, both.image_half, both.text_half) == (None, None, None, None)
    bias = contrastive.sigmoid_gradients(
        *batch.arguments, batch.bias, ones[0], needs_image=False, needs_text=False, needs_bias=True
    )
    assert bias.image is bias.text is bias.pull is None
    assert torch.equal(bias.bias, contrastive.sigmoid_gradients(*batch.arguments, batch.bias, ones[0]).bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operations_run_the_kernels_and_blocks_of_rows_make_the_whole(dtype: torch.dtype) -> None:
    batch = Batch.make(45, 16, dtype=dtype)
    whole = contrastive.clip_statistics(*batch.arguments)
    assert all(
        torch.equal(x, y)
        for x, y in zip(whole, contrastive_triton.clip_statistics(*batch.arguments, 0, 4096), strict=True)
    )
    blocks = [slice(0, 17), slice(17, 17), slice(17, 45)]
    found = [contrastive.clip_statistics(batch.image[x], batch.text, batch.scale, offset=x.start) for x in blocks]
    by_row, by_column, positives = zip(*found, strict=True)
    # sums of 45 terms in another order, each term right to a rounding of a logit of 14 in float32
    near = {"rtol": 0.0, "atol": 4e-6}
    torch.testing.assert_close(torch.cat(by_row), whole[0], **near)
    torch.testing.assert_close(torch.stack(by_column).logsumexp(0), whole[1], **near)
    torch.testing.assert_close(torch.cat(positives), whole[2], **near)


def test_images_and_texts_of_two_dtypes_meet_in_float32() -> None:
    batch = Batch.make(20, 16, dtype=torch.bfloat16)
    mixed = contrastive.clip_statistics(batch.image, batch.text.half(), batch.scale)
    same = contrastive.clip_statistics(batch.image.float(), batch.text.half().float(), batch.scale)
    assert all(torch.equal(x, y) for x, y in zip(mixed, same, strict=True))


def test_float64_and_empty_features_are_computed_by_torch() -> None:
    batch = Batch.make(20, 16)
    got = contrastive.clip_statistics(*batch.arguments)
    assert all(
        torch.equal(x, y)
        for x, y in zip(got, contrastive_tiles.clip_statistics(*batch.arguments, 0, 4096), strict=True)
    )
    by_row, by_column, positives = contrastive.clip_statistics(torch.ones(0, 3), torch.ones(2, 3), torch.ones(()))
    assert (by_row.shape, positives.shape, by_column.tolist()) == ((0,), (0,), [-torch.inf, -torch.inf])


def test_float32_enters_tensor_cores_as_three_products() -> None:
    found = {arch: contrastive_triton.input_precision(torch.float32, arch=arch) for arch in (80, 90, 100, 0)}
    assert found == {80: "tf32x3", 90: "tf32x3", 100: "tf32x3", 0: "ieee"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_of_a_gpu_fits_its_shared_memory(dtype: torch.dtype) -> None:
    for arch, available in ((80, 166912), (90, 232448), (100, 232448), (0, 65536)):
        for kernel in ("clip_statistics", "clip_gradient", "sigmoid"):
            tile = contrastive_triton.tile_for(kernel, dtype, arch=arch)
            stage = (tile.rows + tile.columns) * tile.step * dtype.itemsize
            assert stage * tile.stages <= available
