"""Contrastive loss at 8192 x 512 float32, forward and backward: ours against the dense loss, one process, 2 threads.

Two dense losses: ``shared`` takes both cross-entropies from one matrix of logits and its transpose; ``twice`` makes a
matrix of logits for each direction (as open_clip does), which costs one product more and spares the transposed passes.
Equality with ``shared`` comes first. Times are ratios within one run of interleaved rounds. Memory is the peak
resident set of a fresh process beyond what it held, inputs included, just before the loss (Linux).

    PYTHONPATH=. python tests/benchmarks/contrastive_loss.py
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from lightning_moeclip.modules import contrastive_loss
from tests.benchmarks import measure

NUM, DIM, THREADS = 8192, 512, 2
TIME_ROUNDS, MEMORY_ROUNDS = 12, 3
RESULTS = measure.RESULTS / "contrastive_loss.csv"
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


def time_figures() -> dict[str, measure.Figure]:
    """Ours to each dense loss, over interleaved rounds."""
    leaves = inputs()

    def timed(loss: Loss) -> Callable[[], None]:
        return lambda: (run(loss, leaves), None)[1]

    seconds = measure.take_turns({name: timed(loss) for name, loss in ARMS.items()}, rounds=TIME_ROUNDS, warmup=1)
    return {name: measure.paired_ratio(seconds["ours"], seconds[name]) for name in ("shared", "twice")}


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


def memory_figures() -> dict[str, measure.Figure]:
    """Our peak to that of each dense loss, over rounds of fresh processes."""
    context = multiprocessing.get_context("spawn")
    peaks: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(MEMORY_ROUNDS):
        for name, found in peaks.items():
            with context.Pool(1) as pool:
                found.append(pool.apply(peak_bytes, (name,)))
    print({name: [f"{peak / 2**20:.0f} MiB" for peak in found] for name, found in peaks.items()}, flush=True)
    return {name: measure.paired_ratio(peaks["ours"], peaks[name]) for name in ("shared", "twice")}


def main() -> None:
    torch.set_num_threads(THREADS)
    check_equality()
    rows = [
        *(
            measure.row(f"time of ours / dense {name}", figure, rounds=TIME_ROUNDS, ranks=1)
            for name, figure in time_figures().items()
        ),
        *(
            measure.row(f"peak extra memory of ours / dense {name}", figure, rounds=MEMORY_ROUNDS, ranks=1)
            for name, figure in memory_figures().items()
        ),
    ]
    measure.write_rows(RESULTS, rows)


if __name__ == "__main__":
    main()
