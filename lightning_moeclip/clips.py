"""Clipping by the one norm over all ranks, whoever asks for it: the Trainer, the user's hook, manual optimization."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moeclip.binding import GradClipAlgorithmType, LightningModule, LightningOptimizer
from lightning_moeclip.casts import CastingPrecision
from lightning_moeclip.gradients.clipping import GradientClipper
from lightning_moeclip.gradients.scaling import AgreedGradScaler

__all__ = ["ClippingPrecision"]


class ClippingPrecision(CastingPrecision):
    """Unscales before it clips, clips spread experts where they lie, and refuses a norm that was taken past it."""

    _clipper: Callable[[], GradientClipper | None] | None = None
    _has_spread_experts = False
    _note: Callable[[Mapping[str, Any]], None] | None = None
    _scaler: AgreedGradScaler | None = None
    _was_clipped = False
    _is_left_out = False

    @override
    def _clip_gradients(self, model: LightningModule, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if not self._has_spread_experts or not model.automatic_optimization:
            super()._clip_gradients(model, optimizer, *args, **kwargs)
            return
        before = _versions(self.main_params(optimizer))
        self._was_clipped = False
        super()._clip_gradients(model, optimizer, *args, **kwargs)
        if not self._was_clipped and _versions(self.main_params(optimizer)) != before:
            raise RuntimeError(
                "configure_gradient_clipping changed gradients by itself. Experts are spread over ranks, so a norm "
                "taken on one rank misses the others' experts and scales shared weights differently on each. "
                "Write self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm=...) there, "
                "or self.trainer.strategy.clip_grad_norm_(max_norm)."
            )

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by the norm over all ranks, or by value; gradients are unscaled first."""
        if clip_val <= 0:
            return
        self._was_clipped = True
        self._unscale(optimizer)  # manual optimization clips before the step does it
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.clip_norm([optimizer], float(clip_val))

    def clip_norm(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Clip the reduced gradients of ``optimizers`` by their one norm over all ranks; returns the norm before."""
        self._was_clipped = True
        for optimizer in optimizers:
            self._unscale(optimizer)
        parameters = [p for optimizer in optimizers for p in self.main_params(optimizer)]
        clipper = None if self._clipper is None else self._clipper()
        if clipper is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        norm, factor = clipper.clip(parameters, max_norm)
        self._tell({"total_norm": norm, "clip_factor": factor})
        return norm

    def _tell(self, fields: Mapping[str, Any]) -> None:
        if self._note is not None:
            self._note(fields)

    def _unscale(self, optimizer: Optimizer) -> None:
        # LightningOptimizer, which manual optimization hands out, stands for the one that was stepped
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._scaler is not None and not self._is_left_out:
            self._scaler.unscale_once(plain)


def _versions(parameters: Any) -> list[tuple[int, int]]:
    """Identity and number of in-place changes of each gradient."""
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]
