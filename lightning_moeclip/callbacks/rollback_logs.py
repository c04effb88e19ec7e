"""What ``CosineRollback`` tells: numbers to the loggers, and warnings, once for all ranks."""

import math
from collections.abc import Iterable

from lightning_moeclip.binding import Trainer
from lightning_moeclip.callbacks.rollback_ledger import RollbackLedger
from lightning_moeclip.callbacks.step_numbers import StepNumbers
from lightning_moeclip.callbacks.world import warn
from lightning_moeclip.monitor.stability import Observation
from lightning_moeclip.scalars import log_scalars

__all__ = ["DirectionsNews", "News", "OverflowCount", "log_numbers"]


_MAX_OVERFLOWS = 20  # in a row; a scale that began at 2**16 is below 1 by then


class News:
    """Warns when a finding that does not act begins, and not while it lasts."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def tell(self, trainer: Trainer, observation: Observation) -> None:
        """Warn of what the observation before did not show."""
        quiet = [finding for finding in observation.findings if not finding.acts]
        for finding in quiet:
            if finding.kind not in self._kinds:
                outcome = "no snapshots while this lasts" if finding.blocks else "nothing else changes"
                warn(trainer, f"CosineRollback, step {trainer.global_step}: {finding.message}; {outcome}.")
        self._kinds = {finding.kind for finding in quiet}


class OverflowCount:
    """Steps in a row that a loss scaler leaves out, and one warning when there is no end of them."""

    def __init__(self) -> None:
        self._num = 0

    def note(self, trainer: Trainer, numbers: StepNumbers, *, is_scaled: bool) -> None:
        """Take in what all ranks know of a step."""
        is_overflow = is_scaled and math.isfinite(numbers.loss) and not math.isfinite(numbers.grad_norm)
        self._num = self._num + 1 if is_overflow else 0
        if self._num == _MAX_OVERFLOWS:
            warn(
                trainer,
                f"CosineRollback, step {trainer.global_step}: gradients have overflowed in {_MAX_OVERFLOWS} steps in a "
                "row. The loss scaler finds no scale at which they are finite, and no step is taken. Look for what "
                "makes them infinite in the backward pass, or train in bfloat16.",
            )


class DirectionsNews:
    """Warns once when no loss of a run tells of its directions."""

    def __init__(self) -> None:
        self._silent: set[int] = set()
        self._is_told = False

    def note(self, index: int, numbers: StepNumbers) -> None:
        """Take in a step of the optimizer with that place among the Trainer's."""
        if numbers.has_directions:
            self._is_told = True  # there is nothing to tell
        elif numbers.grad_norm != 0.0:
            self._silent.add(index)

    def tell(self, trainer: Trainer, *, is_end: bool = False) -> None:
        """Warn when each optimizer has stepped without, or, at the end of a run, any."""
        if self._is_told or not self._silent or (len(self._silent) < len(trainer.optimizers) and not is_end):
            return
        self._is_told = True
        warn(
            trainer,
            "CosineRollback watches loss and gradient norm alone: no loss tells of its directions. Use "
            "ContrastiveLoss or SigmoidLoss as a layer of the module, or CosineRollback.hand_in(...).",
        )


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
    log_scalars(trainer, metrics)
