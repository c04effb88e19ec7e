"""Forward and backward of a MoE layer against hand-written ones, transformers' Mixtral block and its bare GEMMs.

    PYTHONPATH=. python -m tests.benchmarks.moe_layer --rounds 30

2048 tokens, 512 -> 2048, 8 experts, top-2, fp32, two threads. Outputs and gradients are compared first. Arms are
interleaved and each round gives a ratio: on a shared machine milliseconds mean nothing. Mixtral's experts have three
matrices where ours have two, so it is measured at equal FLOPs (hidden width 2 / 3 of ours) and at equal hidden width
(1.5 times our FLOPs).
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_moeclip.modules import MoE
from tests.benchmarks import measure

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 2048, 512, 2048, 8, 2
EQUAL_FLOPS_HIDDEN = 1364  # 2 / 3 of 2048, rounded so that strides stay multiples of 16 bytes
RESULTS = measure.RESULTS / "moe_layer.csv"


def route(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = functional.linear(x, moe.router.weight).softmax(-1).topk(TOP_K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def by_loop(moe: MoE, x: Tensor) -> Tensor:
    """One expert after another on the tokens that chose it."""
    weights, chosen = route(moe, x)
    y = torch.zeros_like(x)
    # unbind: indexing the fused weight would make a whole gradient of zeros for every expert
    for expert, (w_in, w_out) in enumerate(zip(moe.w_in.unbind(), moe.w_out.unbind(), strict=True)):
        token, slot = torch.where(chosen == expert)
        if len(token):
            out = functional.gelu(x[token] @ w_in) @ w_out
            y = y.index_add(0, token, out * weights[token, slot, None])
    return y


def by_grouped_mm(moe: MoE, x: Tensor) -> Tensor:
    """Rows sorted by expert, grouped_mm, sum over the choices of a token."""
    weights, chosen = route(moe, x)
    order = chosen.view(-1).argsort(stable=True)
    ends = torch.bincount(chosen.view(-1), minlength=EXPERTS).cumsum(0).to(torch.int32)
    hidden = functional.gelu(functional.grouped_mm(x[order // TOP_K], moe.w_in, offs=ends))
    out = functional.grouped_mm(hidden, moe.w_out, offs=ends) * weights.view(-1)[order, None]
    return torch.zeros_like(x).index_add(0, order // TOP_K, out)


def by_bmm(moe: MoE, x: Tensor) -> Tensor:
    """Each expert's rows padded to the fullest one."""
    weights, chosen = route(moe, x)
    order = chosen.view(-1).argsort(stable=True)
    counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
    capacity = int(counts.max())
    expert = chosen.view(-1)[order]
    place = expert * capacity + torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
    rows = x.new_zeros(EXPERTS * capacity, DIM).index_copy(0, place, x[order // TOP_K])
    hidden = functional.gelu(torch.bmm(rows.view(EXPERTS, capacity, DIM), moe.w_in))
    out = torch.bmm(hidden, moe.w_out).view(-1, DIM)[place] * weights.view(-1)[order, None]
    return torch.zeros_like(x).index_add(0, order // TOP_K, out)


def mixtral(hidden: int) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=DIM, intermediate_size=hidden, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def bare_gemms() -> Callable[[], None]:
    """The six products of forward and backward for perfectly balanced rows, and nothing else."""
    rows = TOKENS * TOP_K
    narrow, wide = torch.randn(rows, DIM), torch.randn(rows, HIDDEN)
    up, down = torch.randn(DIM, HIDDEN), torch.randn(HIDDEN, DIM)

    def run() -> None:
        for left, right in ((narrow, up), (wide, down), (narrow, down.t()), (wide, up.t())):
            left @ right
        narrow.t() @ wide
        wide.t() @ narrow

    return run


def step(layer: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor, cotangent: Tensor) -> None:
    for tensor in (x, *parameters):
        tensor.grad = None
    layer(x).backward(cotangent)


def check_equal(moe: MoE, arms: dict[str, Callable[[Tensor], Tensor]], x: Tensor, cotangent: Tensor) -> None:
    """Outputs and gradients of the layer and the hand-written ones within float32 rounding of their longest sum."""
    results = {}
    for name, arm in arms.items():
        step(arm, list(moe.parameters()), x, cotangent)
        results[name] = [x.grad, *(p.grad for p in moe.parameters())]
    for name, found in results.items():
        for mine, theirs in zip(results["ours"], found, strict=True):
            assert mine is not None
            assert theirs is not None
            error = float((mine - theirs).norm() / mine.norm())
            assert error < TOKENS**0.5 * torch.finfo(torch.float32).eps, f"{name}: {error}"


def time_arms(rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round."""
    torch.manual_seed(0)
    moe = MoE(DIM, HIDDEN, EXPERTS, top_k=TOP_K)
    x, cotangent = torch.randn(TOKENS, DIM, requires_grad=True), torch.randn(TOKENS, DIM)
    hand: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": moe,
        "loop": lambda x: by_loop(moe, x),
        "grouped_mm": lambda x: by_grouped_mm(moe, x),
        "bmm": lambda x: by_bmm(moe, x),
    }
    check_equal(moe, hand, x, cotangent)
    arms: dict[str, Callable[[], None]] = {
        name: (lambda arm=arm: step(arm, list(moe.parameters()), x, cotangent)) for name, arm in hand.items()
    }
    for name, hidden in (("mixtral_equal_flops", EQUAL_FLOPS_HIDDEN), ("mixtral_equal_hidden", HIDDEN)):
        block = mixtral(hidden)
        arms[name] = lambda block=block: step(
            lambda x: block(x.unsqueeze(0)).squeeze(0), list(block.parameters()), x, cotangent
        )
    arms["bare_gemms"] = bare_gemms()
    return measure.take_turns(arms, rounds=rounds, warmup=1)


def figures(seconds: dict[str, list[float]]) -> dict[str, measure.Figure]:
    """Paired ratios by row name; the best by hand is the one with the lowest median."""
    by_hand = min(("loop", "grouped_mm", "bmm"), key=lambda name: statistics.median(seconds[name]))
    ours = seconds["ours"]
    rows = {f"ours/best_by_hand({by_hand})": measure.paired_ratio(ours, seconds[by_hand])}
    others = [name for name in seconds if name not in ("ours", "bare_gemms")]
    rows |= {f"ours/{name}": measure.paired_ratio(ours, seconds[name]) for name in others}
    return rows | {"share_of_bare_gemms": measure.paired_ratio(seconds["bare_gemms"], ours)}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    torch.set_num_threads(2)
    rounds = parser.parse_args().rounds
    found = figures(time_arms(rounds))
    measure.write_rows(RESULTS, [measure.row(name, figure, rounds=rounds, ranks=1) for name, figure in found.items()])


if __name__ == "__main__":
    main()
