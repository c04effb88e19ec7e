"""Modules of which only the optimizers are of interest."""

from typing import Any

from torch import nn, optim

from tests.upstream.models import (
    Damper,
)


def configured(make_configuration: Any, **attributes: Any) -> Damper:
    """A module whose ``configure_optimizers`` gives what the function makes of its parameters."""
    kind = type("Configured", (Damper,), {"configure_optimizers": lambda self: make_configuration(self), **attributes})
    return kind()


def sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.1)
