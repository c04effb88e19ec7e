"""The faults behind ``inject``: callbacks that are given to the Trainer on every rank and act on one of them."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.gradients.buckets import Bucket, Slot
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing.timed_fault import Fault

__all__ = ["FAULTS", "InjectedFault", "ScaleGrad", "Stall"]


class InjectedFault(Exception):
    """What ``inject("exception", ...)`` raises."""


class _LocalGradients(Fault):
    """Changes what autograd is about to add to ``.grad`` of some parameters, before anybody reduces it."""

    def __init__(self, step: int, rank: int, *, parameter: str | None = None) -> None:
        super().__init__(step, rank, parameter=parameter)
        self._nodes: list[torch.autograd.graph.Node] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def _watch(self, parameters: list[nn.Parameter], change: Callable[[Tensor], Tensor]) -> None:
        @torch.no_grad()
        def before_accumulation(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (change(gradients[0]),)

        for parameter in parameters:
            if parameter.requires_grad:
                # not a hook of the tensor, which torch.autograd.grad calls too
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._nodes.append(node)  # autograd makes a new one, without the hook, when nobody holds it
                self._handles.append(node.register_prehook(before_accumulation))

    @override
    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


class NanGrad(_LocalGradients):
    name = "nan_grad"

    @override
    def _arm(self, trainer: Trainer, module: LightningModule) -> None:
        self._watch([self._first_dense_or_named(trainer, module)], self._change)

    def _change(self, gradient: Tensor) -> Tensor:
        if self.fired is not None:
            return gradient
        changed = gradient.clone()
        values = changed._values() if changed.is_sparse else changed
        if values.numel():
            values[(0,) * values.ndim] = float("nan")
            self._fire()
        return changed


class ScaleGrad(_LocalGradients):
    """Gradients of one rank that are ``factor`` times too large."""

    name = "scale_grad"

    def __init__(self, step: int, rank: int, *, parameter: str | None = None, factor: float) -> None:
        super().__init__(step, rank, parameter=parameter)
        self.factor = factor

    @override
    def _arm(self, trainer: Trainer, module: LightningModule) -> None:
        self._watch(self._all_or_named(module), self._change)

    def _change(self, gradient: Tensor) -> Tensor:
        self._fire()
        return gradient * self.factor


class SignFlip(Fault):
    name = "sign_flip"

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Flip the sign of what the reduction has left on this rank."""
        # while a step accumulates nothing is reduced yet
        if not self._is_armed or self.fired is not None or trainer.fit_loop._should_accumulate():
            return
        for gradient in [p.grad for p in self._all_or_named(pl_module) if p.grad is not None]:
            gradient.neg_()
            self._fire()


class DropReduce(_LocalGradients):
    name = "drop_reduce"

    def __init__(self, step: int, rank: int, *, parameter: str | None = None) -> None:
        super().__init__(step, rank, parameter=parameter)
        self._wrapped: list[Bucket] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the reduction is ours."""
        if not isinstance(trainer.strategy, MoEClipStrategy):
            raise TypeError(
                f"{self} reaches into the reduction of MoEClipStrategy, and the strategy is "
                f"{type(trainer.strategy).__name__}. Write Trainer(strategy=MoEClipStrategy(), ...)."
            )
        super().setup(trainer, pl_module, stage)

    @override
    def _arm(self, trainer: Trainer, module: LightningModule) -> None:
        chosen = {id(p) for p in self._all_or_named(module)}

        def on_first_gradient(gradient: Tensor) -> Tensor:
            # only now: buckets may be made anew between the start of a batch and its backward
            reducer = trainer.strategy._corridor.reducer
            if self.fired is None and not self._wrapped and reducer is not None and not reducer.is_paused:
                for bucket in reducer.buckets:
                    self._wrap(bucket, [slot for slot in bucket.slots if id(slot.parameter) in chosen])
            return gradient

        self._watch(list(module.parameters()), on_first_gradient)

    def _wrap(self, bucket: Bucket, slots: list[Slot]) -> None:
        """Have ``slots`` hold after the sum what this rank put into it."""
        if bucket.group is None or not slots:
            return
        launch, wait = bucket.launch, bucket.wait
        kept: list[Tensor] = []

        def launch_and_keep() -> None:
            bucket.close()
            kept.extend(slot.view.clone() for slot in slots)
            launch()

        def wait_and_put_back() -> None:
            wait()
            for slot, own in zip(slots, kept, strict=True):
                slot.view.copy_(own)
            self._unwrap(bucket)
            self._fire()

        self._wrapped.append(bucket)
        vars(bucket).update(launch=launch_and_keep, wait=wait_and_put_back)

    def _unwrap(self, bucket: Bucket) -> None:
        for name in ("launch", "wait"):
            vars(bucket).pop(name, None)

    @override
    def _disarm(self) -> None:
        super()._disarm()
        for bucket in self._wrapped:
            self._unwrap(bucket)
        self._wrapped.clear()

    @override
    def _why_not(self) -> str:
        return f"rank {self.rank} reduced nothing in step {self._batch_step}, or shares it with no other rank."


class Desync(Fault):
    name = "desync"

    @override
    def _end_step(self, trainer: Trainer, module: LightningModule) -> None:
        parameter = self._first_dense_or_named(trainer, module)
        values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        index = torch.unravel_index(values.abs().argmax(), values.shape)
        # bits of a float, read as an integer, count in its ulps; with the version counter, which tells a master
        with torch.no_grad():
            values[index].view(integers).add_(1)
        self._fire()


class Stall(Fault):
    """A rank that comes late."""

    name = "stall"

    def __init__(self, step: int, rank: int, *, seconds: float) -> None:
        super().__init__(step, rank)
        self.seconds = seconds

    @override
    def _arm(self, trainer: Trainer, module: LightningModule) -> None:
        self._fire()
        time.sleep(self.seconds)


class Raise(Fault):
    name = "exception"

    @override
    def _arm(self, trainer: Trainer, module: LightningModule) -> None:
        self._fire()
        raise InjectedFault(f"{self}: step {self._batch_step} on rank {self.rank}")


FAULTS: dict[str, type[Fault]] = {
    kind.name: kind for kind in (NanGrad, ScaleGrad, SignFlip, DropReduce, Desync, Stall, Raise)
}
