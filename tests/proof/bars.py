"""The list of bars. A bar names the command that measures it and the number of its row that must hold."""

import operator
from dataclasses import dataclass
from typing import Literal

__all__ = ["BARS", "BESIDE", "Bar"]

Comparison = Literal["<=", "<", ">="]
_OPERATORS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True)
class Bar:
    """One number that a measurement has to reach.

    Attributes:
        name: what is promised.
        command: arguments of Python that write the row; bars with the same command share one run.
        csv: file under tests/benchmarks/results.
        row: how the row's ``name`` begins; the last such row counts.
        column: where the number is.
        comparison: between the number and the bound.
        bound: the promise.
    """

    name: str
    command: tuple[str, ...]
    csv: str
    row: str
    column: str
    comparison: Comparison
    bound: float

    def holds(self, value: float) -> bool:
        """Whether ``value`` keeps the promise; NaN does not."""
        return bool(_OPERATORS[self.comparison](value, self.bound))


def _measured(module: str, name: str, row: str, comparison: Comparison, bound: float, *arguments: str) -> Bar:
    command = ("-m", f"tests.{module}", *arguments)
    return Bar(name, command, f"{module.rpartition('.')[2]}.csv", row, "median_ratio", comparison, bound)


STEP, MEMORY, STASH, LOSS, MOE = (
    f"benchmarks.{name}" for name in ("step_time", "gradient_memory", "stash_memory", "contrastive_loss", "moe_layer")
)
PRECISION, LOW, SNAPSHOT, CALLBACKS, DIRECTIONS = (
    f"benchmarks.{name}" for name in ("precision_time", "low_precision", "snapshot", "callbacks_time", "direction_sums")
)
RECALL, BROWSER, STABLE = "proof.example_recall", "proof.heatmap_in_browser", "proof.stability"
VERIFY = "proof.verify_bars"
COPIES = "snapshot time / one memory copy of as many bytes"

BARS = [
    _measured(STEP, "step time, ours / stock DDP", "step: ours / stock DDP(find_unused)", "<=", 1.03),
    _measured(
        STEP,
        "step time with statistics, ours / stock DDP",
        "step: ours with statistics / stock DDP",
        "<=",
        1.03,
    ),
    _measured(STEP, "cost of synchronisation, naive / ours", "sync: (naive - no sync) / (ours - no sync)", ">=", 2.8),
    _measured(STEP, "that cost stands out of its spread", "sync: (ours - no sync) / its spread", ">=", 3.0),
    _measured(MEMORY, "gradients and buckets / gradients", "memory: gradients and buckets after backward", "<=", 1.05),
    _measured(STASH, "gradients and communication / naive loop", "memory, ep=1: held / naive", "<=", 0.45),
    _measured(STASH, "the same with spread experts", "memory, ep=2: held / naive", "<=", 0.45),
    _measured(STASH, "bytes by which it changes in 200 steps", "memory, ep=1: bytes of change", "<=", 0.0),
    _measured(STASH, "bytes of change with spread experts", "memory, ep=2: bytes of change", "<=", 0.0),
    _measured(LOSS, "loss memory, ours / dense", "peak extra memory of ours / dense shared", "<=", 1 / 6),
    _measured(LOSS, "loss time, ours / dense", "time of ours / dense shared", "<=", 1.05),
    _measured(LOSS, "loss time, ours / dense of two products", "time of ours / dense twice", "<=", 1.1),
    _measured(MOE, "MoE time, ours / best by hand", "ours/best_by_hand", "<=", 1.05),
    _measured(MOE, "MoE time, ours / Mixtral block of the same widths", "ours/mixtral_equal_hidden", "<=", 0.85),
    _measured(PRECISION, "step time in float32, now / before loss scales", "step 32-true: now / ", "<=", 1.03),
    _measured(PRECISION, "step time in bf16-mixed, now / before loss scales", "step bf16-mixed: now / ", "<=", 1.03),
    _measured(LOW, "zeros among a head's gradients, one scale / its own", "underflow: one scale / own", ">=", 10.0),
    _measured(LOW, "steps skipped for spikes, own scale / one scale", "overflow: own scale / one scale", "<", 1.0),
    _measured(LOW, "decrease missed by bf16 with masters / float32's", "masters: decrease missed", "<=", 0.05),
    _measured(LOW, "decrease of plain bf16-true / float32's", "masters: decrease of plain", "<", 0.5),
    _measured(CALLBACKS, "step time, all callbacks / none", "step: all callbacks / none, sum", "<=", 1.05),
    _measured(DIRECTIONS, "loss's backward, with the cosine / without", "backward of 4096 x 512", "<=", 2.0),
    _measured(SNAPSHOT, COPIES, "snapshot: take / copy, 1 thread", "<=", 2.0),
    _measured(SNAPSHOT, f"{COPIES}, torch's threads", "snapshot: take / copy, torch's number", "<=", 2.0),
    _measured(RECALL, "held-out recall at 1", "recall at 1", ">=", 0.80),
    _measured(RECALL, "training time in seconds", "seconds", "<", 300.0),
    _measured(RECALL, "mean of three seeds to one process, points", "difference of means", "<=", 3.0),
    _measured(RECALL, "each of three seeds to one process, points", "largest difference", "<=", 6.0),
    _measured(RECALL, "mean of resumed with ep=1 to one process, points", "difference of resumed means", "<=", 3.0),
    _measured(RECALL, "each of resumed with ep=1 to one process, points", "difference of resumed to", "<=", 6.0),
    _measured(STABLE, "shuffled pairs, steps until the loss tells", "detection: steps until the loss", "<=", 10.0),
    _measured(STABLE, "shuffled pairs, steps until the cosine tells", "detection: steps until the cosine", "<=", 10.0),
    _measured(STABLE, "flagged steps of three healthy runs", "detection: flagged steps of healthy", "<=", 0.0),
    _measured(STABLE, "rollbacks, resyncs in 2,000 healthy steps", "noise, float32: rollbacks", "<=", 0.0),
    _measured(STABLE, "the same in float16 with a loss scale", "noise, float16: rollbacks", "<=", 0.0),
    _measured(VERIFY, "planted faults named with the right cause / all", "verify: planted faults told", ">=", 1.0),
    _measured(VERIFY, "correct modules that verify finds fault with", "verify: false alarms", "<=", 0.0),
    _measured(VERIFY, "seconds until verify tells a deadlock", "verify: seconds until a deadlock", "<=", 30.0),
    _measured(VERIFY, "example, largest error of 5 layouts / 1e-10", "verify: example, largest error", "<=", 1.0),
    _measured(VERIFY, "example, seconds of verify", "verify: example, seconds of the longest", "<", 60.0),
    _measured(BROWSER, "heatmap found in TensorBoard by a browser", "heatmap in TensorBoard", ">=", 1.0),
]


def _of(name: str) -> Bar:
    """The first bar of a results file."""
    return next(bar for bar in BARS if bar.csv == f"{name}.csv")


# figures that say how far a bar is from what is possible: (name, bar of the same run, how the row's name begins)
BESIDE = [
    (
        "cost of synchronisation, ours / one flat all-reduce",
        _of("step_time"),
        "sync: (ours - no sync) / flat all-reduce",
    ),
    (
        "gradient memory at its peak in backward / gradients",
        _of("gradient_memory"),
        "memory: gradients and buckets, peak",
    ),
    ("MoE time, ours / Mixtral block of equal FLOPs (narrower)", _of("moe_layer"), "ours/mixtral_equal_flops"),
    ("step time in 16-mixed, now / before loss scales", _of("precision_time"), "step 16-mixed: now / "),
    ("step time in 16-mixed, local / unified", _of("precision_time"), "step 16-mixed: local / unified"),
    ("MoE, time of bare GEMMs of the same FLOPs / ours", _of("moe_layer"), "share_of_bare_gemms"),
    ("step time, all callbacks / none, typical step", _of("callbacks_time"), "step: all callbacks / none, median"),
    ("loss's backward of 1024 x 256, with the cosine / without", _of("direction_sums"), "backward of 1024 x 256"),
    ("recall at 1, 30 shuffled batches, rolled back", _of("stability"), "recall: shuffled, rolled back"),
    ("recall at 1, 30 shuffled batches, only watched", _of("stability"), "recall: shuffled, watched"),
    ("recall at 1, two spikes of the gradient, rolled back", _of("stability"), "recall: spikes, rolled back"),
    ("recall at 1, two spikes of the gradient, only watched", _of("stability"), "recall: spikes, watched"),
    ("deviation of the cosine, shuffled, rolled back", _of("stability"), "cosine: shuffled, rolled back"),
    ("deviation of the cosine, shuffled, only watched", _of("stability"), "cosine: shuffled, watched"),
    ("deviation of the cosine, spikes, rolled back", _of("stability"), "cosine: spikes, rolled back"),
    ("deviation of the cosine, spikes, only watched", _of("stability"), "cosine: spikes, watched"),
]
