"""The operations on pairs against the whole matrices and the dense losses of one process, in float64; by torch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from lightning_moeclip.kernels import contrastive, contrastive_tiles, reference
from torch import Tensor

from tests.kernels import dense_pairs
from tests.kernels.dense_pairs import Batch, assert_within_twice_plain

NUM, DIM = 37, 11
ONES = torch.ones(NUM, dtype=torch.float64)
OWN = [slice(None), slice(0, 1), slice(36, 37), slice(9, 30), slice(20, 20)]


@pytest.fixture(params=[2**23, 60], ids=["tiles-of-columns", "tiles-of-rows"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive_tiles, "_CPU_NUMEL", request.param)


def assert_near(got: tuple, expected: tuple) -> None:
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("chunk_size", [1, 10, 4096])
@pytest.mark.parametrize("own", OWN)
def test_clip_of_own_rows_is_that_of_the_whole_matrix(own: slice, chunk_size: int) -> None:
    batch = Batch.make(NUM, DIM, own=own)
    place = {"offset": batch.own.start, "chunk_size": chunk_size}
    found = contrastive.clip_statistics(*batch.arguments, **place)
    assert_near(found, dense_pairs.statistics(batch))
    b = torch.linspace(0.5, 2, NUM, dtype=torch.float64)
    by_column = torch.logaddexp(found[1], dense_pairs.columns_of_others(batch))
    gradients = contrastive.clip_gradients(
        *batch.arguments, found[0], by_column, 0.3 * ONES[0], b, **place, needs_halves=True, needs_log_scale=True
    )
    assert_near(gradients, dense_pairs.clip_gradients(batch, 0.3, b))


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("chunk_size", [1, 10, 4096])
@pytest.mark.parametrize("own", OWN)
def test_sigmoid_of_own_rows_is_that_of_the_whole_matrix(own: slice, chunk_size: int) -> None:
    batch = Batch.make(NUM, DIM, own=own)
    arguments, place = (*batch.arguments, batch.bias), {"offset": batch.own.start, "chunk_size": chunk_size}
    assert_near((contrastive.sigmoid_statistics(*arguments, **place),), (dense_pairs.sigmoid_sum(batch),))
    gradients = contrastive.sigmoid_gradients(*arguments, 0.3 * ONES[0], **place, needs_pull=True, needs_log_scale=True)
    assert_near(gradients, dense_pairs.sigmoid_gradients(batch, 0.3))


def test_all_rows_give_the_dense_losses_and_their_gradients() -> None:
    batch = Batch.make(NUM, DIM)
    leaves = [x.double().requires_grad_() for x in (batch.image, batch.text, batch.scale.double().log(), batch.bias)]
    image, text, scale = batch.image, batch.text, leaves[2].detach().exp()

    by_row, by_column, positives = contrastive.clip_statistics(image, text, scale)
    loss = reference.contrastive_loss(*leaves[:3])
    assert_near(((by_row + by_column - 2 * positives).sum() / (2 * NUM),), (loss.detach(),))
    factors = (ONES[0] / (2 * NUM), ONES / (2 * NUM))
    found = contrastive.clip_gradients(image, text, scale, by_row, by_column, *factors, needs_log_scale=True)
    assert_near((found.image, found.text, found.log_scale), torch.autograd.grad(loss, leaves[:3]))

    loss = reference.sigmoid_loss(*leaves)
    assert_near((contrastive.sigmoid_statistics(image, text, scale, leaves[3]) / NUM,), (loss.detach(),))
    sent = contrastive.sigmoid_gradients(image, text, scale, leaves[3], ONES[0] / NUM, needs_log_scale=True)
    assert_near((sent.image, sent.text, sent.log_scale, sent.bias), torch.autograd.grad(loss, leaves))


def test_what_is_not_needed_is_none_and_the_rest_stays_the_same() -> None:
    batch = Batch.make(NUM, DIM)
    sums = (*contrastive.clip_statistics(*batch.arguments)[:2], ONES[0], ONES)
    whole = contrastive.clip_gradients(*batch.arguments, *sums, needs_halves=True)
    for i, names in enumerate([("text", "text_half"), ("image", "image_half")]):
        part = contrastive.clip_gradients(
            *batch.arguments, *sums, needs_image=i == 1, needs_text=i == 0, needs_halves=True
        )
        for name, x in part._asdict().items():
            assert torch.equal(x, getattr(whole, name)) if name in names else x is None
    for op, rest in ((contrastive.clip_gradients, sums), (contrastive.sigmoid_gradients, (batch.bias, ONES[0]))):
        call = partial(op, *batch.arguments, *rest, needs_log_scale=True)
        alone, by_text, by_image = (call(needs_image=i, needs_text=t) for i, t in ((0, 0), (0, 1), (1, 0)))
        assert alone.image is alone.text is by_text.image is by_image.text is None
        assert torch.equal(alone.log_scale, by_image.log_scale)
        assert_near((by_text.log_scale,), (by_image.log_scale,))
    bias = contrastive.sigmoid_gradients(*batch.arguments, batch.bias, ONES[0], needs_image=False, needs_text=False)
    assert (bias.image, bias.text, bias.pull, bias.log_scale) == (None,) * 4
    assert torch.equal(bias.bias, contrastive.sigmoid_gradients(*batch.arguments, batch.bias, ONES[0]).bias)


def test_uneven_blocks_of_rows_make_the_whole() -> None:
    batch = Batch.make(NUM, DIM)
    image, text, scale = batch.arguments
    blocks = [slice(0, 5), slice(5, 5), slice(5, 36), slice(36, 37)]
    factors = (0.3 * ONES[0], 0.3 * ONES)
    whole = contrastive.clip_statistics(image, text, scale)
    by_row, by_column, positives = zip(
        *(contrastive.clip_statistics(image[x], text, scale, offset=x.start) for x in blocks), strict=True
    )
    assert_near((torch.cat(by_row), torch.stack(by_column).logsumexp(0), torch.cat(positives)), whole)
    parts = [
        contrastive.clip_gradients(image[x], text, scale, whole[0][x], whole[1], *factors, offset=x.start)
        for x in blocks
    ]
    expected = contrastive.clip_gradients(image, text, scale, *whole[:2], *factors)
    assert_near((torch.cat([x.image for x in parts]), sum(x.text for x in parts)), expected[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_features_err_at_most_twice_as_much_as_the_plain_composition(dtype: torch.dtype) -> None:
    batch = Batch.make(NUM, DIM, dtype=dtype, scale=100.0)
    found = contrastive.clip_statistics(*batch.arguments)
    gradients = contrastive.clip_gradients(
        *batch.arguments, *found[:2], ONES[0], ONES, needs_halves=True, needs_log_scale=True
    )
    narrow, wide = torch.float32, torch.float64
    assert [x.dtype for x in (*found, *gradients)] == [wide] * 3 + [narrow] * 4 + [wide]
    plain, truth = (
        (*dense_pairs.statistics(x), *dense_pairs.clip_gradients(x, 1.0, ONES))
        for x in (batch.to(dtype), batch.to(torch.float64))
    )
    assert_within_twice_plain((*found, *gradients), plain, truth, dtype=dtype)
    arguments = (*batch.arguments, batch.bias)
    sent = contrastive.sigmoid_gradients(*arguments, ONES[0], needs_pull=True, needs_log_scale=True)
    ours = (contrastive.sigmoid_statistics(*arguments), *sent)
    assert [x.dtype for x in ours] == [wide, narrow, narrow, wide, narrow, wide]
    plain, truth = (
        (dense_pairs.sigmoid_sum(x), *dense_pairs.sigmoid_gradients(x, 1.0))
        for x in (batch.to(dtype), batch.to(torch.float64))
    )
    assert_within_twice_plain(ours, plain, truth, dtype=dtype)


def test_results_carry_no_graph_and_autocast_does_not_touch_them() -> None:
    batch = Batch.make(NUM, DIM, dtype=torch.float32)
    arguments = [x.clone().requires_grad_() for x in (*batch.arguments, batch.bias)]
    expected = contrastive.sigmoid_gradients(*batch.arguments, batch.bias, ONES[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = contrastive.sigmoid_gradients(*arguments, ONES[0])
    for x, y in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(x, y)
        assert not x.requires_grad


def test_columns_without_rows_and_no_columns_at_all() -> None:
    empty, text, one = torch.ones(0, 3), torch.ones(2, 3), torch.ones(())
    wide = torch.ones(2, dtype=torch.float64)
    by_row, by_column, positives = contrastive.clip_statistics(empty, text, one, offset=1)
    assert (by_row.tolist(), by_column.tolist(), positives.tolist()) == ([], [-torch.inf] * 2, [])
    image, sent, *_ = contrastive.clip_gradients(empty, text, one, by_row, wide, one, wide)
    assert image.shape == (0, 3)
    assert torch.equal(sent, torch.zeros(2, 3))
    assert contrastive.sigmoid_statistics(empty, text, one, one).item() == 0
    assert [x.shape for x in contrastive.clip_statistics(empty, empty, one)] == [(0,)] * 3
    assert contrastive.sigmoid_gradients(empty, empty, one, one, one)[0].shape == (0, 3)


def turned(x: Tensor) -> Tensor:
    """The same numbers, of which the first index moves fastest."""
    return x.T.contiguous().T


def operations() -> list[tuple[Callable, tuple]]:
    batch = Batch.make(8, 5, own=slice(2, 6), dtype=torch.float32)
    sums = (ONES[:4], ONES[:8], ONES[0], ONES[:8])
    image, text, scale = batch.arguments
    scalars, ops = (batch.bias, ONES[0]), torch.ops.moeclip
    return [
        (ops.clip_statistics, (*batch.arguments, 2, 3)),
        (ops.clip_gradients, (*batch.arguments, *sums, 2, 3, True, True, True, True)),
        (ops.clip_gradients, (*batch.arguments, *sums, 2, 3, False, True, False, False)),
        (ops.clip_gradients, (*batch.arguments, *sums, 2, 3, False, False, False, True)),
        (ops.clip_gradients, (turned(image), turned(text), scale, *sums, 2, 3, True, True, True, True)),
        (ops.sigmoid_statistics, (*batch.arguments, batch.bias, 2, 3)),
        (ops.sigmoid_gradients, (*batch.arguments, batch.bias, ONES[0], 2, 3, True, True, True, True, True)),
        (ops.sigmoid_gradients, (*batch.arguments, batch.bias, ONES[0], 2, 3, True, False, False, True, False)),
        (ops.sigmoid_gradients, (turned(image), turned(text), scale, *scalars, 2, 3, True, True, True, True, True)),
    ]


OPERATIONS = operations()


@pytest.mark.parametrize("case", range(len(OPERATIONS)))
def test_operations_are_what_torch_library_expects(case: int) -> None:
    op, arguments = OPERATIONS[case]
    torch.library.opcheck(op.default, arguments)


def test_compilation_keeps_the_operations_whole() -> None:
    batch = Batch.make(NUM, DIM, dtype=torch.float32)

    def loss_and_gradients(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> list[Tensor]:
        by_row, by_column, positives = contrastive.clip_statistics(image, text, scale)
        sent = contrastive.clip_gradients(image, text, scale, by_row, by_column, ONES[0], ONES, needs_log_scale=True)
        total = contrastive.sigmoid_statistics(image, text, scale, bias)
        pulled = contrastive.sigmoid_gradients(image, text, scale, bias, ONES[0], needs_pull=True, needs_log_scale=True)
        return [positives.sum(), sent.image, sent.text, sent.log_scale, total, *pulled]

    arguments = (*batch.arguments, batch.bias)
    compiled = torch.compile(loss_and_gradients, fullgraph=True, backend="aot_eager")(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(compiled, loss_and_gradients(*arguments), strict=True))


X, Y, S = torch.ones(2, 3), torch.ones(4, 3), torch.ones(())
MISFITS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ValueError, r"Images \[2, 3\] and texts \[4, 5\] must be", lambda: statistics(X, torch.ones(4, 5), S)),
    (ValueError, r"Images \[2, 3, 1\] and texts", lambda: statistics(X[..., None], Y, S)),
    (TypeError, r"Features of torch.int64 have no logits", lambda: statistics(X, Y.long(), S)),
    (ValueError, r"offset=3 puts the partners of 2 images beyond the 4 texts", lambda: statistics(X, Y, S, offset=3)),
    (ValueError, r"offset=-1 puts the partners", lambda: statistics(X, Y, S, offset=-1)),
    (ValueError, r"chunk_size=0 must be at least 1 column", lambda: statistics(X, Y, S, chunk_size=0)),
    (ValueError, r"scale must be one number, but its shape is \[4\]", lambda: statistics(X, Y, torch.ones(4))),
    (TypeError, r"scale is torch.bfloat16.* Write scale.float\(\)", lambda: statistics(X, Y, S.bfloat16())),
    (TypeError, r"scale is torch.int64", lambda: statistics(X, Y, S.long())),
    (TypeError, r"bias is torch.float16", lambda: contrastive.sigmoid_statistics(X, Y, S, S.half())),
    (TypeError, r"row_factor is torch.int64", lambda: contrastive.sigmoid_gradients(X, Y, S, S, S.long())),
    (ValueError, r"text_ND lies on meta, the images on cpu", lambda: statistics(X, Y.to("meta"), S)),
    (ValueError, r"bias must be one number", lambda: contrastive.sigmoid_statistics(X, Y, S, X)),
    (ValueError, r"row_factor must be one number", lambda: contrastive.sigmoid_gradients(X, Y, S, S, X)),
    (ValueError, r"by_row_M has shape \[4\] for 2 samples", lambda: gradients(ONES[:4], ONES[:4], ONES[:4])),
    (ValueError, r"by_column_N has shape \[2\] for 4 samples", lambda: gradients(ONES[:2], ONES[:2], ONES[:4])),
    (ValueError, r"column_factor_N has shape \[2\] for 4", lambda: gradients(ONES[:2], ONES[:4], ONES[:2])),
    (ValueError, r"by_row_M lies on meta", lambda: gradients(ONES[:2].to("meta"), ONES[:4], ONES[:4])),
]


def statistics(image: Tensor, text: Tensor, scale: Tensor, **place: int) -> object:
    return contrastive.clip_statistics(image, text, scale, **place)


def gradients(by_row: Tensor, by_column: Tensor, column_factor: Tensor) -> object:
    return contrastive.clip_gradients(X, Y, S, by_row, by_column, ONES[0], column_factor)


@pytest.mark.parametrize("case", range(len(MISFITS)))
def test_misfits_are_refused_before_anything_is_computed(case: int) -> None:
    error, message, call = MISFITS[case]
    with pytest.raises(error, match=message):
        call()
