"""The plan of a run, as a table of text, to the loggers of a Trainer that take text."""

import logging
from collections.abc import Callable
from typing import Any

from lightning_moeclip.parallel.explanation import Explanation

__all__ = ["TAG", "write_plan"]

TAG = "moeclip/plan"
_log = logging.getLogger("lightning_moeclip")


def write_plan(trainer: Any, explain: Callable[[], Explanation]) -> None:
    """Write the table on rank 0, where TensorBoard looks on; no collective, and a failure is logged alone.

    Args:
        trainer: of the run.
        explain: makes the table; not called where nobody takes it.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:
        return
    try:
        experiments: list[Any] = [getattr(logger, "experiment", None) for logger in trainer.loggers]
        writers = [experiment for experiment in experiments if callable(getattr(experiment, "add_text", None))]
        told = explain().to_markdown() if writers else ""
        for writer in writers:
            writer.add_text(TAG, told, trainer.global_step)
    except Exception as error:  # training needs no table
        _log.warning("The plan could not be written to the loggers: %s: %s", type(error).__name__, error)
