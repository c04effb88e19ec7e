"""A gradient scaler whose decision to skip is one for the world."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.region_scales import BAD, NUM_FIELDS, NUM_ZEROS, SIZE, RegionScales
from lightning_moeclip.gradients.report import LossScale
from lightning_moeclip.kernels.grad_unpack import unscale_

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
    regions: Sequence[str] | None = None
    init_scale: float = 2.0**16
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.regions is not None:
            regions = tuple(self.regions)
            if isinstance(self.regions, str) or not regions:
                raise ValueError(
                    f"regions={self.regions!r} must be a list with a module path or more, such as "
                    "regions=['image.head']. Leave it out to take projection heads and experts."
                )
            object.__setattr__(self, "regions", regions)
        if self.loss_scaling not in ("unified", "local"):
            raise ValueError(f'loss_scaling={self.loss_scaling!r} must be "unified" (the default) or "local".')
        if not (self.init_scale > 0 and math.isfinite(self.init_scale)):
            raise ValueError(f"init_scale={self.init_scale} must be a positive number. The default is 2.0**16.")
        if self.loss_scaling == "local":
            _check_power_of_two(self.init_scale, given=f"init_scale={self.init_scale}")
        if type(self.growth_interval) is not int or self.growth_interval < 1:
            raise ValueError(f"growth_interval={self.growth_interval} must be an integer from 1. The default is 2000.")

    def ignored_by(self, precision: str, *, is_scaled: bool) -> str | None:
        """What to say of settings that do nothing; None when all do something.

        Args:
            precision: name of the precision.
            is_scaled: whether it scales the loss.
        """
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        if not is_scaled and given:
            needs = "master_weights=True" if precision == "16-true" else "precision='16-mixed'"
            return (
                f"MoEClipPrecision({precision!r}, {', '.join(given)}): this precision has no loss scale, so that is "
                f"ignored. Leave it out, or use {needs}, whose gradients are scaled."
            )
        if self.loss_scaling == "unified" and self.regions is not None:
            return (
                f"regions={list(self.regions)} is ignored with loss_scaling='unified', which has one scale. "
                "Write loss_scaling='local'."
            )
        return None


def _check_power_of_two(scale: float, *, given: str) -> None:
    if math.frexp(scale)[0] != 0.5:
        nearest = 2.0 ** round(math.log2(scale))
        raise ValueError(
            f"{given} must be a power of two with loss_scaling='local': regions multiply and divide by their scales, "
            f"which only powers of two do without rounding. Use init_scale={nearest:g}, or loss_scaling='unified'."
        )


def _no_region(parameter: nn.Parameter) -> int:
    return 0


class AgreedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that skips and backs off on all ranks or on none.

    Non-finite gradients are counted on each rank and the counts summed: a MAX loses NaN on gloo. The sum is clamped
    to 1, since fused optimizers skip only on exactly 1.0. What is known of regions travels in the same collective.

    Args:
        device: device type of the scale.
        settings: first scale, growth interval.

    Attributes:
        group: ranks that decide together; None decides alone.
        scales: factors of regions and counts of overflows; without regions the loss scale is all there is.
    """

    def __init__(self, device: str = "cuda", settings: ScalingSettings | None = None) -> None:
        settings = ScalingSettings() if settings is None else settings
        super().__init__(device, init_scale=settings.init_scale, growth_interval=settings.growth_interval)
        self.group: dist.ProcessGroup | None = None
        self.scales = RegionScales(growth_interval=settings.growth_interval)
        self._settings = settings
        self._row_of: Callable[[nn.Parameter], int] = _no_region
        self._loaded: Mapping[str, Any] | None = None
        self._table: Tensor | None = None
        self._agreed: dict[int, Tensor] = {}  # by optimizer

    def join(
        self,
        group: dist.ProcessGroup | None,
        scales: RegionScales,
        row_of: Callable[[nn.Parameter], int] = _no_region,
    ) -> None:
        """Meet the ranks and regions of a run.

        Args:
            group: ranks that decide together.
            scales: factors of its regions.
            row_of: row of ``scales`` for a parameter that an optimizer steps; 0 for one in no region.
        """
        # a state that was loaded before the regions were known, or that of an earlier run
        scales.load_state_dict(self.scales.state_dict() if self._loaded is None else self._loaded)
        scales.growth_interval = self.get_growth_interval()  # of a checkpoint, as that of the loss scale
        self.group, self.scales, self._row_of, self._loaded = group, scales, row_of, None

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and agree on whether any rank found a non-finite one."""
        super().unscale_(optimizer)
        self._agree(optimizer)

    def unscale_once(self, optimizer: Optimizer) -> None:
        """``unscale_``, unless that was done since the last ``update``; every rank must call this."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)

    def release_unscaled(self, optimizers: Iterable[Optimizer]) -> tuple[list[Tensor], bool]:
        """Before a backward: let go of steps that were unscaled, to be clipped, and have not been taken.

        Returns:
            Gradients of steps that may still come: they have to be scaled again, as those that backward adds to them.
            And whether a step was left out with ``zero_grad``: its overflow counts in the next update as any other.
        """
        states, pending, is_left_out = self._per_optimizer_states, [], False
        for optimizer in optimizers:
            if id(optimizer) not in states or states[id(optimizer)]["stage"] is not OptState.UNSCALED:
                continue
            seen = states.pop(id(optimizer))
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            pending.extend(grads)
            if not grads:
                is_left_out = True
                states[~id(seen)] = seen  # of no optimizer
        return pending, is_left_out

    def scale_again(self, grads: Sequence[Tensor]) -> None:
        """Multiply gradients that were unscaled by the scale, in place."""
        assert self._scale is not None, "unscaled before"
        for grad in grads:
            grad.mul_(self._scale.to(grad.device))

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Whether any rank found a gradient that is not finite, after ``unscale_``; waits for the device."""
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(flag.item() > 0 for flag in found.values())

    def forget(self, optimizer: Optimizer) -> None:
        """Let go of a step that is not to be taken: what was found in its gradients decides nothing."""
        self._per_optimizer_states.pop(id(optimizer), None)
        self._agreed.pop(id(optimizer), None)
        self._table = None
        if not self._agreed:
            self.scales.forget_events()

    def leave(self) -> None:
        """Forget whose parameters are in which region; scales and counts stay."""
        self._row_of = _no_region

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        super()._check_inf_per_device(optimizer)
        return self._agree(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale region by region, so that each has a flag of its own; returns all flags by device."""
        by_place: dict[tuple[int, torch.device], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if grad.dtype is torch.float16 and not allow_fp16:
                    raise ValueError(
                        "A float16 gradient cannot be unscaled: what the loss scale saved would be lost again. "
                        "Write MoEClipPrecision(..., master_weights=True), or keep parameters in float32."
                    )
                by_place.setdefault((self._row_of(parameter), grad.device), []).append(grad)
        table = torch.zeros(1 + len(self.scales.regions), NUM_FIELDS, dtype=torch.float64, device=found_inf.device)
        flags: dict[torch.device, Tensor] = {}
        for (row, device), grads in by_place.items():
            found = unscale_(grads, inv_scale.to(device), counts_zeros=self.scales.is_counting)
            flag = (found[0] > 0).float()
            table[row, BAD] += flag.to(table.device)
            flags[device] = flags[device] + flag if device in flags else flag
            if self.scales.is_counting:
                table[row, NUM_ZEROS] += found[1].to(table.device)
                table[row, SIZE] += found[2].to(table.device)
        self.scales.add_events(table)
        self._table = table
        return flags

    def _agree(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert self._table is not None, "agreed before looked at"
        total, self._table = sum_over(self._table, self.group), None
        self._agreed[id(optimizer)] = total + self._agreed.get(id(optimizer), 0.0)
        found_inf = (total[:, BAD].sum() > 0).float()
        devices = list(found) or [total.device]  # an optimizer without a gradient on this rank has none
        found.clear()
        # the flags of several devices are added up, and fused optimizers skip on exactly 1
        found.update({device: found_inf.to(device) * (device == devices[0]) for device in devices})
        return found

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale fall or grow, or a region's factor in its place."""
        scale, tracker = (tensor.clone() for tensor in self._check_scale_growth_tracker("update"))
        super().update(new_scale)
        if not self._agreed:
            return
        assert self._scale is not None, "checked above"
        assert self._growth_tracker is not None, "checked above"
        agreed = torch.stack(list(self._agreed.values())).sum(0)
        is_blamed = self.scales.update(agreed, scale=scale, growth=self._scale / scale)
        self._agreed, self._loaded = {}, None
        if self.scales.regions:
            self._scale.copy_(torch.where(is_blamed, scale, self._scale))
            self._growth_tracker.copy_(torch.where(is_blamed, tracker, self._growth_tracker))

    def report(self) -> dict[str, LossScale]:
        """Scales and rates by region; see ``RegionScales.report``."""
        return {} if self._scale is None else self.scales.report(self._scale)

    def state_dict(self) -> dict[str, Any]:
        """What a stock scaler saves, and the state of the regions."""
        return {**super().state_dict(), "regions": self.scales.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, also of a stock scaler; a step under way is forgotten.

        Raises:
            ValueError: the scale is no power of two, and there are regions.
        """
        if self._settings.loss_scaling == "local":
            _check_power_of_two(state_dict["scale"], given=f"The scale {state_dict['scale']} of this checkpoint")
        super().load_state_dict(state_dict)
        self._loaded = state_dict.get("regions")
        self.scales.load_state_dict(self._loaded)
        self.scales.growth_interval = self.get_growth_interval()
        self._per_optimizer_states.clear()
        self._table, self._agreed = None, {}
