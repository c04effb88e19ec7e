"""What it costs the backward of ``ContrastiveLoss`` to tell how far its two halves agree, one process, float32.

Gradients have to be the same bit by bit first. Times are ratios within one run of interleaved rounds.

    PYTHONPATH=. python tests/benchmarks/direction_sums.py
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_moeclip.modules import ContrastiveLoss
from tests.benchmarks import measure

SHAPES = {(1024, 256): 30, (4096, 512): 10}  # rows and width: rounds
THREADS = 2


def features(num: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, num, dim, generator=generator)
    return [image.requires_grad_(), (0.3 * image + noise).detach().requires_grad_()]


def backward(loss: ContrastiveLoss, leaves: list[Tensor], *, asks: bool) -> tuple[float, list[Tensor]]:
    """Seconds of the backward alone, and the gradients."""
    loss.wants_directions = asks
    value = loss(*leaves)
    began = time.perf_counter()
    grads = torch.autograd.grad(value, [*leaves, loss.logit_scale])
    seconds = time.perf_counter() - began
    assert (loss.pop_direction_sums() is not None) == asks
    return seconds, list(grads)


def main() -> None:
    torch.set_num_threads(THREADS)
    rows = []
    for (num, dim), rounds in SHAPES.items():
        loss, leaves = ContrastiveLoss(), features(num, dim)
        without, asked = (backward(loss, leaves, asks=asks)[1] for asks in (False, True))
        if not all(a.equal(b) for a, b in zip(without, asked, strict=True)):
            raise SystemExit("asking changes the gradients: no time is reported")

        def timed(loss: ContrastiveLoss, leaves: list[Tensor], *, asks: bool) -> Callable[[], float]:
            return lambda: backward(loss, leaves, asks=asks)[0]

        arms = {name: timed(loss, leaves, asks=name == "asked") for name in ("asked", "without")}
        seconds = measure.take_turns(arms, rounds=rounds)
        figure = measure.paired_ratio(seconds["asked"], seconds["without"])
        rows.append(measure.row(f"backward of {num} x {dim}: asked / not asked", figure, rounds=rounds, ranks=1))
    measure.write_rows(measure.RESULTS / "direction_sums.csv", rows)


if __name__ == "__main__":
    main()
