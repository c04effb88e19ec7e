"""One step of a small CLIP with experts on several ranks, against one process in float64.

Under torchrun or srun it runs on the ranks and devices of that launch, elsewhere on two processes of this machine.
"""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moeclip.binding import FABRIC_ROOT, ROOT, LightningModule, Trainer
from lightning_moeclip.diagnosis.current_launch import Launch
from lightning_moeclip.diagnosis.findings import Finding
from lightning_moeclip.modules import ContrastiveLoss, MoE
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing.on_ranks import Rank, RanksFailed, on_ranks

__all__ = ["PARITY_S", "failed", "judged", "launch_errors", "parity_finding"]

PARITY_S = 90.0  # for a step of a few microseconds: what it takes beyond that is starting, and waiting for ranks
_BOUND = 1e-10
_ROWS = 3  # of each rank
_EXPERTS = 2  # of each expert-parallel rank
_CLIP, _RATE = 0.05, 0.1
_IMAGE, _TEXT, _DIM = 7, 6, 5
_NAME = "one-step parity"


class Probe(LightningModule):
    """Two towers with experts, and the gradients of its last step before clipping."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.image = nn.Sequential(nn.Linear(_IMAGE, _DIM), MoE(_DIM, 8, num_experts, top_k=2))
            self.text = nn.Sequential(nn.Linear(_TEXT, _DIM), MoE(_DIM, 8, num_experts, top_k=2))
            self.loss = ContrastiveLoss()
        self.double()
        self.taken: dict[str, Tensor] = {}
        self.last_loss = 0.0

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """batch: [rows, 7] and [rows, 6] -> scalar."""
        return self.loss(self.image(batch[0]), self.text(batch[1]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of this rank, kept."""
        loss = self.compute_loss(batch)
        self.last_loss = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients, reduced and not yet clipped."""
        self.taken = gradients_of(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, which hides no factor."""
        return torch.optim.SGD(self.parameters(), lr=_RATE)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU, by name."""
    return {n: p.grad.detach().cpu().clone() for n, p in module.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class Step:
    """What one step was.

    Attributes:
        loss: of this rank.
        gradients: before clipping; on a rank, those of the experts that it holds.
        parameters: afterwards, whole.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def _batch(world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = (_IMAGE, _TEXT)
    return tuple(  # type: ignore[return-value]
        torch.randn(world_size * _ROWS, size, generator=generator, dtype=torch.float64) for size in sizes
    )


def one_process(world_size: int, num_experts: int) -> Step:
    """The step on the whole batch, without Lightning and, when called before there is one, without a process group."""
    probe = Probe(num_experts)
    optimizer = probe.configure_optimizers()
    loss = probe.compute_loss(_batch(world_size))
    loss.backward()
    gradients = gradients_of(probe)
    nn.utils.clip_grad_norm_(probe.parameters(), _CLIP)
    optimizer.step()
    return Step(loss.item(), gradients, dict(probe.state_dict()))


def step_on_rank(rank: int, world_size: int, expert_parallel_size: int, **trainer: Any) -> Step:
    """The step on this rank's rows, by a Trainer with our strategy."""
    probe = Probe(_EXPERTS * expert_parallel_size)
    rows = slice(rank * _ROWS, (rank + 1) * _ROWS)
    with _quietly():
        Trainer(
            strategy=MoEClipStrategy(
                expert_parallel_size=expert_parallel_size, timeout=timedelta(seconds=PARITY_S * 2 / 3)
            ),
            max_steps=1,
            gradient_clip_val=_CLIP,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **trainer,
        ).fit(probe, DataLoader([tuple(part[rows] for part in _batch(world_size))], batch_size=None))  # type: ignore
    parameters = {name: value.detach().cpu() for name, value in probe.state_dict().items()}
    return Step(probe.last_loss, probe.taken, parameters)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what Lightning tells of its Trainer, its devices and products that go with it."""
    loggers = [logging.getLogger(name) for name in (ROOT, FABRIC_ROOT)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def largest_errors(step: Step, reference: Step, place: int) -> dict[str, float]:
    """Relative errors of a rank, by what they are of; the loss is compared where those of all ranks are at hand.

    Args:
        step: of a rank.
        reference: of one process.
        place: of the rank in its expert-parallel group.
    """
    # gradients that are truly zero are noise over noise without a floor
    floor = 1e-6 * float(torch.stack([g.norm() for g in reference.gradients.values()]).norm())
    errors = {
        f"gradient of {n}": _error(step.gradients.get(n), g, place, floor) for n, g in reference.gradients.items()
    }
    errors |= {f"parameter {n}": _error(step.parameters[n], p, 0, 1e-6) for n, p in reference.parameters.items()}
    return errors


def _error(found: Tensor | None, wanted: Tensor, place: int, floor: float) -> float:
    if found is None:
        return float("inf")
    own = wanted if found.shape == wanted.shape else wanted[place * len(found) : (place + 1) * len(found)]
    if found.shape != own.shape:
        return float("inf")
    error = float((found - own).norm()) / max(float(own.norm()), floor)
    return error if error == error else float("inf")  # NaN compares with nothing


@on_ranks(2, timeout_s=PARITY_S)
def step_on_two(rank: Rank, sizes: tuple[int, ...]) -> list[Step]:
    """A step for each ``expert_parallel_size``, on two processes of this machine."""
    return [step_on_rank(rank.index, rank.world_size, size, accelerator="cpu", devices=2) for size in sizes]


def parity_finding() -> Finding:
    """Compare two CPU processes with one, with experts on each rank and shared out."""
    sizes = (1, 2)
    try:
        by_rank = step_on_two.launch(sizes=sizes)  # type: ignore[attr-defined]
    except RanksFailed as error:
        return failed(f"a step on two processes of this machine failed: {_last_lines(str(error))}")
    errors: dict[str, float] = {}
    for index, size in enumerate(sizes):
        reference = one_process(2, _EXPERTS * size)
        steps = [steps[index] for steps in by_rank]
        for rank, step in enumerate(steps):
            found = largest_errors(step, reference, rank % size)
            errors |= {f"{what} at expert_parallel_size={size} on rank {rank}": value for what, value in found.items()}
        loss = sum(step.loss for step in steps) / len(steps)  # the objective is the mean over ranks
        errors[f"loss at expert_parallel_size={size}"] = abs(loss - reference.loss) / abs(reference.loss)
    return judged(errors, "two gloo processes")


def launch_errors(launch: Launch, sizes: Sequence[int]) -> dict[str, float]:
    """One step on all ranks of a launch for each ``expert_parallel_size``; a collective.

    Returns:
        Relative errors of this rank, by what they are of.
    """
    # one process is first: there is no process group yet that its loss would go through
    references = {size: one_process(launch.world_size, _EXPERTS * size) for size in dict.fromkeys(sizes)}
    has_gpus = torch.cuda.device_count() >= launch.local_world_size
    where = {
        "accelerator": "gpu" if has_gpus else "cpu",
        "devices": launch.local_world_size,
        "num_nodes": launch.num_nodes,
    }
    errors: dict[str, float] = {}
    for size, reference in references.items():
        step = step_on_rank(launch.rank, launch.world_size, size, **where)
        found = largest_errors(step, reference, launch.rank % size)
        loss = sum(gather_objects(step.loss)) / launch.world_size
        found["loss"] = abs(loss - reference.loss) / abs(reference.loss)
        errors |= {f"{what} at expert_parallel_size={size} on rank {launch.rank}": e for what, e in found.items()}
    return errors


def judged(errors: Mapping[str, float], where: str) -> Finding:
    """The finding about these errors.

    Args:
        errors: relative, by what they are of.
        where: the ranks.
    """
    worst = max(errors, key=lambda what: math.inf if math.isnan(errors[what]) else errors[what])
    told = f"largest relative error {errors[worst]:.1e} on {where}, in {worst}"
    if errors[worst] <= _BOUND:
        return Finding(_NAME, "ok", told)
    return failed(f"{told}; {_BOUND:g} is allowed")


def failed(told: str) -> Finding:
    """The finding that a step was not that of one process."""
    advice = (
        "Mend the errors above first. Where there are none, do not train in this environment, and report it with what "
        "python -m lightning_moeclip doctor --json prints."
    )
    return Finding(_NAME, "error", told, advice)


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])
