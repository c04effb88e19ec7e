"""Losses over real gloo ranks against the dense truth of one process, in float64."""

import re

import pytest
import torch
import torch.distributed as dist
from lightning_moeclip.kernels import contrastive_tiles, reference
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_moeclip.modules import ContrastiveLoss, SigmoidLoss, contrastive_loss
from lightning_moeclip.modules.sigmoid import global_sigmoid_loss
from lightning_moeclip.parallel import ledger
from lightning_moeclip.testing import Rank, on_ranks

DIM, LOG_SCALE, BIAS = 6, 1.1, -0.7
LAYOUTS = [(4,), (4, 3), (4, 3, 0, 1), (2, 2), (0, 5)]
KINDS = ["contrastive", "sigmoid"]
FACTORS = [0.5, 3.0, 0.0, -2.0]
CASES = [("plain", 1), ("plain", 3), ("plain", 64), ("noncontiguous", 3), ("expanded", 3), ("factors", 3), ("rows", 2)]
NAMES = ["image", "text", "logit_scale", "logit_bias"]


def features(num: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, num, DIM, generator=generator, dtype=torch.float64)
    return image, text


def scalars() -> tuple[Tensor, Tensor]:
    scale, bias = torch.tensor([LOG_SCALE, BIAS], dtype=torch.float64)
    return scale.requires_grad_(), bias.requires_grad_()


def ours(kind: str, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, *, chunk_size: int = 3) -> Tensor:
    if kind == "contrastive":
        return contrastive_loss(image, text, scale, chunk_size=chunk_size)
    return global_sigmoid_loss(image, text, scale, bias, chunk_size, None, normalize=False)


def truth(kind: str, rows: tuple[int, ...], factors: list[float] | None = None) -> list[Tensor]:
    """Objective (1/W) sum of factor_r * l_r in one process, and its gradients, by per-sample dense terms."""
    image, text = (x.requires_grad_() for x in features(sum(rows)))
    scale, bias = scalars()
    num = sum(rows)
    factor = torch.tensor(factors or [1.0] * len(rows), dtype=torch.float64)
    weight = factor.repeat_interleave(torch.tensor(rows))
    z = scale.exp() * (image @ text.T)
    if kind == "contrastive":
        labels = torch.arange(num)
        each = (cross_entropy(z, labels, reduction="none") + cross_entropy(z.T, labels, reduction="none")) / 2
    else:
        z = z + bias
        each = torch.logaddexp(torch.zeros_like(z), -(2 * torch.eye(num, dtype=z.dtype) - 1) * z).sum(1)
    loss = (weight * each).sum() / num
    loss.backward()
    if factors is None:
        dense = getattr(reference, f"{kind}_loss")
        arguments = (image, text, scale) if kind == "contrastive" else (image, text, scale, bias)
        assert_near(dense(*arguments).detach(), loss.detach())
    return [loss.detach(), *(x.grad for x in (image, text, scale, bias) if x.grad is not None)]


def assert_near(got: Tensor, expected: Tensor, *, what: str = "", tolerance: float = 1e-10) -> None:
    assert got.shape == expected.shape, what
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)
    assert error <= tolerance, f"relative error {error:.2e} {what}"


def own_rows(rank: Rank, rows: tuple[int, ...]) -> slice:
    start = sum(rows[: rank.index])
    return slice(start, start + rows[rank.index])


def whole(rank: Rank, loss: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """What one process would hold: means over ranks of loss and scalar gradients, rows side by side."""
    found: list[Tensor] = []
    for x in [loss.detach(), *grads]:
        parts: list[Tensor | None] = [None] * rank.world_size
        dist.all_gather_object(parts, x)
        found.append(torch.cat(parts) / rank.world_size if x.ndim else sum(parts) / rank.world_size)
    return found


def noncontiguous(x: Tensor) -> Tensor:
    """The same numbers as every second column of the transpose of a wider tensor."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=2).permute(1, 2, 0)[:, 0].T


def run(rank: Rank, kind: str, rows: tuple[int, ...], how: str, chunk_size: int) -> list[Tensor]:
    contrastive_tiles._CPU_NUMEL = 4 if how == "rows" else 2**23  # a process of this test alone
    image, text = (x[own_rows(rank, rows)].clone().requires_grad_() for x in features(sum(rows)))
    scale, bias = scalars()
    given = [noncontiguous(x) for x in (image, text)] if how == "noncontiguous" else [image, text]
    assert len(image) < 2 or how != "noncontiguous" or not given[0].is_contiguous()
    loss = ours(kind, *given, scale, bias, chunk_size=chunk_size)
    if how == "expanded":
        (loss.expand(5).sum() / 5).backward()
    elif how == "factors":
        (loss * FACTORS[rank.index]).backward()
    else:
        loss.backward()
    return whole(rank, loss, [x.grad for x in (image, text, scale, bias) if x.grad is not None])


def each_kind(rank: Rank, rows: tuple[int, ...]) -> dict[tuple[str, str, int], list[Tensor]]:
    return {
        (kind, how, chunk_size): run(rank, kind, rows, how, chunk_size) for kind in KINDS for how, chunk_size in CASES
    }


@on_ranks(1)
def on_1(rank: Rank, rows: tuple[int, ...]) -> dict[tuple[str, str, int], list[Tensor]]:
    return each_kind(rank, rows)


@on_ranks(2)
def on_2(rank: Rank, rows: tuple[int, ...]) -> dict[tuple[str, str, int], list[Tensor]]:
    return each_kind(rank, rows)


@on_ranks(4)
def on_4(rank: Rank, rows: tuple[int, ...]) -> dict[tuple[str, str, int], list[Tensor]]:
    return each_kind(rank, rows)


@pytest.mark.parametrize("rows", LAYOUTS)
def test_loss_and_every_gradient_equal_one_process(rows: tuple[int, ...]) -> None:
    for found in {1: on_1, 2: on_2, 4: on_4}[len(rows)].launch(rows=rows):
        for (kind, how, chunk_size), got in found.items():
            expected = truth(kind, rows, FACTORS[: len(rows)] if how == "factors" else None)
            if how == "factors":  # the factors scale the cotangents alone
                expected[0] = truth(kind, rows)[0]
            assert len(got) == len(expected)
            for name, x, y in zip(["loss", *NAMES], got, expected, strict=False):
                assert_near(x, y, what=f"{name} of {kind}, {how}, chunk_size={chunk_size}")


@on_ranks(2)
def means_of_means(rank: Rank, rows: tuple[int, ...]) -> float:
    """What open code does: each rank means over its own rows, and the means are averaged."""
    image, text = features(sum(rows))
    own = own_rows(rank, rows)
    z = scalars()[0].exp() * (image @ text.T)
    labels = torch.arange(sum(rows))[own]
    loss = (cross_entropy(z[own], labels) + cross_entropy(z.T[own], labels)) / 2
    return whole(rank, loss, [])[0].item()


def test_mean_of_rank_means_is_wrong_for_uneven_rows_where_ours_is_exact() -> None:
    rows = (4, 3)
    expected = truth("contrastive", rows)[0].item()
    assert expected == pytest.approx(7.6359, abs=1e-4)
    assert means_of_means.launch(rows=rows)[0] == pytest.approx(8.0980, abs=1e-4)
    assert on_2.launch(rows=rows)[0]["contrastive", "plain", 64][0].item() == pytest.approx(expected, rel=1e-12)


@on_ranks(2)
def test_text_cotangents_are_summed_over_ranks(rank: Rank) -> None:
    """With frozen images and scale, rank 0's texts get gradient only through the rows of both ranks."""
    rows = (3, 2)
    image, text = (x[own_rows(rank, rows)] for x in features(5))
    text.requires_grad_()
    scale, bias = (x.detach() for x in scalars())
    for kind in KINDS:
        text.grad = None
        ours(kind, image, text, scale, bias).backward()
        (got,) = whole(rank, torch.zeros(()), [text.grad])[1:]
        assert_near(got, truth(kind, rows)[2])


@on_ranks(2)
def test_frozen_towers_leave_the_other_gradients_exact(rank: Rank) -> None:
    rows = (3, 2)
    for kind in KINDS:
        expected = dict(zip(NAMES, truth(kind, rows)[1:], strict=False))
        for wanted in (["image"], ["text"], ["logit_scale"], ["image", "logit_scale"], ["text", "logit_scale"]):
            inputs = [x[own_rows(rank, rows)] for x in features(5)] + [x.detach() for x in scalars()]
            for name, x in zip(NAMES, inputs, strict=True):
                x.requires_grad_(name in wanted)
            loss = ours(kind, *inputs)
            loss.backward()
            got = [x.grad for x in inputs if x.grad is not None]
            for name, x in zip(wanted, whole(rank, loss, got)[1:], strict=True):
                assert_near(x, expected[name], what=f"{name} of {kind} alone")


@on_ranks(2)
def test_rank_without_a_graph_of_its_own_still_enters_the_backward(rank: Rank) -> None:
    """No rows, no layer behind them and a constant scale on rank 1: its backward has to come all the same."""
    rows = (4, 0)
    image, text = (x[own_rows(rank, rows)] for x in features(4))
    scale, bias = (x.detach() for x in scalars())
    if rank.index == 0:
        image.requires_grad_()
        text.requires_grad_()
    for kind in KINDS:
        image.grad = text.grad = None
        ours(kind, image, text, scale, bias).backward()
        if rank.index == 0:
            assert_near(image.grad / 2, truth(kind, rows)[1])
            assert_near(text.grad / 2, truth(kind, rows)[2])


@on_ranks(2)
def messages_of_misfits(rank: Rank) -> list[str]:
    """Features that do not belong together, and the error that each rank saw."""
    odd, x, half = rank.index, torch.ones, torch.bfloat16
    misfits = [
        (x(2, 4 + odd), x(2, 4 + odd)),
        (x(2, 4), x(2, 4 + odd)),
        (x(2, 4), x(2 + odd, 4)),
        (x(2, 4), x(2, 4, 1) if odd else x(2, 4)),
        (x(2, 4).to(half if odd else torch.float32), x(2, 4)),
        (x(2, 4), x(2, 4, dtype=torch.int64) if odd else x(2, 4)),
        (x(0, 4), x(0, 4)),
    ]
    messages = []
    for image, text in misfits:
        for loss in (ContrastiveLoss(), SigmoidLoss()):
            with pytest.raises(ValueError, match=r"rank|sample") as caught:
                loss(image, text)
        messages.append(str(caught.value))
    return messages


MISFITS = [
    "must have one width, but rank 0 gave image features of width 4, text features of width 4; "
    "rank 1 gave image features of width 5, text features of width 5",
    "rank 1 gave image features of width 4, text features of width 5",
    "are a pair, but rank 0 gave .* rank 1 gave image features .2, 4. float32 and text features .3, 4. float32",
    "must be .samples, dim., but .*; rank 1 gave .* text features with 3 dimensions float32",
    "same dtypes, but rank 0 gave image features .2, 4. float32 .*; rank 1 gave image features .2, 4. bfloat16",
    "must be one of float64, .*; rank 1 gave .* text features .2, 4. of another dtype",
    "No rank holds a sample",
]


@pytest.mark.parametrize("case", range(len(MISFITS)))
def test_misfit_is_the_same_error_on_every_rank(case: int, misfits: list[list[str]]) -> None:
    assert misfits[0][case] == misfits[1][case]
    assert re.search(MISFITS[case], misfits[0][case])


@pytest.fixture(scope="module")
def misfits() -> list[list[str]]:
    return messages_of_misfits.launch()


@on_ranks(2)
def test_nan_rows_reach_the_loss_and_every_gradient_on_every_rank(rank: Rank) -> None:
    rows = (3, 2)
    for kind in KINDS:
        for poisoned in (0, 1):
            inputs = [x[own_rows(rank, rows)].clone() for x in features(5)]
            if rank.index == 1:
                inputs[poisoned][1] = torch.nan
            image, text = (x.requires_grad_() for x in inputs)
            scale, bias = scalars()
            loss = ours(kind, image, text, scale, bias)
            loss.backward()
            if kind == "contrastive":  # every softmax holds the poisoned logits
                assert loss.isnan()
                assert image.grad.isnan().all()
                assert text.grad.isnan().all()
                assert scale.grad.isnan()
                continue
            expected = truth_of_poisoned(kind, poisoned)
            for x, y in zip(whole(rank, loss, [image.grad, text.grad, scale.grad, bias.grad]), expected, strict=True):
                assert torch.equal(x.isnan(), y.isnan())


def truth_of_poisoned(kind: str, poisoned: int) -> list[Tensor]:
    image, text = features(5)
    (image, text)[poisoned][4] = torch.nan
    inputs = [x.requires_grad_() for x in (image, text, *scalars())]
    loss = reference.sigmoid_loss(*inputs)
    loss.backward()
    return [loss.detach(), *(x.grad for x in inputs)]


@on_ranks(2)
def test_modules_enter_their_output_in_the_ledger(rank: Rank) -> None:
    image, text = (x[own_rows(rank, (3, 2))] for x in features(5))
    with ledger.recording() as page:
        losses = [loss(image, text) for loss in (ContrastiveLoss(), SigmoidLoss())]
    assert [id(x) for x in page] == [id(x) for x in losses]
    for loss in losses:
        loss.backward()
