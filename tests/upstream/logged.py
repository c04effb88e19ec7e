"""What several files of logging share: a logger that keeps everything, and what a run leaves to read."""

from typing import Any

from torch import Tensor

from lightning_moeclip.binding import Trainer, pl
from tests.upstream.models import (
    MakeTrainer,
    under_both,
)


def kept(trainer: Trainer) -> dict[str, Any]:
    """What callbacks, loggers and the progress bar can read."""
    found = {
        "callback": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "bar": dict(trainer.progress_bar_metrics),
    }
    assert all(isinstance(v, Tensor) for kind in ("callback", "logged") for v in found[kind].values())
    assert all(isinstance(v, float) for v in found["bar"].values())
    return found


def fitted(kind: type, **settings: Any) -> Any:
    """What one run keeps, the same under both strategies."""

    def script(make: MakeTrainer) -> Any:
        trainer = make(**settings)
        trainer.fit(kind())
        return kept(trainer)

    return under_both(script)


PLACES = {
    "fit": {
        "on_train_start": False,
        "on_train_epoch_start": False,
        "on_train_batch_start": True,
        "on_before_zero_grad": True,
        "on_after_backward": True,
        "on_before_optimizer_step": True,
        "on_train_batch_end": True,
        "on_train_epoch_end": False,
    },
    "validate": {
        f"on_validation_{p}": p.startswith("batch") for p in ("start", "epoch_start", "batch_end", "epoch_end")
    },
    "test": {f"on_test_{p}": p.startswith("batch") for p in ("start", "epoch_start", "batch_end", "epoch_end")},
}


NEVER = [
    "setup",
    "prepare_data",
    "configure_optimizers",
    "on_fit_start",
    "train_dataloader",
    "val_dataloader",
    "on_after_batch_transfer",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "lr_scheduler_step",
    "on_sanity_check_start",
]


class Keeps(pl.loggers.logger.Logger):
    """Keeps what it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.states: list[str] = []

    name, version, experiment = "keeps", 1, None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.written.append(("hyperparameters", args))

    def finalize(self, status: str) -> None:
        self.states.append(status)
