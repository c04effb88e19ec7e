"""What ``CosineRollback`` tells: numbers to the loggers, and warnings, both once for all ranks."""

import warnings
from collections.abc import Iterable

import torch

from lightning_moeclip.binding import Trainer
from lightning_moeclip.callbacks.rollback_ledger import RollbackLedger
from lightning_moeclip.monitor.stability import Observation

__all__ = ["log_numbers", "warn"]


def log_numbers(trainer: Trainer, ledger: RollbackLedger, observations: Iterable[Observation]) -> None:
    """Hand counts and cosines to callback metrics and all loggers, at the steps that are logged."""
    if not (trainer._logger_connector.should_update_logs or trainer.fast_dev_run):
        return
    metrics = {"rollback/count": float(ledger.total), "rollback/skipped": float(ledger.num_skipped)}
    for observation in observations:
        if observation.cosine is not None:
            metrics["tower_cosine/direction"] = observation.cosine
        if observation.deviation is not None:
            metrics["tower_cosine/deviation"] = observation.deviation
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def warn(trainer: Trainer, message: str) -> None:
    """Warn on the first rank: all of them find the same."""
    if trainer.is_global_zero:
        warnings.warn(message, stacklevel=3)
