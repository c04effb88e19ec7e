"""One float32 master: what the optimizer steps in the place of a 16-bit parameter.

It has no gradient of its own: its ``grad`` is the parameter's, which autograd leaves in float32
(``Tensor.grad_dtype``). So ``zero_grad``, clipping, loss scalers and hooks see one gradient, whichever of the two they
ask, and micro-batches are summed in float32.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from typing_extensions import Self, override

__all__ = ["MasterParameter", "model_parameter", "parameter_names", "widened"]


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


def parameter_names(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    *,
    outside: Mapping[str, nn.Parameter] = MappingProxyType({}),
) -> dict[int, str]:
    """Names of parameters, by the id of the parameter and by that of its master in ``optimizers``.

    Args:
        module: whose parameters are meant.
        optimizers: of the run.
        outside: further parameters, which only an optimizer holds.
    """
    names = {id(parameter): name for name, parameter in [*module.named_parameters(), *outside.items()]}
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
