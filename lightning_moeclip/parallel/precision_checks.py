"""What 16 bits cannot hold, and settings of a precision that nobody reads."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_moeclip.parallel import rules
from lightning_moeclip.parallel.roles import ParamRole

__all__ = [
    "check_16_bit_parameters",
    "check_epsilon_in_float16",
    "check_wire_dtype",
    "warn_of_no_masters",
    "warn_of_two_precisions",
]


def check_16_bit_parameters(
    parameters: Mapping[str, nn.Parameter], roles: Mapping[str, ParamRole], *, has_masters: bool, is_scaled: bool
) -> None:
    """Refuse parameters that cannot be trained in 16 bits.

    Args:
        parameters: those of the module, by name; frozen ones may have any dtype.
        roles: role by name.
        has_masters: each has a float32 copy that the optimizer steps.
        is_scaled: gradients are unscaled before the step.

    Raises:
        ValueError: a scale of the logits or a float16 router, or a float16 parameter under loss scaling.
    """
    for name, parameter in parameters.items():
        kind, dtype = roles[name].kind, parameter.dtype
        if dtype not in (torch.float16, torch.bfloat16) or not parameter.requires_grad:
            continue
        if kind == "logit_scale":
            shape = (
                "" if parameter.ndim == 0 else f" Its shape is {list(parameter.shape)}: only a 0-d one stays float32."
            )
            raise ValueError(
                rules.NARROW_SCALE.told(
                    f"{name} is {dtype}: near ln 100 it can only move in steps of "
                    f"{4 * torch.finfo(dtype).eps:.1%}, and Adam's eps vanishes in float16.{shape} Keep it in float32, "
                    "nn.Parameter(torch.tensor(2.6592, dtype=torch.float32)), also where the rest is cast with half() "
                    "or bfloat16(); ContrastiveLoss and SigmoidLoss keep theirs."
                )
            )
        if kind == "router" and not has_masters:
            told = (
                f"{name} is a router in {dtype}: its steps are smaller than what {dtype} resolves, so it stops "
                "learning. Use lightning_moeclip.modules.MoE, whose router stays float32, or "
                f"MoEClipPrecision(..., master_weights=True)."
            )
            if dtype is torch.float16:
                raise ValueError(rules.HALF_ROUTER.told(told))
            rules.NARROW_ROUTER.warn(told)
        if dtype is torch.float16 and is_scaled and not has_masters:
            raise ValueError(
                rules.HALF_UNDER_SCALING.told(
                    f"{name} is float16 while the loss is scaled: its gradient cannot be unscaled in float16. Leave "
                    "out module.half(), since precision='16-mixed' casts what it computes, or write "
                    "MoEClipPrecision(..., master_weights=True)."
                )
            )


def check_epsilon_in_float16(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> None:
    """Refuse Adam whose epsilon is zero in the float16 of its state: it divides 0 by 0 where a gradient is 0.

    Fused kernels add it in float32.

    Args:
        optimizers: all of the run, after masters have taken the place of 16-bit parameters.
        names: name by id of the Parameter.

    Raises:
        ValueError: there is one.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            vanishes = "betas" in group and torch.tensor(group.get("eps", 1.0), dtype=torch.float16) == 0
            narrow = [p for p in group["params"] if p.dtype is torch.float16 and p.requires_grad]
            if vanishes and narrow and not group.get("fused"):
                name = names.get(id(narrow[0]), "a parameter")
                raise ValueError(
                    rules.VANISHED_EPSILON.told(
                        f"{type(optimizer).__name__}(eps={group['eps']}) steps {name} in float16, where that eps is 0: "
                        "weights whose gradient is 0 become NaN. Write "
                        "MoEClipPrecision('16-true', master_weights=True), or eps=1e-4."
                    )
                )


def warn_of_two_precisions(of_trainer: str, of_plugin: str) -> None:
    """Warn that Lightning leaves out one of two settings.

    Args:
        of_trainer: what ``Trainer(precision=...)`` says; "32-true" also where it says nothing.
        of_plugin: precision of the plugin that is used.
    """
    if of_trainer not in ("32-true", of_plugin):
        rules.TWO_PRECISIONS.warn(
            f"Trainer(precision={of_trainer!r}) is ignored: the strategy was given a precision_plugin of "
            f"{of_plugin!r}, and that one is used. Leave out one of the two."
        )


def check_wire_dtype(gradient_dtype: torch.dtype | None, *, is_local: bool) -> None:
    """Refuse float16 between ranks where regions answer for their own overflows.

    Args:
        gradient_dtype: in which gradients are summed over ranks.
        is_local: regions have a loss scale of their own.

    Raises:
        ValueError: both.
    """
    if is_local and gradient_dtype is torch.float16:
        raise ValueError(
            rules.HALF_ON_THE_WIRE.told(
                "gradient_dtype=torch.float16 with loss_scaling='local': a sum over ranks that overflows would be "
                "blamed on a region, whose scale is not that of the sum. Write "
                "gradient_dtype=torch.bfloat16, or leave it out."
            )
        )


def warn_of_no_masters(precision: str) -> None:
    """Warn that master weights were asked for where no parameter has 16 bits."""
    rules.NO_MASTERS.warn(
        f"master_weights=True with precision={precision!r}: the optimizers hold no 16-bit parameter, so there are no "
        "masters. Write precision='16-true' or 'bf16-true', or leave it out."
    )
