"""The router's choice, its precision and the gradient of its logits."""

import pytest
import torch
from lightning_moeclip.kernels.reference import router_logits_gradient
from torch import Tensor

from lightning_moeclip.modules import MoE

TOKENS, DIM, EXPERTS = 7, 5, 6


def logits_gradient(moe: MoE, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dz of L = <y, cotangent>, the logits and the choice."""
    kept = {}

    def keep(module: object, args: object, routing: object) -> None:
        routing.logits.retain_grad()  # type: ignore[attr-defined]
        kept["routing"] = routing

    handle = moe.router.register_forward_hook(keep)
    (moe(x) * cotangent).sum().backward()
    handle.remove()
    routing = kept["routing"]
    return routing.logits.grad, routing.logits.detach(), routing.chosen  # type: ignore[attr-defined]


def outputs_of_experts(moe: MoE, x: Tensor) -> Tensor:
    """f_e(x_t) of every expert for every token: [T, E, D]."""
    hidden = torch.nn.functional.gelu(torch.einsum("td,edh->teh", x, moe.w_in))
    return torch.einsum("teh,ehd->ted", hidden, moe.w_out).detach()


@pytest.mark.parametrize(
    ("top_k", "normalize", "rule"),
    [
        (2, True, "exact"),
        (2, False, "exact"),
        (1, False, "exact"),
        (3, False, "compensated"),
        (1, False, "compensated"),
        (2, True, "dense"),
        (2, False, "dense"),
    ],
)
def test_gradient_of_logits_follows_the_formula_of_its_rule(top_k: int, normalize: bool, rule: str) -> None:
    torch.manual_seed(0)
    moe = MoE(DIM, 8, EXPERTS, top_k=top_k, normalize_topk=normalize, router_gradient=rule).double()  # type: ignore
    x, cotangent = torch.randn(2, TOKENS, DIM, dtype=torch.float64).unbind()
    f = outputs_of_experts(moe, x)
    if moe.output_mean is not None:
        moe.output_mean.upcoming.normal_()
        mean = moe.output_mean.upcoming.clone()
    found, logits, chosen = logits_gradient(moe, x, cotangent)
    if rule == "dense":
        is_chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
        f = torch.where(is_chosen[..., None], f, mean)
    alignment = torch.einsum("ted,td->te", f, cotangent)
    expected = router_logits_gradient(logits, chosen, alignment, normalize_topk=normalize, rule=rule)
    assert (found - expected).norm() < 1e-10 * expected.norm()


def test_rules_change_no_output() -> None:
    outputs = []
    for rule in ("exact", "compensated", "dense"):
        torch.manual_seed(0)
        moe = MoE(DIM, 8, EXPERTS, top_k=2, normalize_topk=False, router_gradient=rule)  # type: ignore[arg-type]
        outputs.append(moe(torch.ones(3, DIM)))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_exact_rows_sum_to_zero_and_compensated_ones_do_not() -> None:
    sums = {}
    for rule in ("exact", "compensated"):
        torch.manual_seed(0)
        moe = MoE(DIM, 8, EXPERTS, top_k=2, normalize_topk=False, router_gradient=rule).double()  # type: ignore
        x, cotangent = torch.randn(2, TOKENS, DIM, dtype=torch.float64).unbind()
        sums[rule] = logits_gradient(moe, x, cotangent)[0].sum(1).abs().max()
    assert sums["exact"] < 1e-14
    assert sums["compensated"] > 1e-3


def test_dense_rule_keeps_the_mean_of_outputs_of_the_forwards_before() -> None:
    torch.manual_seed(0)
    moe = MoE(DIM, 8, EXPERTS, router_gradient="dense").double()
    assert moe.output_mean is not None
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    moe(x)
    assert not moe.output_mean.mean.any()
    moe(x)
    chosen = (x @ moe.router.weight.T).topk(2).indices
    f = outputs_of_experts(moe, x)
    for expert in range(EXPERTS):
        mine = f[(chosen == expert).any(1), expert]
        expected = 0.1 * mine.mean(0) if len(mine) else torch.zeros(DIM, dtype=torch.float64)
        assert torch.allclose(moe.output_mean.mean[expert], expected, rtol=1e-12, atol=1e-15)
    before = moe.output_mean.mean.clone()
    moe.eval()(x)
    assert torch.equal(moe.output_mean.mean, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_router_stays_float32_bit_for_bit_when_the_module_is_cast(dtype: torch.dtype) -> None:
    moe = MoE(DIM, 8, EXPERTS, router_gradient="dense")
    before = moe.router.weight.detach().clone()
    moe.to(dtype)
    assert torch.equal(moe.router.weight, before)
    assert moe.output_mean is not None
    assert moe.output_mean.mean.dtype == torch.float32
    assert moe.w_in.dtype == dtype
    x = torch.randn(TOKENS, DIM, dtype=dtype)
    assert moe.router(x).logits.dtype == torch.float32
    expected = x.float() @ before.T
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.router(x).logits, expected)


def test_router_is_float64_in_a_float64_module() -> None:
    assert MoE(DIM, 8, EXPERTS).double().router(torch.zeros(1, DIM, dtype=torch.float64)).logits.dtype == torch.float64


def test_router_is_float32_when_made_under_a_16_bit_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = MoE(DIM, 8, EXPERTS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (moe.router.weight.dtype, moe.w_in.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 7}, r"top_k=7 experts per token out of num_experts=6.*Use top_k=6"),
        ({"top_k": 0}, r"top_k must be from 1 to num_experts. Use top_k=1"),
        ({"top_k": 1, "normalize_topk": True}, r"no gradient at all. Use normalize_topk=False, or top_k=2"),
        ({"router_gradient": "soft"}, r"router_gradient='soft' is not a rule. Use one of \['exact', 'compensated'"),
        ({"router_gradient": "compensated"}, r"zero when the weights are renormalised. Use normalize_topk=False"),
        ({"activation": "swish"}, r"activation='swish' is not known to MoE. Use one of \['gelu'"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0 must be above 0. Use 1.25"),
    ],
)
def test_settings_that_cannot_train_say_what_to_write(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(DIM, 8, EXPERTS, **options)  # type: ignore[arg-type]
