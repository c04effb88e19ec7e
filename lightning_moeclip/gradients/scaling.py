"""A gradient scaler whose decision to skip is one for the world."""

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_moeclip.gradients.collectives import sum_over

__all__ = ["AgreedGradScaler"]


class AgreedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that skips and backs off on all ranks or on none.

    Non-finite gradients are counted on each rank and the counts summed: a MAX loses NaN on gloo. The sum is clamped
    to 1, since fused optimizers skip only on exactly 1.0.

    Attributes:
        group: ranks that decide together; None decides alone.
    """

    group: dist.ProcessGroup | None = None

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
