"""The rules for the scale of the logits: float32, never decayed, bounded after each optimizer step.

The rules act in hooks around the step of every ``torch.optim`` optimizer that holds the parameter, so they hold under
any strategy or none. Losses are referenced weakly; a copied or unpickled loss is watched like a new one.

* **Bound.** After the step the log of the scale is clamped to [0, log(max_scale)] in place. A clamp in the forward
  would have zero gradient beyond the bound, and the scale could never come back. NaN stays NaN.
* **No decay.** For the length of the update alone the parameter sits in a group of its own, a copy of its group with
  ``weight_decay`` 0. Its state is kept by parameter, so this is exact for SGD, Adam, AdamW and whatever else reads
  ``weight_decay`` from the group, foreach and fused too. A closure runs before the groups are split; after the step,
  and before any ``state_dict``, they are whole again: nobody else sees another number of groups.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import Self, override

from lightning_moeclip.kernels.contrastive_dispatch import check_chunk_size
from lightning_moeclip.modules.directions import DirectionSums

__all__ = ["ScaledLoss"]


class ScaledLoss(nn.Module):
    """A loss with a learned scale of its logits, under the rules of this file.

    Attributes:
        logit_scale: 0-d, float32 whatever ``half()`` or ``bfloat16()`` a parent sees, float64 after ``double()``.
        wants_directions: have each backward sum up how far the two halves of the loss agree, for
            ``pop_direction_sums``. Read in the forward. Where any rank wishes it all ranks compute it; gradients stay
            the same bit by bit.
    """

    def __init__(self, init_temperature: float, max_scale: float, chunk_size: int, normalize: bool) -> None:
        super().__init__()
        name = type(self).__name__
        if not max_scale > 1 or math.isinf(max_scale):
            raise ValueError(f"max_scale={max_scale} must be a number above 1. Use {name}(max_scale=100.0).")
        if not 1 / max_scale <= init_temperature <= 1:
            raise ValueError(
                f"init_temperature={init_temperature} must lie in [1 / max_scale, 1] = [{1 / max_scale:g}, 1], where "
                f"its inverse is a scale within bounds. Use {name}(init_temperature=0.07)."
            )
        check_chunk_size(chunk_size)
        self.init_temperature, self.max_scale = init_temperature, max_scale
        self.chunk_size, self.normalize = chunk_size, normalize
        self.wants_directions = False
        self._directions = DirectionSums()
        # not the default dtype: a bfloat16 near log(100) moves in steps of 3.2 %
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(init_temperature), dtype=torch.float32))
        _watch(self)

    def reset_parameters(self) -> None:
        """Go back to the initial values, for a module that was made on the meta device."""
        nn.init.constant_(self.logit_scale, -math.log(self.init_temperature))

    @property
    def directions(self) -> DirectionSums | None:
        """Where the next backward puts its sums; None while nobody asks."""
        return self._directions if self.wants_directions else None

    def pop_direction_sums(self) -> Tensor | None:
        """[a.b, a.a, b.b] of this rank since the last call, [3] float64; None where no backward was asked for them.

        a and b are the cotangents that the two halves of the loss send to this rank's features, both towers together;
        sums of all ranks and of micro-batches add up, and a.b / sqrt(a.a b.b) is the cosine. A tower that is not
        trained is left out.
        """
        return self._directions.pop()

    def undecayed(self) -> list[nn.Parameter]:
        """The scalars that weight decay must not touch."""
        return [self.logit_scale]

    @torch.no_grad()
    def after_step(self) -> None:
        """Clamp the log of the scale to [0, log(max_scale)] in place; to be called after the optimizer's step."""
        self.logit_scale.clamp_(0.0, math.log(self.max_scale))

    @override
    def extra_repr(self) -> str:
        return f"max_scale={self.max_scale:g}, chunk_size={self.chunk_size}, normalize={self.normalize}"

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _watch(self)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_wide(x: Tensor) -> Tensor:
            moved = fn(x)
            # from x and not from moved: the digits are gone there
            return x.to(moved.device) if moved.dtype.itemsize < torch.float32.itemsize else moved

        return super()._apply(keep_wide, recurse)


_living: "weakref.WeakSet[ScaledLoss]" = weakref.WeakSet()
# optimizer -> what makes its groups whole again, empty between steps
_splits: "weakref.WeakKeyDictionary[Optimizer, list[Callable[[], None]]]" = weakref.WeakKeyDictionary()


def _watch(loss: ScaledLoss) -> None:
    _living.add(loss)
    _install_hooks()


@functools.cache
def _install_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    _join(optimizer)  # an update that raised left them split
    position = args[1] if len(args) > 1 else None
    closure = kwargs.get("closure", position)
    if not callable(closure):
        _split(optimizer)
        return None

    @functools.wraps(closure)
    def closure_then_split(*given: Any, **named: Any) -> Any:
        _join(optimizer)
        returned = closure(*given, **named)
        _split(optimizer)
        return returned

    if position is closure:
        return (args[0], closure_then_split, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_then_split}


def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    _join(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if _living else set()
    for loss in list(_living):
        if id(loss.logit_scale) in held:
            loss.after_step()


def _split(optimizer: Optimizer) -> None:
    """Put the scalars of all losses into groups that are not decayed."""
    scalars = {id(p) for loss in list(_living) for p in loss.undecayed()}
    for group in list(optimizer.param_groups):
        params = group["params"]
        ours = [p for p in params if id(p) in scalars] if group.get("weight_decay") else []
        if not ours:
            continue
        if optimizer not in _splits:
            optimizer.register_state_dict_pre_hook(_join)
        undo = _splits.setdefault(optimizer, [])
        if len(ours) == len(params):  # not every optimizer bears an empty group
            undo.append(functools.partial(group.__setitem__, "weight_decay", group["weight_decay"]))
            group["weight_decay"] = 0.0
            continue
        apart = {**group, "params": ours, "weight_decay": 0.0}
        group["params"] = [p for p in params if id(p) not in scalars]
        optimizer.param_groups.append(apart)
        undo.append(functools.partial(_merge, optimizer, group, params, apart))


def _merge(optimizer: Optimizer, group: dict, params: list, apart: dict) -> None:
    group["params"] = params
    optimizer.param_groups[:] = [g for g in optimizer.param_groups if g is not apart]


def _join(optimizer: Optimizer) -> None:
    """Undo the split; nothing to do between steps."""
    undo = _splits.get(optimizer, [])
    while undo:
        undo.pop()()
