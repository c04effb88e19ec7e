"""Short fits with callbacks, and what one process says of their gradients."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_moeclip.binding import Callback, Trainer, pl
from tests.models import TwoTowers, batches, loader, quiet_trainer

Logger = pl.loggers.Logger


class NoteTaker(Logger):
    """A logger with images and text of its own, as that of Weights & Biases, and nothing else it need not have."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.images: list[tuple[str, tuple[int, ...], int | None]] = []
        self.tables: list[tuple[str, list[str], list[list[str]]]] = []

    name, version = "notes", "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, metrics))

    def steps_of(self, tag: str) -> list[int | None]:
        return [step for step, metrics in self.metrics if tag in metrics]

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.images.append((key, images[0].shape, step))

    def log_text(self, key: str, columns: list[str], data: list[list[str]], step: int | None = None) -> None:
        self.tables.append((key, columns, data))


def variance_of(gradients: dict[str, Tensor | None], tower: str) -> float:
    """Over all elements of a tower, in one process."""
    found = [g.flatten() for name, g in gradients.items() if name.startswith(f"{tower}.") and g is not None]
    return torch.cat(found).var().item()


def fit(
    tmp_path: Path, *callbacks: Callback, num_batches: int = 4, module: TwoTowers | None = None, **arguments: Any
) -> Trainer:
    settings = {"callbacks": list(callbacks), "default_root_dir": tmp_path, "log_every_n_steps": 1, **arguments}
    trainer = quiet_trainer(1, **settings)
    trainer.fit(module or TwoTowers(), loader(batches(num_batches)))
    return trainer
