"""The optimizers that a module would be trained with, made without a Trainer and without a trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["configured_optimizers", "optimizers_in"]


@contextmanager
def configured_optimizers(module: nn.Module) -> Iterator[tuple[list[Optimizer], list[str]]]:
    """What ``configure_optimizers()`` makes, and notes on why there is nothing where it fails.

    While the body runs the module is as that call has left it: it may have frozen parameters. Afterwards its
    attributes, what its parameters require and the states of all random number generators are as before.

    Args:
        module: the user's.
    """
    before = [_books(layer) for layer in module.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            made = _configured(module)
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


def _configured(module: nn.Module) -> tuple[list[Optimizer], list[str]]:
    configure = getattr(module, "configure_optimizers", None)
    if not callable(configure) or getattr(configure, "__qualname__", "") == "LightningModule.configure_optimizers":
        told = "has no configure_optimizers(): parameters that only an optimizer holds are not known"
        return [], [f"{type(module).__name__} {told}."]
    try:
        return optimizers_in(configure()), []
    except Exception as error:
        line = next(iter(str(error).splitlines()), "").rstrip(".")
        return [], [
            f"configure_optimizers() failed without a Trainer ({type(error).__name__}: {line}): parameters that only "
            "an optimizer holds are not known, and what it freezes is shown as trained."
        ]


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
