"""Float32 masters of all 16-bit parameters of a run, which computes with their rounding.

Where a value in 16 bits is not the rounding of its master, somebody has edited it, and it wins, element by element.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_moeclip.gradients.master_parameter import MasterParameter, model_parameter, widened
from lightning_moeclip.parallel.mesh import ExpertAxis

__all__ = ["MasterWeights"]

_NARROW = (torch.float16, torch.bfloat16)


class MasterWeights:
    """Masters of all 16-bit parameters that optimizers hold, and the way between them and the module.

    An edit of a 16-bit parameter under ``torch.no_grad()`` is seen always. One through ``.data`` is seen where the
    tensor is another one; where it changes the old one in place it leaves no trace that each step could look for, and
    is seen by checkpoints alone.
    """

    def __init__(self, *, axis: ExpertAxis | None = None, previous: "MasterWeights | None" = None) -> None:
        """Start without masters.

        Args:
            axis: ranks that share out experts: a value for the whole of a slice is cut to this rank's.
            previous: of an earlier run, whose values the parameters start from.
        """
        self._axis = axis
        self._masters: dict[int, MasterParameter] = {}
        self._handles: dict[Optimizer, list[torch.utils.hooks.RemovableHandle]] = {}
        self._previous = {} if previous is None else previous._masters
        self.is_attached = True
        if previous is not None:
            previous.unhook()

    def __len__(self) -> int:
        return len(self._masters)

    def master_of(self, parameter: nn.Parameter) -> MasterParameter | None:
        """The master of a parameter of the module, or None."""
        return self._masters.get(id(parameter))

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer steps for ``parameter``: its master, or itself."""
        return self._masters.get(id(parameter), parameter)

    def wide_value(self, parameter: nn.Parameter) -> Tensor:
        """Float32 value of a parameter that has a master, and the parameter itself of one that has none."""
        master = self._masters.get(id(parameter))
        return parameter if master is None else widened(parameter, master)

    def cover(self, optimizers: Sequence[Optimizer]) -> None:
        """Put a master in the place of each 16-bit parameter that has none there, with its optimizer state.

        Raises:
            TypeError: LBFGS holds such a parameter.
        """
        for optimizer in optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            is_known = optimizer in self._handles
            if any(_is_narrow(p) and not (is_known and p is self.master_of(model_parameter(p))) for p in held):
                self._cover(optimizer)
        self._previous = {}

    def _cover(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "master_weights=True with LBFGS: it moves the parameters several times in one step, and masters are "
                "copied into the module after a step. Use another optimizer, or precision='32-true'."
            )
        known: set[int] = set()
        for group in optimizer.param_groups:
            held = [self._enter(p) if _is_narrow(p) else p for p in group["params"]]
            for parameter, master in zip(group["params"], held, strict=True):
                if parameter is not master and parameter in optimizer.state:
                    optimizer.state[master] = _wide_state(optimizer.state.pop(parameter), parameter.dtype)
            # a finetuning callback does not find a parameter behind its master, and adds it once more
            once = {id(p): p for p in held if id(p) not in known}
            group["params"] = list(once.values())
            known |= once.keys()
        if optimizer not in self._handles:
            self._handles[optimizer] = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def _enter(self, parameter: nn.Parameter) -> MasterParameter:
        narrow = model_parameter(parameter)
        master = self._masters.get(id(narrow))
        if master is None:
            master = parameter if isinstance(parameter, MasterParameter) else MasterParameter(narrow)
            master.attach()
            self._masters[id(narrow)] = master
            for known in (master, self._previous.get(id(narrow))):
                if known is not None:
                    self._take(master, known)
        return master

    def take(self, values: Mapping[int, Tensor]) -> None:
        """Digits that the cast to 16 bits has lost.

        Args:
            values: by the id of the module's parameter; whole experts may stand for a slice. What does not round to
                the parameter's value is left.
        """
        for key, value in values.items():
            if key in self._masters:
                self._take(self._masters[key], value)

    @torch.no_grad()
    def _take(self, master: MasterParameter, value: Tensor) -> None:
        narrow = master.model_parameter
        if value.shape != narrow.shape and value.ndim and self._axis is not None:
            value = value.detach().chunk(self._axis.size)[self._axis.rank]
        if value.shape == narrow.shape:
            known = [master] if master.shape == narrow.shape else []  # it has held the whole of a slice
            master.data = widened(narrow, *known, value)
            master.agree()

    def settle(self) -> None:
        """Between steps: take over edits of the 16-bit parameters, and show those of the masters."""
        for master in self._masters.values():
            master.settle()

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        position = args[1] if len(args) > 1 else None
        closure = kwargs.get("closure", position)
        if not callable(closure):
            self._before_update(optimizer)
            return None

        @functools.wraps(closure)
        def closure_then_update(*given: Any, **named: Any) -> Any:
            returned = closure(*given, **named)
            self._before_update(optimizer)
            return returned

        if position is closure:
            return (args[0], closure_then_update, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_update}

    def _before_update(self, optimizer: Optimizer) -> None:
        self.cover([optimizer])  # groups added since the training step began
        for master in _masters_in(optimizer):
            master.attach()
            master.settle()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        masters = _masters_in(optimizer)
        if masters:
            torch._foreach_copy_([m.model_parameter for m in masters], list[Tensor](masters))
        for master in masters:
            master.agree()

    @torch.no_grad()
    def wide_state(self, state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
        """``state`` of ``module`` with float32 values where there are masters."""
        wide = dict(state)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            master, value = self._masters.get(id(parameter)), wide.get(name)
            if master is None or not isinstance(value, Tensor):
                continue
            if (value.dtype, value.shape) == (parameter.dtype, parameter.shape):  # else a hook has put another there
                wide[name] = widened(value, master)
        return wide

    def release(self) -> None:
        """End of a run: gradients of the module's own dtype again, and masters on its device, with their optimizers."""
        self.is_attached = False
        for master in self._masters.values():
            master.detach_gradient()
            master.data = master.data.to(master.model_parameter.device)

    def unhook(self) -> None:
        """Leave the optimizers alone from now on."""
        for handle in [handle for handles in self._handles.values() for handle in handles]:
            handle.remove()
        self._handles.clear()


def _is_narrow(parameter: nn.Parameter) -> bool:
    return model_parameter(parameter).dtype in _NARROW


def _masters_in(optimizer: Optimizer) -> list[MasterParameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, MasterParameter)]


def _wide_state(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """State of a 16-bit parameter for its master: moments in float32."""
    return {k: v.float() if isinstance(v, Tensor) and v.dtype is dtype else v for k, v in state.items()}
