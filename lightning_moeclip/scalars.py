"""Numbers to whatever loggers a Trainer has, and to its callback metrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["last_step", "log_scalars"]


def log_scalars(trainer: Any, scalars: Mapping[str, float | Tensor], *, step: int | None = None) -> None:
    """Log numbers that all ranks know; no collective.

    Args:
        trainer: of the run.
        scalars: by name; a tensor is 0-d, and is waited for on rank 0 when there is a logger.
        step: they belong to; None: that of what the module logs in the batch at hand, also while its optimizer steps.
    """
    for name, value in scalars.items():
        is_tensor = isinstance(value, Tensor)
        trainer.callback_metrics[name] = value if is_tensor else torch.tensor(value, dtype=torch.float64)
    if not (trainer.is_global_zero and scalars and trainer.loggers):
        return
    if step is None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
    numbers = {name: float(value) for name, value in scalars.items()}
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)


def last_step(trainer: Any) -> int:
    """Step of what the module logged in the last batch that stepped, when training has ended.

    By then the Trainer has counted that batch.
    """
    return max(0, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)
