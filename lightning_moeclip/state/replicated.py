"""Everything of a run that replicas hold in common, entry by entry: gradients, parameters, optimizer state, scaler.

Buffers are not among it: those that are saved are made equal at start, before validation and before saving, and may
differ in between, as the running statistics of batch norm do on ranks that see different rows.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.comparison import Category
from lightning_moeclip.gradients.corridor import optimizer_only_parameters
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.parallel.mesh import Axis
from lightning_moeclip.state.canonical import own_expert_names
from lightning_moeclip.state.layouts import take_apart

__all__ = ["Entry", "Key", "ReplicatedState", "ScalingState"]

SCALER = "loss scale"
MASTER = "master"
Key = tuple[Category, str, str]


class ScalingState(Protocol):
    """The precision plugin, as far as its scaler is concerned."""

    def state_dict(self) -> dict[str, Any]:
        """State of the scaler; empty where there is none."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""


@dataclass(frozen=True)
class Entry:
    """One value that the ranks of ``axis`` hold alike; its key is that of ``Difference``."""

    key: Key
    axis: Axis
    value: object


class ReplicatedState:
    """What this rank holds of what replicas hold in common, and how to change it.

    Attributes:
        parameters: of the module and of optimizers alone, by name.
        axes: replica axis by the name of the parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        masters: MasterWeights | None = None,
        scaling: ScalingState | None = None,
        stepped: Optimizer | None = None,
    ) -> None:
        """Look at a run.

        Args:
            module: the user's module.
            optimizers: of the run.
            masters: of its 16-bit parameters.
            scaling: the precision plugin; None where its scaler is not asked for.
            stepped: optimizer whose gradients are meant: those of others may not be reduced yet. None means all.
        """
        self._optimizers = optimizers
        self._masters = masters
        self._scaling = scaling
        self._stepped = stepped
        outside = optimizer_only_parameters(module, optimizers)
        self.parameters: dict[str, nn.Parameter] = {**dict(module.named_parameters()), **outside}
        own = own_expert_names(module)
        self.axes: dict[str, Axis] = {name: "edp" if name in own else "dp" for name in self.parameters}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._holders: dict[str, tuple[Optimizer, nn.Parameter]] = {
            names[id(model_parameter(held))]: (optimizer, held)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for held in group["params"]
        }
        self._groups = {
            f"optimizer{i}.group{j}": group
            for i, optimizer in enumerate(optimizers)
            for j, group in enumerate(optimizer.param_groups)
        }

    def entries(self, what: Collection[Category]) -> Iterator[Entry]:
        """Entries of the categories in ``what``; masters go with parameters."""
        if "gradients" in what:
            for name, parameter in self.parameters.items():
                owner = self._holders[name][0] if name in self._holders else None
                if parameter.grad is not None and (self._stepped is None or owner is self._stepped):
                    yield Entry(("gradients", name, ""), self.axes[name], parameter.grad)
        if "parameters" in what:
            yield from self._values()
        if "optimizer" in what:
            yield from self._optimizer_state()
        if "scaler" in what and self._scaling is not None:
            state = self._scaling.state_dict()
            if state:
                yield Entry(("scaler", SCALER, ""), "dp", state)

    def _values(self) -> Iterator[Entry]:
        self.settle()
        for name, parameter in self.parameters.items():
            yield Entry(("parameters", name, ""), self.axes[name], parameter)
            master = None if self._masters is None else self._masters.master_of(parameter)
            if master is not None:
                yield Entry(("parameters", name, MASTER), self.axes[name], master)

    def _optimizer_state(self) -> Iterator[Entry]:
        for name, (optimizer, held) in self._holders.items():
            for entry, value in optimizer.state.get(held, {}).items():
                yield Entry(("optimizer", name, entry), self.axes[name], value)
        for name, group in self._groups.items():
            for option, value in group.items():
                if option != "params":
                    yield Entry(("optimizer", name, option), "dp", value)

    @torch.no_grad()
    def put(self, entry: Entry | None, key: Key, value: object) -> None:
        """Give this rank a value, in place where it holds a tensor of the same kind.

        Args:
            entry: what this rank holds under ``key``; None when it holds nothing.
            key: of the value.
            value: of the majority.
        """
        category, name, place = key
        old = None if entry is None else entry.value
        if isinstance(old, Tensor) and isinstance(value, Tensor) and take_apart(old)[0] == take_apart(value)[0]:
            old.copy_(value)
        elif category == "scaler":
            assert self._scaling is not None, "compared before"
            self._scaling.load_state_dict(value)  # type: ignore[arg-type]
        else:
            assert category == "optimizer", "parameters of another layout are refused"
            self._table_of(name)[place] = value

    def drop(self, key: Key) -> None:
        """Forget a value that the majority does not hold."""
        category, name, place = key
        if category == "optimizer":
            table = self._table_of(name)
            table.pop(place, None)
            if not table and name in self._holders:
                optimizer, held = self._holders[name]
                del optimizer.state[held]  # an empty state is none: the optimizer begins one in its next step

    def _table_of(self, name: str) -> Any:
        if name in self._groups:
            return self._groups[name]
        optimizer, held = self._holders[name]
        return optimizer.state[held]

    def settle(self) -> None:
        """Make parameters and masters agree after either was changed."""
        if self._masters is not None:
            self._masters.settle()
