"""Loss scales and their rates, to the loggers of a Trainer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_moeclip.gradients.report import LossScale
from lightning_moeclip.scalars import log_scalars

__all__ = ["ScaleLog"]


class ScaleLog:
    """Writes ``loss_scale/…``, ``overflow_rate/…`` and ``underflow_rate/…`` where Lightning logs, once per step."""

    def __init__(self) -> None:
        self._step: int | None = None

    def write(self, trainer: Any, scales: Mapping[str, LossScale]) -> None:
        """Log ``scales`` when the step at hand is one that is logged; no collective, and no wait in other steps.

        Args:
            trainer: the Trainer of the run.
            scales: by region; nothing is written when there are none.
        """
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        is_due = trainer._logger_connector.should_update_logs or trainer.fast_dev_run
        if not scales or not is_due or step == self._step:
            return
        self._step = step
        metrics: dict[str, Tensor] = {}
        for name, scale in scales.items():
            metrics[f"loss_scale/{name}"] = scale.scale
            metrics[f"overflow_rate/{name}"] = scale.overflow_rate
            metrics[f"underflow_rate/{name}"] = scale.underflow_rate
        log_scalars(trainer, metrics, step=step)
