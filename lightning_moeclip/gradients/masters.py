"""Float32 masters of 16-bit parameters: what the optimizer steps, while the module computes with its rounding.

A master takes the place of its parameter in the optimizer's groups and has no gradient of its own: its ``grad`` is the
parameter's, which autograd leaves in float32 (``Tensor.grad_dtype``). So ``zero_grad``, clipping, loss scalers and
hooks see one gradient, whichever of the two they ask, and micro-batches are summed in float32.

Where a value in 16 bits is not the rounding of the master, somebody has edited it, and it wins, element by element.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as torch_optimizer
from typing_extensions import Self, override

from lightning_moeclip.parallel.mesh import ExpertAxis

__all__ = ["MasterParameter", "MasterWeights", "model_parameter", "parameter_names", "widened"]

_NARROW = (torch.float16, torch.bfloat16)


class MasterParameter(nn.Parameter):
    """Float32 value of a 16-bit parameter, for the optimizer; gradient and trainability are the parameter's own.

    Attributes:
        model_parameter: the 16-bit parameter of the module.
    """

    model_parameter: nn.Parameter
    _agreed: tuple[int, int, int]

    def __new__(cls, parameter: nn.Parameter) -> Self:
        """Start from the parameter's own value, and have its gradients left in float32."""
        master = super().__new__(cls, parameter.detach().float())
        master.model_parameter = parameter
        master.attach()
        master.agree()
        return master

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Gradient of the parameter."""
        return self.model_parameter.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.model_parameter.grad = value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained; ``toggle_optimizer`` switches it here."""
        return self.model_parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.model_parameter.requires_grad = value

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.model_parameter.requires_grad_(requires_grad)
        return self

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            # of the parameter's copy in the same memo, so that a module copied along stays with it
            parameter = memo.get(id(self.model_parameter))
            copied = type(self)(self.model_parameter.__deepcopy__(memo) if parameter is None else parameter)
            copied.data = self.data.clone()
            copied.agree()
            memo[id(self)] = copied
        return cast("Self", memo[id(self)])

    @torch.no_grad()
    def attach(self) -> None:
        """Have autograd leave float32 gradients on the parameter, as one that is there already becomes."""
        parameter = self.model_parameter
        if parameter.grad_dtype is not torch.float32:
            grad, parameter.grad = parameter.grad, None  # torch allows the change only without a gradient
            parameter.grad_dtype = torch.float32
            parameter.grad = None if grad is None else grad.float()

    def become(self, value: Tensor) -> None:
        """Take another value, which may be of another shape, as the parameter has just done.

        Args:
            value: [shape of the parameter], what does not round to the parameter's value is left.
        """
        self.data = widened(self.model_parameter, value)
        self.agree()

    def detach_gradient(self) -> None:
        """Give the parameter gradients of its own dtype again, without the one that is there."""
        self.model_parameter.grad = None
        self.model_parameter.grad_dtype = self.model_parameter.dtype

    def agree(self) -> None:
        """Note that parameter and master hold the same value."""
        self._agreed = self._edits()

    def _edits(self) -> tuple[int, int, int]:
        """Counts of in-place changes of both, and where the parameter lies: what an edit changes."""
        return self.model_parameter._version, self.model_parameter.data_ptr(), self._version

    @torch.no_grad()
    def settle(self) -> None:
        """Make master and parameter agree after either was edited in place; an edit of the parameter wins."""
        edits = self._edits()
        if edits == self._agreed:
            return
        if edits[:2] != self._agreed[:2]:
            self.copy_(widened(self.model_parameter, self))
        else:
            self.model_parameter.copy_(self)
        self.agree()


# torch takes its multi-tensor kernels for the classes on its list, to which DTensor adds itself the same way
if MasterParameter not in torch_optimizer._foreach_supported_types:
    torch_optimizer._foreach_supported_types.append(MasterParameter)  # type: ignore[arg-type]


def model_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The module's parameter that an entry of an optimizer stands for: behind a master, or the entry itself."""
    return parameter.model_parameter if isinstance(parameter, MasterParameter) else parameter


def parameter_names(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[int, str]:
    """Names of the module's parameters, by the id of the parameter and by that of its master in ``optimizers``."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return names | {id(p): names[id(model_parameter(p))] for p in held if id(model_parameter(p)) in names}


@torch.no_grad()
def widened(narrow: Tensor, *candidates: Tensor) -> Tensor:
    """Float32 value of ``narrow``: that of the last candidate which rounds to it, else its own, by element.

    Args:
        narrow: float16 or bfloat16, any shape.
        candidates: same shape, wider dtypes.
    """
    value = narrow.detach().float()
    for wide in candidates:
        here = wide.detach().to(narrow.device)
        value = torch.where(here.to(narrow.dtype) == narrow, here.float(), value)
    return value


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
        """End of a run: gradients of the module's own dtype again. Masters stay with their optimizers."""
        self.is_attached = False
        for master in self._masters.values():
            master.detach_gradient()

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
