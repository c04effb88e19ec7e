"""What each process of ``verify`` runs: the user's module under a Trainer, with somebody who looks on."""

import json
import logging
import os
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_moeclip.binding import FABRIC_ROOT, ROOT, pl
from lightning_moeclip.diagnosis.deadlock import ProgressMonitor
from lightning_moeclip.diagnosis.factory import TrainingCase, rows_of
from lightning_moeclip.diagnosis.observations import RankFacts, StepSeen
from lightning_moeclip.diagnosis.preparation import Preparation
from lightning_moeclip.diagnosis.recorder import Comparer, Recorder, Writer
from lightning_moeclip.diagnosis.silent_logger import SilentLogger
from lightning_moeclip.diagnosis.sketch import place_of, sketch
from lightning_moeclip.diagnosis.verify_job import (
    VerifyJob,
    batch_norms,
    make_strategy,
    shares,
    take_case,
)
from lightning_moeclip.parallel.interop import is_scalar_name
from lightning_moeclip.parallel.roles import read_roles
from lightning_moeclip.testing.on_ranks import Rank

__all__ = ["OneProcess", "run_again", "run_alone", "run_on_rank"]


@dataclass(frozen=True)
class OneProcess:
    """What one process did with the whole batches.

    Attributes:
        steps: with sketches of its gradients.
        gaps: smallest difference of two router logits of one token, over the largest logit, by router.
    """

    steps: tuple[StepSeen, ...]
    gaps: dict[str, float] = field(default_factory=dict)


def run_alone(rank: Rank, job: VerifyJob, folder: Path) -> OneProcess:
    """Train on the whole batches, and leave every gradient and parameter in ``folder``."""
    writer = Writer(folder, job.step_seed)
    gaps = _run(job, folder, "one", writer, size=1, rank=0, strategy=lambda: "auto")
    return OneProcess(writer.steps, gaps)


def run_again(rank: Rank, job: VerifyJob, folder: Path, label: str) -> None:
    """Train on the whole batches once more, and compare with what ``run_alone`` left."""
    _run(job, folder, label, Comparer(folder, job.step_seed, label), size=1, rank=0, strategy=lambda: "auto")


def run_on_rank(rank: Rank, job: VerifyJob, folder: Path) -> None:
    """Train on this rank's rows under the strategy, and compare with what ``run_alone`` left."""
    label = str(rank.index)
    recorder = Comparer(folder, job.step_seed, label)

    def note() -> None:
        torch.save(recorder.unfinished(), folder / f"unfinished.{label}.pt")

    def strategy() -> Any:
        return make_strategy(job.strategy, job.expert_parallel_size)

    with ProgressMonitor(folder, rank.index, note):
        try:
            _run(job, folder, label, recorder, size=rank.world_size, rank=rank.index, strategy=strategy)
        except BaseException:
            note()
            raise


def _run(
    job: VerifyJob,
    folder: Path,
    label: str,
    recorder: Recorder,
    *,
    size: int,
    rank: int,
    strategy: Callable[[], Any],
) -> dict[str, float]:
    """Train, and leave what is to be known of the module; the gaps of its routers in one process."""
    (folder / f"started.{label}").touch()
    with _failures_told(folder, label, kind="input"):
        _be_quiet()
        case = take_case(job)
        made = strategy()
    with _failures_told(folder, label, kind="run"):
        module = case.module
        prepared = Preparation(module, job.seed, notes_gaps=size == 1)
        data = shares(job, case.batches, rank=rank, size=size)
        trainer = _trainer(job, folder, recorder, devices=size, strategy=made, num_batches=len(data))
        try:
            trainer.fit(module, DataLoader(data, batch_size=None, collate_fn=_as_is))  # type: ignore[arg-type]
        finally:
            torch.save(_facts(case, trainer, recorder.outside, prepared), folder / f"facts.{label}.pt")
    return prepared.gaps


def _facts(case: TrainingCase, trainer: Any, outside: tuple[str, ...], prepared: Preparation) -> RankFacts:
    strategy = trainer.strategy
    kinds: dict[str, str] = {name: role.kind for name, role in read_roles(case.module).items()}
    kinds |= {name: "logit_scale" if is_scalar_name(name) else "dense" for name in outside}
    return RankFacts(
        strategy=type(strategy).__name__,
        expert_parallel_size=getattr(strategy, "expert_parallel_size", 1),
        kinds=kinds,
        trainable=tuple(name for name, p in case.module.named_parameters() if p.requires_grad),
        outside=outside,
        silenced=prepared.silenced,
        batch_norms=batch_norms(case.module),
        num_rows=tuple(rows_of(batch) for batch in case.batches),
        batches=_sketch_of(case.batches),
        notes=prepared.notes(trainer),
    )


def _trainer(job: VerifyJob, folder: Path, recorder: Recorder, *, devices: int, strategy: Any, num_batches: int) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        max_epochs=1,
        limit_train_batches=num_batches,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        gradient_clip_val=job.gradient_clip_val,
        accumulate_grad_batches=job.accumulate_grad_batches,
        logger=SilentLogger(str(folder)),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )


def _be_quiet() -> None:
    """Keep standard output for the report."""
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for root in (ROOT, FABRIC_ROOT):
        logging.getLogger(root).setLevel(logging.ERROR)


def _sketch_of(batches: tuple[Any, ...]) -> tuple[float, ...]:
    total = torch.zeros(())
    for index, leaf in enumerate(tree_leaves(batches)):
        if isinstance(leaf, Tensor):
            # a NaN is equal to none: where they are counts like a value
            whole = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            is_finite = whole.isfinite()
            for name, part in ((f"{index}", whole.where(is_finite, 0)), (f"{index} is finite", is_finite)):
                total = total + sketch(name, part, place_of(part))
        elif isinstance(leaf, (str, int, float)):
            total = total + zlib.crc32(repr(leaf).encode()) / (index + 1)
    return tuple(total.reshape(-1).tolist())


def _as_is(batch: Any) -> Any:
    return batch


@contextmanager
def _failures_told(folder: Path, label: str, *, kind: str) -> Iterator[None]:
    """Leave an error in the folder; what a factory or a strategy is not fit for counts as the user's input."""
    try:
        yield
    except BaseException as error:
        told = {
            "kind": kind if isinstance(error, (ValueError, TypeError)) else "run",
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
        (folder / f"failure.{label}.json").write_text(json.dumps(told))
        raise
