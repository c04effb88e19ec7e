"""What a snapshot holds of a run: the tensors that training changes, in place, and small Python states beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.master_parameter import MasterParameter, parameter_names
from lightning_moeclip.state.optimizer_state import OptimizerFrame
from lightning_moeclip.state.random_numbers import random_states, set_random_states
from lightning_moeclip.state.strided import check_strided, strided_parts

__all__ = ["OPTIMIZER_STATE", "GetAndSet", "LiveState", "Stateful", "live_state"]

OPTIMIZER_STATE = "optimizer_state"
GetAndSet = tuple[Callable[[], Any], Callable[[Any], None]]


class Stateful(Protocol):
    """A scheduler or precision plugin: something with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, which may alias what is live."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""


@dataclass(frozen=True)
class LiveState:
    """The state of a run, to be read and to be put back in place.

    A tensor's name starts with its kind and a slash. Of "parameters/..." every value has to be finite, of all others
    but "optimizer_state/..." none may be NaN; tensors of that last kind may come and go between take and restore.

    Attributes:
        tensors: the live tensors, by name; each is copied from and into.
        objects: getter and setter of each small Python state; they are handed copies and their values are copied.
        collect: the live tensors anew, when setters may make or drop some; None when they do not.
        layout: lines that must be equal when a snapshot is taken and restored, beside names and shapes of tensors.
    """

    tensors: Mapping[str, Tensor]
    objects: Mapping[str, GetAndSet]
    collect: Callable[[], Mapping[str, Tensor]] | None = field(default=None, kw_only=True)
    layout: Callable[[], Sequence[str]] | None = field(default=None, kw_only=True)

    def current(self) -> Mapping[str, Tensor]:
        """The tensors as they are now."""
        return self.tensors if self.collect is None else self.collect()

    def layout_lines(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """What may not differ between take and restore.

        Args:
            tensors: of ``current``.
        """
        return (
            *(
                f"{name} {list(tensor.shape)} {tensor.dtype}"
                for name, tensor in tensors.items()
                if not name.startswith(f"{OPTIMIZER_STATE}/")
            ),
            *(f"the state of {name}" for name in self.objects),
            *(self.layout() if self.layout is not None else ()),
        )


def live_state(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    schedulers: Sequence[Stateful] = (),
    precision: Stateful | None = None,
    averages: Mapping[str, nn.Module] | None = None,
) -> LiveState:
    """All that the next training step depends on, but data and counters.

    Parameters, buffers (the router's running means among them), extra state of modules, optimizers, masters,
    schedulers, loss scales, random numbers and averaged weights. Parameters are this rank's: its own experts.

    Args:
        module: the user's module.
        optimizers: of the run; masters in them are made to agree with their parameters, as the next step would.
        schedulers: learning rate schedulers, of torch.
        precision: plugin with the loss scaler.
        averages: further modules by name, such as the model of ``WeightAveraging``.

    Raises:
        TypeError: the elements of a tensor do not lie in memory of its own; sparse ones of a module do.
    """
    names = parameter_names(module, optimizers)
    frames = [OptimizerFrame(optimizer, names) for optimizer in optimizers]

    def collect() -> dict[str, Tensor]:
        found = _held_by_modules(module, {} if averages is None else averages)
        known = set(map(id, found.values()))
        for i, (optimizer, frame) in enumerate(zip(optimizers, frames, strict=True)):
            found |= _held_by_optimizer(optimizer, i, names, known)
            held = {f"{OPTIMIZER_STATE}/{i}: {name}": tensor for name, tensor in frame.tensors().items()}
            for name, tensor in held.items():
                check_strided(name, tensor)
            found |= held
        return found

    def layout() -> list[str]:
        return [*_group_lines(frames), *(f"scheduler {i} of {_class_of(s)}" for i, s in enumerate(schedulers))]

    objects: dict[str, GetAndSet] = {"masters": (lambda: _settle(optimizers), lambda _: None)}
    objects |= {f"scheduler {i}": (s.state_dict, s.load_state_dict) for i, s in enumerate(schedulers)}
    if precision is not None:
        objects["precision"] = (precision.state_dict, precision.load_state_dict)
    objects |= _extra_states(module)
    # after the schedulers, whose states do not touch the learning rates that they have set
    objects |= {f"optimizer {i}": (frame.read, frame.write) for i, frame in enumerate(frames)}
    # last: a setter may draw a number
    objects["random numbers"] = (random_states, set_random_states)
    return LiveState(collect(), objects, collect=collect, layout=layout)


def _held_by_modules(module: nn.Module, averages: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of the module and of its averages."""
    held: dict[str, Tensor] = {f"parameters/{name}": p for name, p in module.named_parameters()}
    held |= {f"buffers/{name}": buffer for name, buffer in module.named_buffers()}
    for key, average in averages.items():
        kept = (*average.named_parameters(), *average.named_buffers())
        held |= {f"averages/{key}.{name}": tensor for name, tensor in kept}
    found: dict[str, Tensor] = {}
    for name, tensor in held.items():
        found |= strided_parts(name, tensor)
    return found


def _extra_states(module: nn.Module) -> dict[str, GetAndSet]:
    """Of the layers that define one."""
    return {
        f"module {path!r}": (layer.get_extra_state, layer.set_extra_state)
        for path, layer in module.named_modules()
        if type(layer).get_extra_state is not nn.Module.get_extra_state
    }


def _group_lines(frames: Iterable[OptimizerFrame]) -> list[str]:
    return [
        f"optimizer {i}, group {j}: {', '.join(group)}"
        for i, frame in enumerate(frames)
        for j, group in enumerate(frame.parameter_names())
    ]


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _held_by_optimizer(
    optimizer: Optimizer, index: int, names: Mapping[int, str], known: Iterable[int]
) -> dict[str, Tensor]:
    """Masters, and parameters that the module does not have."""
    found: dict[str, Tensor] = {}
    for j, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            if isinstance(parameter, MasterParameter):
                found[f"masters/{names.get(id(parameter), f'{index}.{j}.{k}')}"] = parameter
                parameter = parameter.model_parameter
            if id(parameter) not in known:
                found[f"parameters/optimizer {index}.{j}.{k}"] = parameter
    return found


def _settle(optimizers: Iterable[Optimizer]) -> None:
    """Let masters and parameters agree, since a restore edits both and cannot tell afterwards who had edited which."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, MasterParameter):
                    parameter.settle()
