"""A stand-in for the Trainer, for hooks that ask one how long it trains or on how many ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn

__all__ = ["StandIn", "standing_in"]

_BATCHES, _EPOCHS = 100, 10
_STEPS = _BATCHES * _EPOCHS


class StandIn:
    """What a Trainer would answer at the start of a run; everything else is an AttributeError.

    Attributes:
        asked: names of what it was asked for, in order.
    """

    def __init__(self, world_size: int) -> None:
        self.asked: dict[str, None] = {}
        self._answers = _answers(world_size)

    def __getattr__(self, name: str) -> Any:
        answers = vars(self).get("_answers", {})  # a copy asks before it has any
        if name not in answers:
            raise AttributeError(f"the stand-in for a Trainer has no {name!r}")
        self.asked[name] = None
        return answers[name]

    def told(self, hook: str) -> list[str]:
        """A note on what a hook was told, where it asked at all."""
        if not self.asked:
            return []
        numbers = [f"{name}={self._answers[name]}" for name in self.asked if _is_number(self._answers[name])]
        shown = f": {', '.join(numbers)}" if numbers else ""
        return [f"{hook}() asked its Trainer, for which something stood in with imagined answers{shown}."]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _answers(world_size: int) -> dict[str, Any]:
    epoch_loop = SimpleNamespace(max_steps=_STEPS, min_steps=None, global_step=0, batch_idx=0)
    fit_loop = SimpleNamespace(
        max_epochs=_EPOCHS, min_epochs=1, max_batches=_BATCHES, setup_data=lambda: None, epoch_loop=epoch_loop
    )
    return {
        "estimated_stepping_batches": _STEPS,
        "max_steps": _STEPS,
        "min_steps": None,
        "max_epochs": _EPOCHS,
        "min_epochs": 1,
        "max_time": None,
        "num_training_batches": _BATCHES,
        "num_val_batches": [_BATCHES],
        "num_sanity_val_batches": [0],
        "train_dataloader": range(_BATCHES),  # it has a length
        "global_step": 0,
        "current_epoch": 0,
        "world_size": world_size,
        "num_devices": world_size,
        "num_nodes": 1,
        "device_ids": list(range(world_size)),
        "global_rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "is_global_zero": True,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "gradient_clip_algorithm": None,
        "precision": "32-true",
        "limit_train_batches": 1.0,
        "limit_val_batches": 1.0,
        "overfit_batches": 0.0,
        "check_val_every_n_epoch": 1,
        "val_check_interval": 1.0,
        "log_every_n_steps": 50,
        "reload_dataloaders_every_n_epochs": 0,
        "fast_dev_run": False,
        "barebones": False,
        "training": True,
        "validating": False,
        "testing": False,
        "predicting": False,
        "sanity_checking": False,
        "logger": None,
        "loggers": [],
        "callbacks": [],
        "datamodule": None,
        "ckpt_path": None,
        "fit_loop": fit_loop,
    }


@contextmanager
def standing_in(module: nn.Module, world_size: int) -> Iterator[StandIn]:
    """Give a LightningModule that has no Trainer a stand-in for one while the body runs.

    Args:
        module: the user's; one with a Trainer, or that is no LightningModule, stays as it is.
        world_size: ranks that the Trainer would have.
    """
    stand_in = StandIn(world_size)
    lone = [layer for layer in module.modules() if vars(layer).get("_trainer", stand_in) is None]
    # past the setter, which is the user's to override, and without a Fabric, which answers by itself
    try:
        for layer in lone:
            vars(layer)["_trainer"] = stand_in
        yield stand_in
    finally:
        for layer in lone:
            if vars(layer).get("_trainer") is stand_in:
                vars(layer)["_trainer"] = None
