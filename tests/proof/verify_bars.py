"""``verify`` on every planted fault, on what is right, and on the example in all layouts of 2 and 4 ranks.

``python -m tests.proof.verify_bars`` writes tests/benchmarks/results/verify_bars.csv; some minutes on two cores.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_moeclip.diagnosis.verify import verify
from lightning_moeclip.diagnosis.verify_report import VerifyReport
from tests.benchmarks import measure
from tests.diagnosis import planted

UNUSED = "ddp_find_unused_parameters_true"
LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
ERROR = 1e-10  # of the example, in which its largest error is told

_PAIR = [f"{tower}.{kind}" for tower in ("image", "text") for kind in ("weight", "bias")]
_ALL = [*_PAIR, "logit_scale"]


@dataclass(frozen=True)
class Fault:
    """A planted fault: how to run it, and which code each parameter must have."""

    factory: Callable[[], Any]
    strategy: Any
    codes: Mapping[str, str]
    is_deadlock: bool = False


def _each(names: list[str], code: str) -> dict[str, str]:
    return dict.fromkeys(names, code)


ROUTED = [f"{part}.{kind}" for part in ("stem", "experts.0", "experts.1") for kind in ("weight", "bias")]
IDLE = {
    **_each([*ROUTED, "router.weight"], "not_reduced"),
    **_each(["experts.2.weight", "experts.2.bias"], "missing_on_ranks"),
}
FAULTS = {
    "ddp, an expert idle on one rank": Fault(planted.idle_on_one_rank, "ddp", IDLE, is_deadlock=True),
    "ddp_find_unused, a scale outside": Fault(planted.bare_scale, UNUSED, {"loss.logit_scale": "not_reduced"}),
    "ModelParallelStrategy, dense beside DTensors": Fault(
        planted.sharded, planted.model_parallel, _each(["stem.weight", "stem.bias"], "not_reduced")
    ),
    "gathered without gradient": Fault(planted.gathered, "moeclip", _each(_PAIR, "missing")),
    "gathered without gradient, ddp": Fault(planted.gathered, UNUSED, _each(_PAIR, "missing")),
    "gathered, own rows with gradient": Fault(planted.own_slot, "moeclip", _each(_PAIR, "own_rows")),
    "own rows alone": Fault(planted.own_rows, "ddp", _each(_ALL, "step")),
    "loss x W": Fault(planted.times_world, "moeclip", _each(_ALL, "loss_scaled")),
    "loss x W, ddp": Fault(planted.times_world, "ddp", _each(_ALL, "loss_scaled")),
    "experts averaged over replicas": Fault(
        planted.spread, planted.averaged_over_replicas, _each(["moe.w_in", "moe.w_out"], "times_expert_parallel_size")
    ),
    "one rank's router frozen": Fault(planted.frozen_router, "moeclip", {"router.weight": "frozen"}),
    "one rank's router frozen, ddp": Fault(planted.frozen_router, "ddp", {"router.weight": "frozen"}),
    "one rank's router frozen later": Fault(planted.frozen_later, UNUSED, {"router.weight": "frozen"}),
    "K x logit_scale": Fault(planted.counted_scale, "moeclip", {"logit_scale": "counted_times"}),
    "K x logit_scale, ddp": Fault(planted.counted_at_once, "ddp", {"logit_scale": "counted_times"}),
    "NaN on one rank": Fault(planted.spoiled, "moeclip", _each(_ALL, "nan")),
    "random numbers in the step": Fault(planted.noisy, "moeclip", _each(_ALL, "random")),
    "no seed governs it": Fault(planted.unstable, "moeclip", _each(_ALL, "not_deterministic")),
    "BatchNorm": Fault(planted.normed, "moeclip", _each([*_ALL, "norm.weight", "norm.bias"], "batch_norm")),
    "a routing tie": Fault(
        planted.tied, "moeclip", _each(["moe.w_in", "moe.w_out", "moe.router.weight"], "routing_tie")
    ),
}  # fmt: skip
# what a strategy can mend, and modules without a fault: none may be reported
RIGHT: dict[str, tuple[Callable[[], Any], Any]] = {
    "ours, an expert idle on one rank": (planted.idle_on_one_rank, "moeclip"),
    "ours, experts idle on each rank": (planted.idle_on_each_rank, "moeclip"),
    "ours, a scale outside": (planted.bare_scale, "moeclip"),
    "ours, spread experts": (planted.spread, "moeclip"),
    "ours, what was DTensors": (planted.sharded, "moeclip"),
    "ours, steps past Lightning": (planted.raw_step, "moeclip"),
    "ours, a slow rank": (planted.slow, "moeclip"),
    "ddp, a slow rank": (planted.slow, "ddp"),
    "ddp, steps past Lightning": (planted.raw_step, "ddp"),
    "ddp_find_unused, an expert idle on one rank": (planted.idle_on_one_rank, UNUSED),
    "ddp_find_unused, experts idle on each rank": (planted.idle_on_each_rank, UNUSED),
}


def is_told(fault: Fault, report: VerifyReport) -> bool:
    """Whether each parameter is named with its cause, no other is, and a deadlock is one."""
    found = {f.name: f.code for f in report.findings if f.name and f.code != "follows"}
    waits = all(w.operation.partition("(")[0] in ("all_reduce", "broadcast") for w in report.deadlock)
    return found == dict(fault.codes) and bool(report.deadlock) == fault.is_deadlock and waits


def run_faults(rows: list[measure.Row]) -> None:
    told, deadlock_s = 0, 0.0
    for name, fault in FAULTS.items():
        began = time.monotonic()
        report = verify(fault.factory, strategy=fault.strategy)
        took_s = time.monotonic() - began
        is_right = is_told(fault, report)
        told += is_right
        deadlock_s = max(deadlock_s, took_s) if fault.is_deadlock else deadlock_s
        print(f"{name:46} {'told' if is_right else 'NOT TOLD'} in {took_s:.1f} s", flush=True)
        if not is_right:
            print(report, flush=True)
    rows.append(_row("verify: planted faults told with their cause / all", told / len(FAULTS), 2))
    rows.append(_row("verify: seconds until a deadlock is told", deadlock_s, 2))


def run_right(rows: list[measure.Row]) -> None:
    alarms = 0
    for name, (factory, strategy) in RIGHT.items():
        report = verify(factory, strategy=strategy, expert_parallel_size=2 if name == "ours, spread experts" else 1)
        alarms += not report.ok
        print(f"{name:46} {'passed' if report.ok else report}", flush=True)
    rows.append(_row("verify: false alarms", alarms, 2))


def run_example(rows: list[measure.Row]) -> None:
    """Through the command, as a user does, in the folder of the examples."""
    longest_s = largest = 0.0
    for world_size, size in LAYOUTS:
        options = ["--world-size", str(world_size), "--expert-parallel-size", str(size), "--tolerance", str(ERROR)]
        command = [sys.executable, "-m", "lightning_moeclip", "verify", "emoji_clip.verification:make_case", *options]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--json"],
            cwd=measure.ROOT / "examples",
            env={**os.environ, "PYTHONPATH": str(measure.ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        took_s = time.monotonic() - began
        error = _largest(done.stdout)
        print(f"example, {world_size} ranks, ep={size}: {error:.1e} in {took_s:.1f} s", flush=True)
        longest_s, largest = max(longest_s, took_s), max(largest, error)
        rows.append(
            _row(f"verify: example, {world_size} ranks, ep={size}, largest error / 1e-10", error / ERROR, world_size)
        )
    rows.append(_row("verify: example, largest error of all layouts / 1e-10", largest / ERROR, 4))
    rows.append(_row("verify: example, seconds of the longest", longest_s, 4))


def _largest(told: str) -> float:
    report = json.loads(told)
    return max(float(report[name]) for name in ("loss", "gradients", "clip_norm", "parameters"))


def _row(name: str, value: float, ranks: int) -> measure.Row:
    return measure.row(name, measure.exact(value), rounds=1, ranks=ranks)


def main() -> None:
    rows: list[measure.Row] = []
    run_example(rows)
    run_right(rows)
    run_faults(rows)
    measure.write_rows(measure.RESULTS / "verify_bars.csv", rows)


if __name__ == "__main__":
    main()
