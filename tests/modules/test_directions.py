"""The two halves of a loss, as three sums over cotangents, against autograd in one process in float64."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.modules import ContrastiveLoss, SigmoidLoss
from lightning_moeclip.modules.directions import Directions, DirectionSums
from lightning_moeclip.modules.logit_scale import ScaledLoss
from lightning_moeclip.testing import Rank, on_ranks

DIM = 6
LAYOUTS = [(7,), (4, 3), (0, 5), (4, 3, 0, 1), (2, 3, 4, 5)]
LOSSES = {"contrastive": ContrastiveLoss, "sigmoid": SigmoidLoss}


def features(num: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    image, noise = torch.randn(2, num, DIM, generator=generator, dtype=torch.float64)
    return image.to(dtype), (image + 0.7 * noise).to(dtype)


def make_loss(kind: str, **arguments: object) -> ScaledLoss:
    bias = {"init_bias": -1.0} if kind == "sigmoid" else {}
    loss = LOSSES[kind](init_temperature=0.5, chunk_size=3, **bias, **arguments).double()
    loss.wants_directions = True
    return loss


def halves(kind: str, image: Tensor, text: Tensor, loss: ScaledLoss) -> tuple[Tensor, Tensor]:
    """Two terms, dense, whose cotangents are a and b."""
    z = loss.logit_scale.exp() * image @ text.T
    if kind == "contrastive":
        labels = torch.arange(len(z))
        return cross_entropy(z, labels) / 2, cross_entropy(z.T, labels) / 2
    z = z + loss.logit_bias
    is_pair = torch.eye(len(z), dtype=torch.bool)
    return -logsigmoid(z[is_pair]).sum() / len(z), logsigmoid(-z[~is_pair]).sum() / len(z)


def truth(
    kind: str,
    image: Tensor,
    text: Tensor,
    *,
    trained: tuple[bool, bool] = (True, True),
    is_normalized: bool = True,
) -> Tensor:
    """[a.b, a.a, b.b] of the cotangents of the features as given, from autograd."""
    given = [x.clone().requires_grad_() for x in (image, text)]
    wanted = [x for x, is_trained in zip(given, trained, strict=True) if is_trained]
    rows = [normalize(x, dim=1) for x in given] if is_normalized else given
    terms = halves(kind, *rows, make_loss(kind))
    a, b = (torch.cat([g.flatten() for g in torch.autograd.grad(term, wanted, retain_graph=True)]) for term in terms)
    return torch.stack([a @ b, a @ a, b @ b])


def assert_near(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    assert got.dtype is torch.float64
    error = ((got - expected).abs() / expected.abs().max()).max().item()
    assert error <= 1e-10, f"relative error {error:.1e}: {got.tolist()} for {expected.tolist()}"


def own_rows(rank: Rank, rows: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.split(list(rows))[rank.index].clone().requires_grad_() for x in features(sum(rows), dtype)]


def sums_over_ranks(rank: Rank, kind: str, rows: tuple[int, ...]) -> Tensor | None:
    loss = make_loss(kind)
    loss(*own_rows(rank, rows)).backward()
    sums = loss.pop_direction_sums()
    assert sums is not None
    dist.all_reduce(sums)
    # cotangents of l_r, whose mean over ranks is the loss, are W times those of the loss
    return sums / rank.world_size**2


@on_ranks(1)
def on_1(rank: Rank, rows: tuple[int, ...]) -> list[Tensor | None]:
    return [sums_over_ranks(rank, kind, rows) for kind in LOSSES]


@on_ranks(2)
def on_2(rank: Rank, rows: tuple[int, ...]) -> list[Tensor | None]:
    return [sums_over_ranks(rank, kind, rows) for kind in LOSSES]


@on_ranks(4)
def on_4(rank: Rank, rows: tuple[int, ...]) -> list[Tensor | None]:
    return [sums_over_ranks(rank, kind, rows) for kind in LOSSES]


@pytest.mark.parametrize("rows", LAYOUTS)
def test_sums_over_ranks_equal_one_process(rows: tuple[int, ...]) -> None:
    for found in {1: on_1, 2: on_2, 4: on_4}[len(rows)].launch(rows=rows):
        for kind, sums in zip(LOSSES, found, strict=True):
            assert_near(sums, truth(kind, *features(sum(rows))))


@pytest.mark.parametrize("kind", LOSSES)
def test_features_used_as_given_have_cotangents_along_them_too(kind: str) -> None:
    loss = make_loss(kind, normalize=False)
    loss(*(x.requires_grad_() for x in features(7))).backward()
    sums = loss.pop_direction_sums()
    assert_near(sums, truth(kind, *features(7), is_normalized=False))
    assert sums[0].item() != pytest.approx(truth(kind, *features(7))[0].item(), rel=0.1)


@on_ranks(4)
def test_asking_changes_no_bit_of_the_gradients(rank: Rank) -> None:
    for kind in LOSSES:
        found = []
        for wants in (False, True):
            loss = make_loss(kind).float()
            loss.wants_directions = wants
            given = own_rows(rank, (40, 33, 0, 21), torch.float32)
            value = loss(*given)
            value.backward()
            found.append([value, *(x.grad for x in (*given, *loss.parameters()))])
            assert (loss.pop_direction_sums() is None) != wants
        for without, with_sums in zip(*found, strict=True):
            assert without.equal(with_sums), kind


@on_ranks(2)
def test_a_wish_of_one_rank_is_met_and_hangs_nobody(rank: Rank) -> None:
    for kind in LOSSES:
        loss = make_loss(kind)
        loss.wants_directions = rank.index == 1
        loss(*own_rows(rank, (4, 3))).backward()
        assert (loss.pop_direction_sums() is None) == (rank.index == 0)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_a_frozen_tower_is_left_out(kind: str, trained: tuple[bool, bool]) -> None:
    given = [x.requires_grad_(wants) for x, wants in zip(features(7), trained, strict=True)]
    loss = make_loss(kind)
    loss(*given).backward()
    assert_near(loss.pop_direction_sums(), truth(kind, *features(7), trained=trained))


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_add_up_until_the_sums_are_taken(kind: str) -> None:
    loss, (image, text) = make_loss(kind), features(7)
    image.requires_grad_()
    text.requires_grad_()
    for rows in (slice(0, 4), slice(4, 7)):
        loss(image[rows], text[rows]).backward()
    expected = sum(truth(kind, *(x.detach()[rows] for x in (image, text))) for rows in (slice(0, 4), slice(4, 7)))
    assert isinstance(expected, Tensor)
    assert_near(loss.pop_direction_sums(), expected)
    assert loss.pop_direction_sums() is None


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_counts_once(kind: str, use_reentrant: bool) -> None:
    loss, given = make_loss(kind), [x.requires_grad_() for x in features(7)]
    checkpoint(loss, *given, use_reentrant=use_reentrant).backward()
    assert_near(loss.pop_direction_sums(), truth(kind, *features(7)))


@pytest.mark.parametrize("kind", LOSSES)
def test_evaluation_and_a_loss_that_is_not_asked_leave_nothing(kind: str) -> None:
    loss = make_loss(kind)
    with torch.no_grad():
        loss(*features(7))
    assert loss.pop_direction_sums() is None
    loss.wants_directions = False
    loss(*(x.requires_grad_() for x in features(7))).backward()
    assert loss.pop_direction_sums() is None


def test_a_factor_on_the_loss_does_not_move_the_cosine() -> None:
    cosines = []
    for factor in (1.0, 2.0**16):
        loss = make_loss("contrastive")
        (factor * loss(*(x.requires_grad_() for x in features(7)))).backward()
        ab, aa, bb = loss.pop_direction_sums().tolist()
        cosines.append(ab / (aa * bb) ** 0.5)
    assert cosines[0] == pytest.approx(cosines[1], rel=1e-12)


def test_sigmoid_sums_of_two_pairs_by_hand() -> None:
    loss = make_loss("sigmoid")
    nn.init.zeros_(loss.logit_bias)
    image = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    text = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    loss(image, text).backward()
    # all logits are 0, so each of the 4 terms has a gradient of 1/2 * 1/N, times the scale of 2: k = 1/2. An image is
    # pulled to the one text as it is pushed off it, k^2; a text is pulled to its image and pushed to it too, -k^2
    assert loss.pop_direction_sums().tolist() == pytest.approx([0.0, 1.0, 1.0], rel=1e-7, abs=1e-15)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_wish_survives_copies_and_is_no_state(kind: str) -> None:
    loss = make_loss(kind)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert other.wants_directions
        assert other.state_dict().keys() == LOSSES[kind]().state_dict().keys()
        other(*(x.requires_grad_() for x in features(7))).backward()
        assert other.pop_direction_sums() is not None
    assert loss.pop_direction_sums() is None


def test_sums_without_a_trained_tower_lie_where_the_rows_do() -> None:
    rows = (torch.empty(2, DIM, device="meta"), torch.empty(2, DIM, device="meta"))
    sums = DirectionSums()
    Directions(sums).add((None, None), (None, None), rows=rows, is_opposed=False)
    Directions(sums).add(rows, rows, rows=rows, is_opposed=False)  # of another backward, whose towers are trained
    total = sums.pop()
    assert total is not None
    assert (total.device.type, total.dtype, total.shape) == ("meta", torch.float64, (3,))
