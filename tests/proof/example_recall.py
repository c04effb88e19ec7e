"""Held-out recall of the emoji example on ranks, in one process, and stopped halfway, over three seeds.

``python -m tests.proof.example_recall`` writes one row per run and one per promise to
tests/benchmarks/results/example_recall.csv; about a quarter of an hour on two cores.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from tests.benchmarks import measure

SEEDS = (0, 1, 2)
STOP = 200  # of 390 steps, inside an epoch
COLUMNS = (
    "name", "seed", "recall_at_1", "recall_at_5", "num_pairs", "train_loss", "seconds", "median_ratio", "commit",
)  # fmt: skip
RANKS, ONE, RESUMED = "2 ranks, ep=2", "1 process", "2 ranks, ep=2, stopped at step 200, resumed with ep=1"


def train(*arguments: str, seed: int, folder: Path) -> dict[str, object]:
    """Run the example to its end; its last line, with the wall-clock seconds of the whole command."""
    script = measure.ROOT / "examples" / "train_clip_moe.py"
    command = [sys.executable, str(script), "--seed", str(seed), "--logdir", str(folder), *arguments]
    # threads of one process that wait by spinning cost a shared machine several times the work
    environment = {**os.environ, "PYTHONPATH": str(measure.ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    began = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": round(time.monotonic() - began, 1)}


def runs_of(seed: int, folder: Path) -> dict[str, dict[str, object]]:
    """The three runs of a seed by name; the seconds of the resumed one are those of both its halves."""
    two_ranks = ("--devices", "2", "--expert-parallel-size", "2")
    found = {
        RANKS: train(*two_ranks, seed=seed, folder=folder / "ranks"),
        ONE: train("--devices", "1", "--strategy", "auto", seed=seed, folder=folder / "one"),
    }
    half = train(*two_ranks, "--max-steps", str(STOP), seed=seed, folder=folder / "half")
    go_on = ("--devices", "2", "--expert-parallel-size", "1", "--ckpt", str(half["ckpt"]))
    resumed = train(*go_on, seed=seed, folder=folder / "resumed")
    found[RESUMED] = resumed | {"seconds": round(float(str(resumed["seconds"])) + float(str(half["seconds"])), 1)}
    return found


def promises(recalls: dict[str, list[float]], seconds: list[float]) -> dict[str, float]:
    """What the bars read: recalls by name of run, one per seed, and the seconds of the runs on two ranks."""
    points = {name: [100 * recall for recall in values] for name, values in recalls.items()}

    def difference_of_means(name: str) -> float:
        return abs(mean(points[name]) - mean(points[ONE]))

    def largest_difference(name: str) -> float:
        return max(abs(a - b) for a, b in zip(points[name], points[ONE], strict=True))

    return {
        "recall at 1, lowest of the seeds": min(recalls[RANKS]),
        "seconds, longest of the seeds": max(seconds),
        "difference of means to 1 process, points": difference_of_means(RANKS),
        "largest difference to 1 process, points": largest_difference(RANKS),
        "difference of resumed means to 1 process, points": difference_of_means(RESUMED),
        "difference of resumed to 1 process, largest, points": largest_difference(RESUMED),
    }


def main() -> None:
    commit = measure.short_commit()
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for name, result in runs_of(seed, Path(folder) / str(seed)).items():
                lines.append({"name": name, "seed": seed, **result, "commit": commit})
                print(lines[-1], flush=True)
    recalls: dict[str, list[float]] = {RANKS: [], ONE: [], RESUMED: []}
    for line in lines:
        recalls[str(line["name"])].append(float(str(line["recall_at_1"])))
    seconds = [float(str(line["seconds"])) for line in lines if line["name"] == RANKS]
    for name, value in promises(recalls, seconds).items():
        lines.append({"name": name, "median_ratio": round(value, 4), "commit": commit})
        print(f"{name}: {value:.4g}")
    measure.RESULTS.mkdir(parents=True, exist_ok=True)
    with (measure.RESULTS / "example_recall.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
