"""The router's torch path against one token after another in float64, and what the operation promises."""

import pytest
import torch
from lightning_moeclip.kernels import reference
from lightning_moeclip.kernels.router import route
from torch import Tensor

from tests.kernels.routing import (
    DTYPES,
    SIZES,
    assert_bitwise,
    assert_close,
    cotangent_like,
    logits,
    plain_route,
    routed,
)

RULES = [(True, "exact"), (False, "exact"), (False, "compensated"), (True, "dense"), (False, "dense")]


def compiled(z: Tensor, top_k: int, normalize: bool, rule: str) -> tuple[Tensor, ...]:
    """What a compiled call runs: the operation with its registered backward."""
    weights, *rest = torch.ops.moeclip.route(z, top_k, normalize, rule)
    return (weights.detach(), *rest, torch.autograd.grad(weights, z, cotangent_like(weights))[0])


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_route_equals_the_reference(
    num_tokens: int, num_experts: int, top_k: int, normalize: bool, dtype: torch.dtype
) -> None:
    z = logits(num_tokens, num_experts, dtype)
    truth = reference.route(z.detach().double(), top_k, normalize_topk=normalize)
    for found in (routed(z, top_k, normalize=normalize), compiled(z, top_k, normalize, "exact")):
        weights, *integers, grad = found
        assert_bitwise(integers, truth[1:])
        assert [x.dtype for x in integers] == [torch.int64, torch.int64, torch.int32]
        plain, plain_grad = plain_route(z, top_k, normalize=normalize)
        assert_close(weights, plain, truth[0])
        alignment = torch.zeros(z.shape, dtype=torch.float64).scatter(1, integers[0], cotangent_like(weights).double())
        exact = reference.router_logits_gradient(z.detach().double(), integers[0], alignment, normalize_topk=normalize)
        assert_close(grad, plain_grad, exact)


@pytest.mark.parametrize(("normalize", "rule"), RULES)
def test_gradient_follows_the_formula_of_its_rule_in_float64(normalize: bool, rule: str) -> None:
    z = logits(20, 6, torch.float64)
    for found in (routed(z, 3, normalize=normalize, rule=rule), compiled(z, 3, normalize, rule)):
        weights, chosen, *_, grad = found
        alignment = torch.zeros_like(z).scatter(1, chosen, cotangent_like(weights))
        # the dense rule adds what inactive experts give elsewhere: here their products are zero
        exact = reference.router_logits_gradient(
            z.detach(), chosen, alignment, normalize_topk=normalize and rule == "exact", rule=rule
        )
        assert (grad - exact).norm() <= 1e-15 * 20 * exact.norm()


@pytest.mark.parametrize(("normalize", "rule"), RULES)
def test_create_graph_changes_no_gradient_and_second_derivatives_pass_gradcheck(normalize: bool, rule: str) -> None:
    z, cotangent = logits(4, 5, torch.float64), torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def gradient(z: Tensor, cotangent: Tensor) -> Tensor:
        weights = route(z, 2, normalize_topk=normalize, gradient=rule)[0]  # type: ignore[arg-type]
        return torch.autograd.grad(weights, z, cotangent, create_graph=True)[0]

    def gradient_of_operation(z: Tensor, cotangent: Tensor) -> Tensor:
        weights = torch.ops.moeclip.route(z, 2, normalize, rule)[0]
        return torch.autograd.grad(weights, z, cotangent, create_graph=True)[0]

    for fn in (gradient, gradient_of_operation):
        torch.autograd.gradcheck(fn, (z, cotangent))
        first = torch.autograd.grad(torch.ops.moeclip.route(z, 2, normalize, rule)[0], z, cotangent)[0]
        torch.testing.assert_close(fn(z, cotangent), first, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("normalize", [True, False])
def test_bad_logits_stay_in_their_row_and_ids_in_range(normalize: bool) -> None:
    clean = logits(8, 6)
    z = clean.detach().clone()
    z[1, 2], z[3, 4], z[5, 0], z[6] = float("nan"), float("inf"), float("-inf"), float("-inf")
    found, expected = (routed(x.requires_grad_(), 2, normalize=normalize) for x in (z, clean))
    good = [0, 2, 4, 7]
    assert_bitwise([found[i][good] for i in (0, 1, 4)], [expected[i][good] for i in (0, 1, 4)])
    assert found[0][1].isnan().all()
    assert found[1][1, 0] == 2
    assert found[1][3, 0] == 4
    assert (found[1] >= 0).all()
    assert (found[1] < 6).all()
    assert (found[1][:, 0] != found[1][:, 1]).all()
    assert int(found[2].sum()) == 16


def test_route_is_bitwise_repeatable() -> None:
    z = logits(300, 8)
    assert_bitwise(routed(z, 2, normalize=True), routed(z, 2, normalize=True))


def test_compiled_route_is_one_graph_and_equals_eager() -> None:
    z = logits(30, 6, torch.float64)

    def loss(z: Tensor) -> Tensor:
        weights, chosen, counts, ends = route(z * 2, 2, normalize_topk=True)
        return (weights * chosen).sum() + (counts * ends).sum()

    both = [
        (fn(z), *torch.autograd.grad(fn(z), z))
        for fn in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True))
    ]
    for eager, traced in zip(*both, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("normalize", "rule"), RULES)
def test_registration_passes_opcheck(normalize: bool, rule: str) -> None:
    z = logits(6, 5)
    torch.library.opcheck(torch.ops.moeclip.route.default, (z, 2, normalize, rule))
    weights, chosen, *_ = route(z.detach(), 2, normalize_topk=normalize)
    arguments = (cotangent_like(weights), z.detach(), weights, chosen, normalize, 2.5)
    torch.library.opcheck(torch.ops.moeclip.route_backward.default, arguments)


def test_weights_that_no_loss_reads_give_no_gradient() -> None:
    z = logits(6, 5)
    weights, chosen, *_ = torch.ops.moeclip.route(z, 2, True, "exact")
    assert not chosen.requires_grad
    assert torch.autograd.grad((z * 2).sum() + 0 * weights.detach().sum(), z)[0].eq(2).all()


@pytest.mark.parametrize(
    ("z", "options", "error", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), {}, TypeError, r"logits in torch.int64: they must be floating. Use log"),
        (torch.zeros(2, 3, 4), {}, ValueError, r"shape \(2, 3, 4\): they must be \[tokens, experts\]. Use logits.resh"),
        (torch.zeros(2, 3), {"top_k": 4}, ValueError, r"top_k=4 with logits of 3 experts: it must be from 1 to"),
        (torch.zeros(2, 3), {"top_k": 0}, ValueError, r"top_k=0 with logits of 3 experts: it must be from 1 to"),
        (torch.zeros(2, 3), {"gradient": "soft"}, ValueError, r"gradient='soft', which is no rule. Use one of \['exac"),
        (torch.zeros(2, 3), {"gradient": "compensated"}, ValueError, r"inactive logits have no gradient.*Use normali"),
    ],
)
def test_bad_arguments_say_what_to_write(
    z: Tensor, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        route(z, **{"top_k": 2, "normalize_topk": True, **options})  # type: ignore[arg-type]
