"""What the tests of this folder share: equality by the measure of the specification, and a log of collectives."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank

TOLERANCE = 1e-10
_LOGGED = ("all_reduce", "all_gather", "all_gather_object", "all_to_all_single", "broadcast")


def worst_error(got: Mapping[str, Tensor | None], true: Mapping[str, Tensor | None]) -> float:
    """Largest ||g - g_ref|| / max(||g_ref||, 1e-6 ||all g_ref||); infinite where only one of them is None."""
    assert got.keys() == true.keys()
    whole = sum(float(t.double().norm() ** 2) for t in true.values() if t is not None) ** 0.5
    worst = 0.0
    for name, t in true.items():
        g = got[name]
        if (g is None) != (t is None):
            print(f"{name}: {'None' if g is None else 'a gradient'}, in one process {'None' if t is None else 'one'}")
            return float("inf")
        if t is not None and t.numel():
            floor = max(float(t.double().norm()), 1e-6 * whole, 1e-300)
            error = float((g.double() - t.double()).norm()) / floor
            if not error <= TOLERANCE:
                print(f"{name}: {g.flatten()[:3].tolist()}, in one process {t.flatten()[:3].tolist()}")
            worst = max(worst, error if error == error else float("inf"))
    return worst


def gradients(module: torch.nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}


def parameters(module: torch.nn.Module) -> dict[str, Tensor | None]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


@contextmanager
def logged_collectives() -> Iterator[list[tuple[str, str, int]]]:
    """(name, description of the group, number of elements) of every collective of this rank, in order."""
    log: list[tuple[str, str, int]] = []
    stock = {name: getattr(dist, name) for name in _LOGGED}

    def spy(name: str) -> Any:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            first = args[0]
            numel = first.numel() if isinstance(first, Tensor) else -1
            log.append((name, "" if group is None else group.group_desc, numel))
            return stock[name](*args, group=group, **kwargs)

        return call

    for name in _LOGGED:
        setattr(dist, name, spy(name))
    try:
        yield log
    finally:
        for name, function in stock.items():
            setattr(dist, name, function)


class Notebook(Callback):
    """Gradients that each optimizer step sees."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients(pl_module))


def share_of(batches: Tensor, rank: Rank) -> DataLoader:
    """The rows of each batch that a rank sees; batches: [steps, rows, ...]."""
    return DataLoader([batch.chunk(rank.world_size)[rank.index] for batch in batches], batch_size=None)


def trainer(*, strategy: MoEClipStrategy | None = None, **arguments: Any) -> Trainer:
    """A silent Trainer over the ranks of the test."""
    defaults = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "strategy": strategy or MoEClipStrategy(),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(**(defaults | arguments))
