"""Contrastive loss at 8192 x 512 float32, forward and backward: ours against the dense loss, one process, 2 threads.

Two dense losses: ``shared`` takes both cross-entropies from one matrix of logits and its transpose; ``twice`` makes a
matrix of logits for each direction (as open_clip does), which costs one product more and spares the transposed passes.
Equality with ``shared`` comes first. Times are ratios within one run of interleaved rounds. Memory is the peak
resident set of a fresh process beyond what it held, inputs included, just before the loss (Linux).

    PYTHONPATH=. python tests/benchmarks/contrastive_loss.py
"""

import csv
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from lightning_moeclip.modules import contrastive_loss

NUM, DIM, THREADS = 8192, 512, 2
TIME_ROUNDS, MEMORY_ROUNDS = 7, 3
RESULTS = Path(__file__).parent / "results" / "contrastive_loss.csv"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_shared(image: Tensor, text: Tensor, log_scale: Tensor) -> Tensor:
    logits = log_scale.exp() * image @ text.T
    labels = torch.arange(len(image))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def dense_twice(image: Tensor, text: Tensor, log_scale: Tensor) -> Tensor:
    labels = torch.arange(len(image))
    by_image, by_text = log_scale.exp() * image @ text.T, log_scale.exp() * text @ image.T
    return (cross_entropy(by_image, labels) + cross_entropy(by_text, labels)) / 2


ARMS: dict[str, Loss] = {"ours": contrastive_loss, "shared": dense_shared, "twice": dense_twice}


def inputs(num: int = NUM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, num, DIM, generator=generator)
    leaves = [normalize(image, dim=1), normalize(0.3 * image + noise, dim=1), torch.tensor(1 / 0.07).log()]
    return [x.requires_grad_() for x in leaves]


def run(loss: Loss, leaves: list[Tensor]) -> list[Tensor]:
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def check_equality() -> None:
    leaves = inputs()
    ours, dense = (run(ARMS[name], leaves) for name in ("ours", "shared"))
    for name, x, y in zip(("loss", "image", "text", "logit_scale"), ours, dense, strict=True):
        error = ((x - y).norm() / y.norm()).item()
        print(f"relative difference of {name}: {error:.1e}")
        if not error <= 1e-5:
            raise SystemExit(f"{name} differs by {error:.1e}: no time is reported")


def time_rounds() -> dict[str, list[float]]:
    """Ratios of ours to each dense loss, one per round."""
    leaves = inputs()
    for loss in ARMS.values():
        run(loss, leaves)
    ratios: dict[str, list[float]] = {"shared": [], "twice": []}
    for _ in range(TIME_ROUNDS):
        seconds = {}
        for name, loss in ARMS.items():
            start = time.perf_counter()
            run(loss, leaves)
            seconds[name] = time.perf_counter() - start
        print({name: f"{value:.2f} s" for name, value in seconds.items()}, flush=True)
        for name, found in ratios.items():
            found.append(seconds["ours"] / seconds[name])
    return ratios


def peak_bytes(name: str) -> int:
    """Peak resident set of forward and backward beyond the set held before; for a fresh process."""
    torch.set_num_threads(THREADS)
    run(ARMS[name], inputs(64))  # libraries load their parts on first use
    leaves = inputs()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    run(ARMS[name], leaves)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_rounds() -> dict[str, list[float]]:
    """Ratios of our peak to that of each dense loss, one per round of fresh processes."""
    ratios: dict[str, list[float]] = {"shared": [], "twice": []}
    context = multiprocessing.get_context("spawn")
    for _ in range(MEMORY_ROUNDS):
        peaks = {}
        for name in ARMS:
            with context.Pool(1) as pool:
                peaks[name] = pool.apply(peak_bytes, (name,))
        print({name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()}, flush=True)
        for name, found in ratios.items():
            found.append(peaks["ours"] / peaks[name])
    return ratios


def row(name: str, ratios: list[float]) -> dict[str, object]:
    p20, *_, p80 = statistics.quantiles(ratios, n=5, method="inclusive")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "name": name,
        "median_ratio": f"{statistics.median(ratios):.3f}",
        "p20": f"{p20:.3f}",
        "p80": f"{p80:.3f}",
        "rounds": len(ratios),
        "device": f"cpu, {torch.backends.cpu.get_cpu_capability()}, {THREADS} threads of {os.cpu_count()}",
        "torch_version": torch.__version__,
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    check_equality()
    times, peaks = time_rounds(), memory_rounds()
    rows = [row(f"time of ours / dense {name}", found) for name, found in times.items()]
    rows += [row(f"peak extra memory of ours / dense {name}", found) for name, found in peaks.items()]
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    for found in rows:
        print(found)


if __name__ == "__main__":
    main()
