"""A gradient scaler whose decision to skip is one for the world."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_moeclip.gradients.collectives import sum_over

__all__ = ["AgreedGradScaler", "LossScaling", "ScalingSettings"]

LossScaling = Literal["unified", "local"]


@dataclass(frozen=True)
class ScalingSettings:
    """What a user chose about loss scales.

    Attributes:
        loss_scaling: "unified" or "local".
        regions: module paths with a factor of their own; None takes the default ones.
        init_scale: first scale.
        growth_interval: steps without overflow after which a scale is doubled.
    """

    loss_scaling: LossScaling = "unified"
    regions: tuple[str, ...] | None = None
    init_scale: float = 2.0**16
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.loss_scaling not in ("unified", "local"):
            raise ValueError(f'loss_scaling={self.loss_scaling!r} must be "unified" (the default) or "local".')
        if not (self.init_scale > 0 and math.isfinite(self.init_scale)):
            raise ValueError(f"init_scale={self.init_scale} must be a positive number. The default is 2.0**16.")
        if self.loss_scaling == "local" and math.frexp(self.init_scale)[0] != 0.5:
            nearest = 2.0 ** round(math.log2(self.init_scale))
            raise ValueError(
                f"init_scale={self.init_scale} must be a power of two with loss_scaling='local': regions multiply and "
                f"divide by their scales, which only powers of two do without rounding. Use init_scale={nearest:g}."
            )
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval={self.growth_interval} must be at least 1. The default is 2000.")


class AgreedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that skips and backs off on all ranks or on none.

    Non-finite gradients are counted on each rank and the counts summed: a MAX loses NaN on gloo. The sum is clamped
    to 1, since fused optimizers skip only on exactly 1.0.

    Attributes:
        group: ranks that decide together; None decides alone.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, device: str = "cuda", settings: ScalingSettings | None = None) -> None:
        settings = ScalingSettings() if settings is None else settings
        super().__init__(device, init_scale=settings.init_scale, growth_interval=settings.growth_interval)
        self.settings = settings

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and agree on whether any rank found a non-finite one."""
        super().unscale_(optimizer)
        self._agree(optimizer)

    def unscale_once(self, optimizer: Optimizer) -> None:
        """``unscale_``, unless that was done since the last ``update``; every rank must call this."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        super()._check_inf_per_device(optimizer)
        return self._agree(optimizer)

    def _agree(self, optimizer: Optimizer) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert self._scale is not None, "scaled before unscaled"
        count = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        for flag in found.values():  # empty when the optimizer has no gradient on this rank
            count += flag.to(count.device)
        total = (sum_over(count, self.group) > 0).float()
        devices = list(found) or [total.device]
        found.clear()
        # the flags of several devices are added up, and fused optimizers skip on exactly 1
        found.update({device: total.to(device) * (device == devices[0]) for device in devices})
        return found
