"""The optimizers that a module would be trained with, made without a Trainer and without a trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_moeclip.diagnosis.stand_in import standing_in

__all__ = ["Configured", "configured_optimizers", "first_line", "optimizers_in"]


@dataclass(frozen=True)
class Configured:
    """What ``configure_optimizers()`` made.

    Attributes:
        optimizers: in its order; none where it failed, or where there is no such method.
        notes: on why there are none, or on what it was told.
        error: with which it failed; empty where it did not.
    """

    optimizers: list[Optimizer]
    notes: list[str]
    error: str = ""


@contextmanager
def configured_optimizers(module: nn.Module, *, world_size: int = 1) -> Iterator[Configured]:
    """Call ``configure_optimizers()``, with a stand-in where the module has no Trainer.

    While the body runs the module is as that call has left it: it may have frozen parameters. Afterwards its
    attributes, what its parameters require and the states of all random number generators are as before.

    Args:
        module: the user's.
        world_size: what the stand-in tells of the number of ranks.
    """
    before = [_books(layer) for layer in module.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            made = _configured(module, world_size)
        random.setstate(python)
        np.random.set_state(numpy)
        yield made
    finally:
        for books in before:
            for kept, copied in books:
                kept.clear()
                kept.update(copied)
        for parameter, was_trained in trained:
            if parameter.requires_grad is not was_trained:
                parameter.requires_grad_(was_trained)


def _books(layer: nn.Module) -> list[tuple[dict, dict]]:
    """The dicts that assigning an attribute of a module changes, with copies of them."""
    kept = (vars(layer), layer._parameters, layer._buffers, layer._modules)
    return [(books, dict(books)) for books in kept if isinstance(books, dict)]  # TorchScript's are no dicts


def _configured(module: nn.Module, world_size: int) -> Configured:
    configure = getattr(module, "configure_optimizers", None)
    if not callable(configure) or getattr(configure, "__qualname__", "") == "LightningModule.configure_optimizers":
        told = "has no configure_optimizers(): parameters that only an optimizer holds are not known"
        return Configured([], [f"{type(module).__name__} {told}."])
    try:
        with standing_in(module, world_size) as stand_in:
            return Configured(optimizers_in(configure()), stand_in.told("configure_optimizers"))
    except Exception as error:
        told = first_line(error)
        note = (
            f"configure_optimizers() failed without a Trainer ({told}): parameters that only an optimizer holds are "
            "not known, and what it freezes is shown as trained."
        )
        return Configured([], [note], told)


def first_line(error: Exception) -> str:
    """Kind of an error and the first line of its message, without a full stop."""
    line = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {line}"


def optimizers_in(configuration: Any) -> list[Optimizer]:
    """Optimizers in what ``configure_optimizers()`` returned, in any of Lightning's forms.

    Args:
        configuration: an optimizer, a dict with one, a list or tuple of either, two lists of optimizers and
            schedulers, or None.

    Raises:
        TypeError: it is something else.
    """
    if configuration is None:
        return []
    if isinstance(configuration, dict):
        return optimizers_in(configuration.get("optimizer"))
    if isinstance(configuration, (list, tuple)):
        if len(configuration) == 2 and isinstance(configuration[0], (list, tuple)):
            return optimizers_in(configuration[0])  # the other list has schedulers
        return [optimizer for part in configuration for optimizer in optimizers_in(part)]
    if hasattr(configuration, "param_groups"):
        return [configuration]
    raise TypeError(
        f"configure_optimizers() returned a {type(configuration).__name__}. It must return an optimizer, a list of "
        "them, a dict with the key 'optimizer', or two lists"
    )
