"""Step time of this version against that of an earlier commit, by precision, and of local loss scaling.

Run ``python -m tests.benchmarks.precision_time``. Each arm is a real ``Trainer.fit``, as in ``step_time.py``; all take
turns in one run. The earlier package is unpacked from git under another name, so that both live in one process.

* ``<precision>``: this version; ``<precision> before``: commit ``BEFORE``, which scaled the loss by one number too, and
  knew neither regions nor masters.
* ``16-mixed local``: with a scale for each projection head.

The floor of "16-mixed" over "32-true" in what is ours is one read and write of every gradient to unscale it (8 bytes an
element, 59 MB) and one all-reduce of seven numbers per step; every tenth step reads all gradients once more to count
zeros.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure
from tests.benchmarks.step_time import Arm
from tests.benchmarks.two_towers import batches

BEFORE = "4d5b660"
_NAME, _OLD_NAME = "lightning_moeclip", "moeclip_before"
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def unpack(commit: str, folder: Path) -> None:
    """Put the package of an earlier commit into ``folder`` under another name."""
    archive = subprocess.run(["git", "archive", commit, _NAME], cwd=measure.ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    (folder / _NAME).rename(folder / _OLD_NAME)
    for source in (folder / _OLD_NAME).rglob("*.py"):
        source.write_text(source.read_text().replace(_NAME, _OLD_NAME))


def earlier_strategy(precision: str) -> Any:
    """``MoEClipStrategy`` of the earlier commit, with its own precision plugin."""
    strategy = import_module(f"{_OLD_NAME}.strategy").MoEClipStrategy
    plugin = import_module(f"{_OLD_NAME}.precision").MoEClipPrecision
    return strategy(precision_plugin=plugin(precision, device="cpu"))


@on_ranks(2, timeout_s=1500.0)
def measure_steps(rank: Rank, rounds: int, warmup: int, folder: str) -> dict[str, Any]:
    sys.path.insert(0, folder)
    data = batches(rank.index, rounds + warmup + 1)
    fits = {}
    for precision in _PRECISIONS:
        plugin = MoEClipPrecision(precision, device="cpu")
        fits[precision] = Arm(MoEClipStrategy(precision_plugin=plugin), data)
        fits[f"{precision} before"] = Arm(earlier_strategy(precision), data)
    local = MoEClipPrecision("16-mixed", device="cpu", loss_scaling="local")
    fits["16-mixed local"] = Arm(MoEClipStrategy(precision_plugin=local), data)
    arms = {name: fit.step for name, fit in fits.items()}
    seconds = measure.take_turns(arms, rounds=rounds, warmup=warmup, before=dist.barrier)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for fit in fits.values():
        fit.step()  # the last batch: the fit ends
    weights = {name: torch.cat([p.detach().flatten() for p in fit.module.parameters()]) for name, fit in fits.items()}
    return {
        "seconds": dict(zip(seconds, slowest.tolist(), strict=True)),
        "equal": {p: torch.equal(weights[p], weights[f"{p} before"]) for p in _PRECISIONS},
        "regions": len(local.scaler.scales.regions) if local.scaler is not None else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="print only, and leave the results file as it is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unpack(BEFORE, Path(folder))
        found = measure_steps.launch(  # type: ignore[attr-defined]
            rounds=arguments.rounds, warmup=arguments.warmup, folder=folder
        )[0]
    if not all(found["equal"].values()) or not found["regions"]:
        raise SystemExit(f"The versions end at other weights, or there are no regions: {found}. Nothing was written.")
    seconds = found["seconds"]
    for name, values in seconds.items():
        low, mid, high = torch.quantile(torch.tensor(values), torch.tensor([0.2, 0.5, 0.8])).mul(1000).tolist()
        print(f"{name:18} median {mid:7.1f} ms, p20 {low:7.1f}, p80 {high:7.1f}")
    figures = [
        (f"step {p}: now / {BEFORE}", measure.paired_ratio(seconds[p], seconds[f"{p} before"])) for p in _PRECISIONS
    ]
    figures.append(
        ("step 16-mixed: local / unified", measure.paired_ratio(seconds["16-mixed local"], seconds["16-mixed"]))
    )
    rows = [measure.row(name, figure, rounds=arguments.rounds, ranks=2) for name, figure in figures]
    measure.write_rows(None if arguments.keep else measure.RESULTS / "precision_time.csv", rows)


if __name__ == "__main__":
    main()
