"""The door between gradients and the optimizer: unscale, agree on overflow, clip once over all ranks, step."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_moeclip.binding import (
    DoublePrecision,
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    Precision,
    made_for,
)
from lightning_moeclip.clips import ClippingPrecision
from lightning_moeclip.gradients.clipping import GradientClipper, has_gradients
from lightning_moeclip.gradients.local_scaling import LocalScaling
from lightning_moeclip.gradients.region_scales import RegionScales
from lightning_moeclip.gradients.scaling import AgreedGradScaler, LossScaling, ScalingSettings
from lightning_moeclip.parallel.regions import region_names
from lightning_moeclip.parallel.roles import Towers
from lightning_moeclip.parallel.rules import warn_on_first_rank

__all__ = ["MoEClipPrecision"]

PrecisionName = Literal["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
_STOCK = (Precision, MixedPrecision, DoublePrecision, HalfPrecision)
_STOCK_STATE = "MixedPrecision"
_NO_CLOSURE = "Leave out ResidualResync and CosineRollback, or use an optimizer whose step() needs no closure."


class MoEClipPrecision(ClippingPrecision):
    """Precision plugin whose norm, clip factor and skip decision are the same on all ranks.

    Args:
        precision: one of Lightning's precision names.
        device: device type of autocast and of the scaler; "auto" takes that of the run.
        loss_scaling: "unified" scales the loss by one number; "local" gives regions a factor of their own on top of
            it, for a part of the model whose float16 gradients vanish or overflow where those of the rest do not.
        regions: paths of the modules that have a factor of their own under "local"; None takes projection heads and
            the experts of each layer.
        init_scale: first loss scale; a power of two under "local", where multiplying by it is exact.
        growth_interval: steps without overflow after which a scale is doubled.
        master_weights: keep a float32 copy of every 16-bit parameter for the optimizer, and sum its gradients in
            float32.

    Raises:
        ValueError: unknown precision, or a scale or interval out of its range.
    """

    def __init__(
        self,
        precision: PrecisionName,
        *,
        device: str = "auto",
        loss_scaling: LossScaling = "unified",
        regions: Sequence[str] | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        master_weights: bool = False,
    ) -> None:
        settings = ScalingSettings(loss_scaling, regions, float(init_scale), growth_interval)
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        # float16 gradients are summed in float32 where there are masters; stock "16-true" has nowhere to unscale them
        is_scaled = precision == "16-mixed" or (precision == "16-true" and master_weights)
        scaler = AgreedGradScaler(kind, settings) if is_scaled else None
        if precision == "32-true":
            inner = Precision()
        elif precision == "64-true":
            inner = DoublePrecision()
        elif precision in ("16-mixed", "bf16-mixed"):
            inner = MixedPrecision(precision, kind, scaler)
        elif precision in ("16-true", "bf16-true"):
            inner = HalfPrecision(precision)
        else:
            raise ValueError(
                f"MoEClipPrecision(precision={precision!r}): no such precision. Use one of '32-true', '64-true', "
                "'16-mixed', 'bf16-mixed', '16-true', 'bf16-true'."
            )
        self._wrap(inner, scaler, settings, master_weights=master_weights, is_auto=device == "auto")

    @classmethod
    def upgrade(cls, plugin: Precision) -> "MoEClipPrecision":
        """Wrap a plugin that Lightning made, keeping its casts and its scaler's settings.

        Args:
            plugin: returned as it is when it is one of ours.

        Raises:
            TypeError: a class of the user's, whose overrides would not be called.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) not in _STOCK:
            raise TypeError(
                f"{type(plugin).__qualname__} is a precision plugin that MoEClipStrategy cannot take over: it calls "
                "the gradient's steps itself, so your overrides would be lost. Derive the class from MoEClipPrecision, "
                "or write Trainer(precision=...)."
            )
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, AgreedGradScaler):
            agreed = AgreedGradScaler(plugin.device)
            agreed.load_state_dict(scaler.state_dict())
            plugin.scaler = scaler = agreed
        upgraded = cls.__new__(cls)
        upgraded._wrap(plugin, scaler, ScalingSettings(), master_weights=False, is_auto=False)
        return upgraded

    def _wrap(
        self,
        inner: Precision,
        scaler: AgreedGradScaler | None,
        settings: ScalingSettings,
        *,
        master_weights: bool,
        is_auto: bool,
    ) -> None:
        self._wrap_casts(inner, keeps_originals=master_weights, is_auto=is_auto)
        self._scaler = scaler
        self._settings = settings
        self.has_master_weights = master_weights
        self._before_hooks: Callable[[Optimizer], None] = _nothing
        self._is_held: Callable[[], bool] | None = None
        self._is_joined = False
        self._regions: LocalScaling | None = None
        self._was_clipped = False
        self._is_update_due = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision!r}, {made_for()})"

    @property
    def is_local(self) -> bool:
        """Whether regions have factors of their own: asked for, and the precision scales its loss at all."""
        return self._scaler is not None and self._settings.loss_scaling == "local"

    def open_regions(self, module: nn.Module, *, towers: Towers | None, device: torch.device) -> None:
        """Put boundaries around the regions of ``module``; called by the strategy before the first forward of a fit.

        Args:
            module: the user's module.
            towers: module paths by tower.
            device: of the module.

        Raises:
            ValueError: the regions cannot be bounded.
        """
        ignored = self._settings.ignored_by(self.precision, is_scaled=self._scaler is not None)
        if ignored is not None:
            warn_on_first_rank(ignored)
        self.close_regions()
        if self.is_local:
            settings = self._settings
            self._regions = LocalScaling(
                module, settings.regions, towers=towers, growth_interval=settings.growth_interval, device=device
            )

    def close_regions(self) -> None:
        """Take the boundaries away."""
        if self._regions is not None:
            self._regions.detach()
        self._regions = None
        if self._scaler is not None:
            self._scaler.leave()

    def begin_step(self) -> None:
        """Before a training step; called by the strategy."""
        if self._regions is not None:
            self._regions.begin_step()

    def check_regions(self, loss: Tensor) -> None:
        """Look at the graph of a loss of the first step for gradients that pass by a boundary.

        Raises:
            RuntimeError: there is one.
        """
        if self._regions is not None:
            self._regions.check(loss)

    def divisors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Factors, 0-d each and changed in place, by which gradients inside regions are too large."""
        return {} if self._regions is None else self._regions.divisors(parameters)

    def region_names(self, module: nn.Module, *, towers: Towers | None) -> dict[str, str]:
        """The region of each parameter in one, by the parameter's path; none where one scale serves all."""
        return region_names(module, self._settings.regions, towers=towers) if self.is_local else {}

    def join(
        self,
        clipper: Callable[[], GradientClipper | None],
        *,
        group: torch.distributed.ProcessGroup | None,
        has_spread_experts: bool,
        note: Callable[[Mapping[str, Any]], None],
        device: torch.device,
        before_hooks: Callable[[Optimizer], None],
        is_held: Callable[[], bool] | None,
    ) -> None:
        """Connect to the ranks of a run; called by the strategy when the plan is made.

        Args:
            clipper: norm over all ranks, asked for in each step; None clips as one process does.
            group: ranks that agree on overflow.
            has_spread_experts: a norm over this rank's parameters alone is wrong.
            note: is told fields of the ``GradReport`` that a step changes.
            device: of the gradients.
            before_hooks: called with unscaled gradients, before the user's hooks see them.
            is_held: whether the step at hand is not to be taken, agreed over all ranks, after the hooks; None where
                nobody may hold a step.
        """
        self._before_hooks = before_hooks
        self._is_held = is_held
        self._clipper = clipper
        self._has_spread_experts = has_spread_experts
        self._note = note
        self._is_joined = True
        if self._scaler is None:
            return
        if self._regions is not None:
            self._scaler.join(group, self._regions.scales, self._regions.row_of)
        else:
            self._scaler.join(group, RegionScales(growth_interval=self._settings.growth_interval, device=device))

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        if optimizers and not self._is_joined and (self.is_local or self.has_master_weights):
            setting = "loss_scaling='local'" if self.is_local else "master_weights=True"
            raise ValueError(
                f"MoEClipPrecision({setting}) needs the gradient buckets of MoEClipStrategy. Write "
                "Trainer(strategy=MoEClipStrategy(), plugins=[MoEClipPrecision(...)])."
            )
        return super().connect(model, optimizers, lr_schedulers)

    @property
    def scaler(self) -> AgreedGradScaler | None:
        """The loss scaler; None where the precision needs no scaling."""
        return self._scaler

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale the loss, after the scale of the steps before it is settled."""
        scaler = self._scaler
        if scaler is None:
            return super().pre_backward(tensor, module)
        pending: list[Tensor] = []
        if not module.automatic_optimization:
            pending, is_left_out = scaler.release_unscaled(module.trainer.optimizers)
            self._is_update_due |= is_left_out
        self._settle_scale()
        if pending:
            scaler.scale_again(pending)
        return super().pre_backward(scaler.scale(tensor), module)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Backward, unscale, agree on overflow, the user's hooks, clip, step; all ranks step or none."""
        scaler = self.scaler
        if scaler is None and self._is_held is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self._refuse_closures(optimizer)
        result = closure()
        # no result alone says nothing: an earlier micro-batch had one, or the user's optimizer_step ran the closure
        if result is None and model.automatic_optimization and scaler is not None and not has_gradients(optimizer):
            self._is_left_out = True  # clipping, which hooks may do all the same, must not unscale for a later step
            try:
                self._after_closure(model, optimizer)
            finally:
                self._is_left_out = False
            return result
        # also for fused optimizers, so that clipping sees true gradients; they skip on the agreed flag
        self._unscale(optimizer)
        self._after_closure(model, optimizer)
        if self._is_held is not None and self._is_held():
            is_update_due, output = self._drop(optimizer), result
        elif scaler is None:
            _step(optimizer, **kwargs)
            return result
        else:
            is_update_due, output = True, scaler.step(optimizer, **kwargs)
        # one scale for all optimizers of a step: with several it may change before the next backward at the earliest
        self._is_update_due |= is_update_due
        if len(model.trainer.optimizers) == 1:
            self._settle_scale()
        return output

    def _refuse_closures(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that runs the backward inside its step: nobody could decide before it moves anything."""
        if self.scaler is not None and isinstance(optimizer, LBFGS):
            raise TypeError(
                f"precision={self.precision!r} with LBFGS: it evaluates the closure several times per step, which loss "
                "scaling does not allow. Use precision='32-true', or another optimizer."
            )
        if self._is_held is not None and _needs_closure(type(optimizer).step):
            raise TypeError(
                f"{type(optimizer).__name__} with a callback that may hold a step: it calls backward inside its step, "
                f"and moves parameters before anybody can decide about it. {_NO_CLOSURE}"
            )

    def _drop(self, optimizer: Optimizer) -> bool:
        """Drop the gradients of a step that is held; returns whether the loss scale is to change for it.

        An overflow counts as ever, or a callback that holds steps for it would hold every one.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        # a scheduler warns when no step came before it, and this one was left out on purpose
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._scaler is None or self._scaler.has_overflowed(optimizer):
            return self._scaler is not None
        self._scaler.forget(optimizer)
        return False

    @override
    def _after_closure(self, model: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_left_out:
            self._before_hooks(optimizer)
        super()._after_closure(model, optimizer)

    def _settle_scale(self) -> None:
        if self._is_update_due and self._scaler is not None:
            self._scaler.update()
            if self._regions is not None:
                self._regions.after_update()
            self._tell({"loss_scales": self._scaler.report()})
        self._is_update_due = False

    @override
    def state_dict(self) -> dict[str, Any]:
        self._settle_scale()
        return {} if self._scaler is None else self._scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_update_due = False  # of the steps that are left behind
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # a run under a stock strategy left the scaler's state under the stock name
        if _STOCK_STATE in checkpoint:
            checkpoint.setdefault(type(self).__qualname__, checkpoint[_STOCK_STATE])

    @override
    def teardown(self) -> None:
        self.close_regions()
        super().teardown()


def _nothing(_: object) -> None:
    pass


def _step(optimizer: Optimizer, **kwargs: Any) -> None:
    """Step without a closure, where somebody decides between backward and step.

    Raises:
        TypeError: the optimizer says that it needs one.
    """
    try:
        optimizer.step(**kwargs)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if "closure" not in str(error).lower():
            raise
        raise TypeError(
            f"{type(optimizer).__name__}.step() was called without its closure, since a callback may hold the step "
            f"between the two, and failed: {str(error).splitlines()[0]}. {_NO_CLOSURE}"
        ) from error


@functools.cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
