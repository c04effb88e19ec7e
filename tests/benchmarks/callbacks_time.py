"""Step time of the emoji example with all callbacks at their defaults against none.

Run ``python -m tests.benchmarks.callbacks_time``. Both arms are real fits on two ranks of the same module, data and
seed, as in ``step_time.py``, each with a TensorBoard logger; they take turns in one run. What callbacks do only now and
then would not show in a median: the figure is the ratio of the sums over all rounds.

The floor, counted for the 1.34 M float32 parameters of the example on 2 ranks, per step: the share of a norm (half of
the gradients read once, 2.7 MB a rank), one all-reduce of a few numbers and one of a flag, and the half of the loss
that the cosine needs (two products of [128, 256] by [256, 128], 17 MFLOP of a step's 40 GFLOP). Every 50 steps:
gradients read once before and once after the reduction, and gradients, weights and moments read once for their digests
(21 MB). Every 100 steps: weights and moments copied once (16 MB). Every 500 steps: a picture.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import pl
from lightning_moeclip.callbacks import CosineRollback, ExpertLoadMonitor, ResidualResync, VarianceHeatmap
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure
from tests.benchmarks.emoji import batches, make_task
from tests.benchmarks.step_time import Arm

BAR = 1.05


@on_ranks(2, timeout_s=1500.0)
def measure_steps(rank: Rank, rounds: int, warmup: int, folder: str) -> dict[str, Any]:
    data = batches(rank.index, rank.world_size, rounds + warmup + 1)
    callbacks = [VarianceHeatmap(), ResidualResync(), CosineRollback(), ExpertLoadMonitor()]
    fits = {}
    for name, chosen in {"none": [], "all": callbacks}.items():
        logger = pl.loggers.TensorBoardLogger(Path(folder) / name, name=None)
        strategy = MoEClipStrategy(expert_parallel_size=2, towers={"image": "model.visual", "text": "model.text"})
        arguments = {"logger": logger, "callbacks": chosen}
        fits[name] = Arm(strategy, data, module=make_task(total_steps=len(data)), arguments=arguments)
    arms = {name: fit.step for name, fit in fits.items()}
    seconds = measure.take_turns(arms, rounds=rounds, warmup=warmup, before=dist.barrier)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for fit in fits.values():
        fit.step()  # the last batch: the fit ends
    weights = [torch.cat([p.detach().flatten() for p in fit.module.parameters()]) for fit in fits.values()]
    return {
        "seconds": dict(zip(seconds, slowest.tolist(), strict=True)),
        "equal": torch.equal(*weights),
        "files": sorted(path.name for path in (Path(folder) / "all").rglob("*")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=510)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="print only, and leave the results file as it is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure_steps.launch(  # type: ignore[attr-defined]
            rounds=arguments.rounds, warmup=arguments.warmup, folder=folder
        )[0]
    if not found["equal"]:
        raise SystemExit("Looking on has changed the weights: the arms end at others. Nothing was written.")
    seconds = {name: torch.tensor(values, dtype=torch.float64) for name, values in found["seconds"].items()}
    for name, values in seconds.items():
        low, mid, high = torch.quantile(values, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).mul(1000).tolist()
        print(f"{name:5} median {mid:7.1f} ms, p20 {low:7.1f}, p80 {high:7.1f}, sum {values.sum():.1f} s")
    figure, _ = measure.bootstrap(
        lambda draw: seconds["all"][draw].sum(-1) / seconds["none"][draw].sum(-1), arguments.rounds
    )
    typical = measure.paired_ratio(found["seconds"]["all"], found["seconds"]["none"])
    rows = [
        measure.row("step: all callbacks / none, sum over rounds", figure, rounds=arguments.rounds, ranks=2),
        measure.row("step: all callbacks / none, median of rounds", typical, rounds=arguments.rounds, ranks=2),
    ]
    measure.write_rows(None if arguments.keep else measure.RESULTS / "callbacks_time.csv", rows)


if __name__ == "__main__":
    main()
