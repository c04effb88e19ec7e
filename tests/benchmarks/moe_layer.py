"""Forward and backward of a MoE layer against hand-written ones, transformers' Mixtral block and its bare GEMMs.

    PYTHONPATH=. python -m tests.benchmarks.moe_layer --rounds 30

2048 tokens, 512 -> 2048, 8 experts, top-2, fp32, two threads. Outputs and gradients are compared first. Arms are
interleaved and each round gives a ratio: on a shared machine milliseconds mean nothing. Mixtral's experts have three
matrices where ours have two, so it is measured at equal FLOPs (hidden width 2 / 3 of ours) and at equal hidden width
(1.5 times our FLOPs).
"""

import argparse
import csv
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_moeclip.modules import MoE

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 2048, 512, 2048, 8, 2
EQUAL_FLOPS_HIDDEN = 1364  # 2 / 3 of 2048, rounded so that strides stay multiples of 16 bytes
RESULTS = Path(__file__).parent / "results" / "moe_layer.csv"


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


def measure(rounds: int) -> dict[str, list[float]]:
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
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        # each round starts at another arm: none is always the one after the slowest
        names = list(arms)[index % len(arms) :] + list(arms)[: index % len(arms)]
        for name in names:
            start = time.perf_counter()
            arms[name]()
            if index >= 1:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    ours = seconds["ours"]
    by_hand = min(("loop", "grouped_mm", "bmm"), key=lambda name: statistics.median(seconds[name]))
    rows = {f"ours/{name}": [a / b for a, b in zip(ours, seconds[name], strict=True)] for name in seconds}
    del rows["ours/ours"]
    rows["share_of_bare_gemms"] = [1 / ratio for ratio in rows.pop("ours/bare_gemms")]
    return {f"ours/best_by_hand({by_hand})": rows[f"ours/{by_hand}"], **rows}


def write(rows: dict[str, list[float]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu x{torch.get_num_threads()}"
    is_new = not RESULTS.exists()
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", newline="") as file:
        table = csv.writer(file)
        if is_new:
            table.writerow(["name", "median_ratio", "p20", "p80", "rounds", "device", "torch", "commit"])
        for name, values in rows.items():
            cuts = statistics.quantiles(values, n=5)
            numbers = [f"{number:.3f}" for number in (statistics.median(values), cuts[0], cuts[3])]
            table.writerow([name, *numbers, len(values), device, torch.__version__, commit.stdout.strip()])
            print(f"{name:36s} median {numbers[0]}  p20 {numbers[1]}  p80 {numbers[2]}")


def main() -> None:
    """Measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    torch.set_num_threads(2)
    rows = ratios(measure(parser.parse_args().rounds))
    write(rows)


if __name__ == "__main__":
    main()
