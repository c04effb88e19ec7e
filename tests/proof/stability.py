"""What ``CosineRollback`` finds and mends on the emoji example: ``python -m tests.proof.stability``.

* detection: half the pairs of each batch shuffled from step 120 on, three seeds: steps until the loss and the cosine's
  deviation say so. Healthy runs of the same seeds: steps with any flag.
* noise: 2,000 healthy steps on two ranks with all callbacks on, and 2,000 in float16 with a loss scale: rollbacks,
  skipped steps and resyncs. float16 takes batches of 16 pairs, since CPUs are slow at it.
* stability: 200 steps of 64 pairs with a bad stretch (30 steps of shuffled pairs; gradients of one batch 1e3 times, of
  another 1e6 times as large), with the callback and with one that only looks on, three seeds each: recall at 1 on the
  held-out pairs, and standard deviation of the cosine from the bad stretch on, over the steps that were taken.

Under half an hour on two cores.
"""

import argparse
import csv
import os
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from typing_extensions import override

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import pl
from lightning_moeclip.callbacks import CosineRollback, ExpertLoadMonitor, ResidualResync, VarianceHeatmap
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure
from tests.benchmarks.emoji import EmojiData, make_task

SEEDS = (0, 1, 2)
FAULT = 120  # the step at which pairs are shuffled first
STRETCH = 30
SPIKES = {FAULT: 1e3, 160: 1e6}
PARTS = ("detection", "noise", "stability")
RESULTS = measure.RESULTS / "stability.csv"
COLUMNS = (
    "part", "name", "seed", "recall_at_1", "cosine_deviation", "rollbacks", "skipped", "flags", "loss_after",
    "cosine_after", "seconds", "median_ratio", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its row.
        seed: of weights and data.
        fault: "none", "shuffled" pairs or "spikes" of the gradient.
        acts: the callback acts; otherwise it only looks on.
        num_steps: optimizer steps, also the length of the learning rate's schedule.
        stop: stop after so many of them; None for all.
        stretch: steps for which pairs are shuffled.
        batch_size: rows of a global batch.
        precision: of Lightning's names.
        has_all_callbacks: the other callbacks are on too.
    """

    name: str
    seed: int = 0
    fault: str = "none"
    acts: bool = True
    num_steps: int = 390
    stop: int | None = None
    stretch: int = STRETCH
    batch_size: int = 256
    precision: str = "32-true"
    has_all_callbacks: bool = False


class LooksOn(CosineRollback):
    """Finds what ``CosineRollback`` finds, and takes every step."""

    @override
    def _decide(self, *args: Any) -> None:
        pass


class Planted(pl.Callback):
    """The fault of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self.run.fault == "shuffled" and FAULT <= step < FAULT + self.run.stretch:
            half = len(batch.tokens) // 2
            order = torch.randperm(half, generator=torch.Generator().manual_seed(1000 * self.run.seed + step))
            batch.tokens[:half] = batch.tokens[:half][order]

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        factor = SPIKES.get(trainer.global_step)
        if self.run.fault == "spikes" and factor is not None:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


class Recorder(pl.Callback):
    """What the watching callback saw, by step."""

    def __init__(self, rollback: CosineRollback) -> None:
        self.rollback = rollback
        self.cosines: dict[int, float] = {}
        self.flags: dict[int, set[str]] = {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step, seen = trainer.global_step - 1, self.rollback.observation
        assert seen is not None, "a step without numbers"
        kinds = {finding.kind for finding in seen.findings if finding.blocks}
        if kinds:
            self.flags[step] = kinds
        if seen.cosine is not None and not trainer.strategy.report.verdict.holds_step:
            self.cosines[step] = seen.cosine

    def steps_until(self, kind: str) -> int:
        """Steps from the first faulty one to the first that was flagged so; a large number if none was."""
        return min((step - FAULT for step, kinds in self.flags.items() if step >= FAULT and kind in kinds), default=999)


def train(rank: Rank, run: Run) -> dict[str, Any]:
    """Train and validate; numbers for the row of a run."""
    with tempfile.TemporaryDirectory() as folder:  # for pictures
        return train_in(folder, rank, run)


def train_in(folder: str, rank: Rank, run: Run) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning gives each of two runs on one rank all cores, to wait on
    began = time.monotonic()
    task = make_task(total_steps=run.num_steps, seed=run.seed)
    rollback = CosineRollback() if run.acts else LooksOn()
    recorder = Recorder(rollback)
    is_half = run.precision == "16-mixed"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy=MoEClipStrategy(
            expert_parallel_size=rank.world_size, towers={"image": "model.visual", "text": "model.text"}
        ),
        plugins=[MoEClipPrecision("16-mixed", device="cpu")] if is_half else None,
        max_epochs=-1,
        max_steps=run.stop or run.num_steps,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if run.stop else 1,
        check_val_every_n_epoch=10**6,
        callbacks=[Planted(run), *(others() if run.has_all_callbacks else []), rollback, recorder],
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, EmojiData(batch_size=run.batch_size, seed=run.seed))
    resyncs = float(trainer.callback_metrics.get("grad_residual/resyncs", 0.0))
    from_fault = [cosine for step, cosine in recorder.cosines.items() if step >= FAULT]
    recall = None
    if not run.stop:
        recall = trainer.validate(task, EmojiData(batch_size=run.batch_size, seed=run.seed), verbose=False)[0]
    return {
        "recall_at_1": None if recall is None else round(recall["recall_at_1"], 4),
        "cosine_deviation": round(pstdev(from_fault), 4) if len(from_fault) > 1 else None,
        "rollbacks": rollback.total_rollbacks + int(resyncs),
        "skipped": sum(record.action == "skipped" for record in rollback.history),
        "flags": len(recorder.flags),
        "loss_after": recorder.steps_until("loss"),
        "cosine_after": recorder.steps_until("deviates"),
        "seconds": round(time.monotonic() - began, 1),
    }


def others() -> list[pl.Callback]:
    """The other callbacks of the package at their defaults."""
    return [VarianceHeatmap(), ResidualResync(), ExpertLoadMonitor()]


@on_ranks(1, timeout_s=1800.0)
def on_one(rank: Rank, run: Run) -> dict[str, Any]:
    return train(rank, run)


@on_ranks(2, timeout_s=1800.0)
def on_two(rank: Rank, run: Run) -> dict[str, Any]:
    return train(rank, run)


def detection_runs() -> list[Run]:
    until = FAULT + 12
    return [
        *(Run("healthy", seed) for seed in SEEDS),
        *(Run("shuffled for good", seed, "shuffled", acts=False, stop=until, stretch=10**6) for seed in SEEDS),
    ]


def noise_runs(num_steps: int) -> list[Run]:
    return [
        Run("noise, float32", num_steps=num_steps, has_all_callbacks=True),
        Run("noise, float16", num_steps=num_steps, has_all_callbacks=True, precision="16-mixed", batch_size=16),
    ]


def stability_runs() -> list[Run]:
    return [
        Run(f"{fault}, {'rolled back' if acts else 'watched'}", seed, fault, acts, num_steps=200, batch_size=64)
        for fault in ("spikes", "shuffled")
        for acts in (True, False)
        for seed in SEEDS
    ]


def promises(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """What the bars read, and the figures beside them, by name of the row."""

    def numbers(name: str, column: str) -> list[float]:
        return [float(result[column]) for result in found.get(name, []) if result[column] is not None]

    promised: dict[str, float] = {}
    if "healthy" in found:
        promised |= {
            "detection: steps until the loss is flagged": max(numbers("shuffled for good", "loss_after")),
            "detection: steps until the cosine is flagged": max(numbers("shuffled for good", "cosine_after")),
            "detection: flagged steps of healthy runs": sum(numbers("healthy", "flags")),
        }
    for name in ("noise, float32", "noise, float16"):
        if name in found:
            promised[f"{name}: rollbacks and resyncs"] = sum(numbers(name, "rollbacks"))
    for fault in ("shuffled", "spikes"):
        for how in ("rolled back", "watched"):
            if (name := f"{fault}, {how}") in found:
                promised[f"recall: {name}"] = fmean(numbers(name, "recall_at_1"))
                promised[f"cosine: {name}"] = fmean(numbers(name, "cosine_deviation"))
    return promised


def measured(runs: Iterable[Run], *, num_ranks: int) -> list[tuple[Run, dict[str, Any]]]:
    """Results of runs; those on one rank go two at a time."""
    launch = {1: on_one, 2: on_two}[num_ranks].launch  # type: ignore[attr-defined]

    def result(run: Run) -> tuple[Run, dict[str, Any]]:
        numbers = launch(run=run)[0]
        print({**asdict(run), **numbers}, flush=True)
        return run, numbers

    with ThreadPoolExecutor(2 // num_ranks) as pool:
        return list(pool.map(result, runs))


def lines_of(part: str, noise_steps: int) -> list[dict[str, Any]]:
    """Rows of one part: its runs, then what the bars read."""
    runs = {"detection": detection_runs, "noise": lambda: noise_runs(noise_steps), "stability": stability_runs}[part]()
    commit = measure.short_commit()
    found: dict[str, list[dict[str, Any]]] = {}
    lines: list[dict[str, Any]] = []
    for run, numbers in measured(runs, num_ranks=2 if part == "noise" else 1):
        found.setdefault(run.name, []).append(numbers)
        lines.append({"part": part, "name": run.name, "seed": run.seed, **numbers, "commit": commit})
    for name, value in promises(found).items():
        lines.append({"part": part, "name": name, "median_ratio": round(value, 4), "commit": commit})
        print(f"{name}: {value:.4g}")
    return lines


def write(part: str, lines: list[dict[str, Any]]) -> None:
    """Replace the rows of a part, and keep those of the others."""
    kept: list[dict[str, Any]] = []
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            kept = [line for line in csv.DictReader(file) if line["part"] != part]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *lines], key=lambda line: PARTS.index(line["part"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--noise-steps", type=int, default=2000)
    parser.add_argument("--keep", action="store_true", help="print only, and leave the results file as it is")
    arguments = parser.parse_args()
    for part in PARTS if arguments.only is None else (arguments.only,):
        lines = lines_of(part, arguments.noise_steps)
        if not arguments.keep:
            write(part, lines)


if __name__ == "__main__":
    main()
