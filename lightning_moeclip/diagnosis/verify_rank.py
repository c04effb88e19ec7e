"""What each process of ``verify`` runs: the user's module under a Trainer, with somebody who looks on."""

import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_moeclip.binding import FABRIC_ROOT, ROOT, pl
from lightning_moeclip.diagnosis.deadlock import ProgressMonitor
from lightning_moeclip.diagnosis.factory import TrainingCase, rows_of
from lightning_moeclip.diagnosis.held_outside import held_outside
from lightning_moeclip.diagnosis.observations import RankFacts, StepSeen
from lightning_moeclip.diagnosis.recorder import Comparer, Recorder, Writer
from lightning_moeclip.diagnosis.sketch import place_of, sketch
from lightning_moeclip.diagnosis.verify_job import (
    VerifyJob,
    batch_norms,
    make_strategy,
    shares,
    silence_dropout,
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
    with _failures_told(folder, label, kind="input"):
        _be_quiet()
        case = take_case(job)
        made = strategy()
    with _failures_told(folder, label, kind="run"):
        module = case.module
        silenced = silence_dropout(module)
        _widen_outside(module)
        data = shares(job, case.batches, rank=rank, size=size)
        trainer = _trainer(job, folder, recorder, devices=size, strategy=made, num_batches=len(data))
        gaps: dict[str, float] = {}
        hooks = _watch_routers(module, gaps) if size == 1 else []
        try:
            trainer.fit(module, DataLoader(data, batch_size=None, collate_fn=_as_is))  # type: ignore[arg-type]
        finally:
            torch.save(_facts(case, trainer.strategy, recorder.outside, silenced), folder / f"facts.{label}.pt")
        for hook in hooks:
            hook.remove()
    return gaps


def _facts(case: TrainingCase, strategy: Any, outside: tuple[str, ...], silenced: tuple[str, ...]) -> RankFacts:
    kinds: dict[str, str] = {name: role.kind for name, role in read_roles(case.module).items()}
    kinds |= {name: "logit_scale" if is_scalar_name(name) else "dense" for name in outside}
    return RankFacts(
        strategy=type(strategy).__name__,
        expert_parallel_size=getattr(strategy, "expert_parallel_size", 1),
        kinds=kinds,
        trainable=tuple(name for name, p in case.module.named_parameters() if p.requires_grad),
        outside=outside,
        silenced=silenced,
        batch_norms=batch_norms(case.module),
        num_rows=tuple(rows_of(batch) for batch in case.batches),
        batches=_sketch_of(case.batches),
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
        logger=False,
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


def _widen_outside(module: Any) -> None:
    """Have parameters that only an optimizer holds in float64 too, as soon as it is made."""
    original = module.configure_optimizers

    def configure_optimizers() -> Any:
        made = original()
        optimizers = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.optim.Optimizer)]
        for parameter in held_outside(module, optimizers).values():
            if parameter.is_floating_point():
                parameter.data = parameter.data.double()
        return made

    module.configure_optimizers = configure_optimizers


def _watch_routers(module: nn.Module, gaps: dict[str, float]) -> list[Any]:
    """Note how near two logits of a token come to each other."""
    hooks = []
    for name, role in read_roles(module).items():
        weight = module.get_parameter(name)
        if role.kind == "router" and weight.ndim == 2:
            path = name.rpartition(".")[0]
            hooks.append(module.get_submodule(path).register_forward_hook(_note_gap(path, weight.shape[0], gaps)))
    return hooks


def _note_gap(path: str, num_experts: int, gaps: dict[str, float]) -> Callable[..., None]:
    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        leaves = tree_leaves(getattr(output, "logits", output))
        logits = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0]
        logits = [x.detach() for x in logits if x.shape[-1] == num_experts and x.numel()]
        if logits and num_experts > 1:
            ordered = logits[0].sort(dim=-1).values
            gap = float(ordered.diff(dim=-1).min() / ordered.abs().max().clamp(min=1e-300))
            gaps[path] = min(gap, gaps.get(path, gap))

    return note


def _sketch_of(batches: tuple[Any, ...]) -> tuple[float, ...]:
    total = torch.zeros(())
    for index, leaf in enumerate(x for x in tree_leaves(batches) if isinstance(x, Tensor)):
        total = total + sketch(str(index), leaf, place_of(leaf))
    return tuple(total.tolist())


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
