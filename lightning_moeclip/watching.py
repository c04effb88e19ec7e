"""The part of the strategy that answers callbacks: what a step's gradients were, and whether it is to be taken.

Where somebody may hold a step, the answer of all ranks is read on the host once before each.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_moeclip.checkpoints import CheckpointingStrategy
from lightning_moeclip.gradients.clipping import has_gradients
from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.comparison import Category, Comparison
from lightning_moeclip.gradients.corridor import GradientCorridor
from lightning_moeclip.gradients.report import GradReport, Verdict
from lightning_moeclip.parallel import checks
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.rules import warn_on_first_rank
from lightning_moeclip.state.consistency import compare_replicas, resync_replicas
from lightning_moeclip.state.replicated import ReplicatedState

__all__ = ["WatchedStrategy"]

Value = TypeVar("Value")


class WatchedStrategy(CheckpointingStrategy):
    """What callbacks ask of the strategy; see ``callbacks.world.World``.

    Attributes:
        report: of the last step, empty before the first one.
    """

    report: GradReport
    precision_plugin: Any
    _corridor: GradientCorridor | None = None
    _is_asked_for_statistics = _is_asked_for_residual = False
    _has_stepped = False
    _loss: Tensor | None = None
    _num_losses = 0
    _had_gradients = False
    _is_stepping = _has_told_of_raw_steps = False
    _step_hooks: tuple[RemovableHandle, ...] = ()
    _optimizer: Optimizer | None = None
    _holders: tuple[str, ...] = ()
    _reasons: tuple[str, ...] = ()

    @property
    def step_loss(self) -> Tensor:
        """0-d: the loss of this rank since the last optimizer step, see ``callbacks.world.World``."""
        if self._loss is None:
            return torch.zeros((), device=self.root_device)
        if not self._num_losses or not self.lightning_module.automatic_optimization:
            return self._loss
        # Lightning has divided each by the number of micro-batches of a whole step
        return self._loss * (self._trainer.accumulate_grad_batches / self._num_losses)

    @property
    def num_losses(self) -> int:
        """Losses that this rank has sent backward since the last optimizer step."""
        return self._num_losses

    def ask_for_statistics(self) -> None:
        """Have statistics of the step at hand in its report; every rank asks before the same training step."""
        self._is_asked_for_statistics = True

    def ask_for_residual(self) -> None:
        """Have the residual of a low-precision reduction in the report; every rank asks before the same step."""
        self._is_asked_for_residual = True

    def reduce_sums(self, sums: Tensor) -> Tensor:
        """Sum over all ranks, bit-identical on each; a collective.

        Args:
            sums: [n] float64 of this rank, left as it is.
        """
        return sum_over(sums.clone(), self.mesh.gradient_groups["dp"])

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on any rank; a collective."""
        told = torch.tensor([float(is_so)], dtype=torch.float64, device=self.root_device)
        return self.reduce_sums(told).item() > 0

    def gather(self, value: Value) -> list[Value]:
        """Picklable values of all ranks, by rank; a collective."""
        return gather_objects(value)

    def gradient_square(self) -> Tensor:
        """This rank's part of the squared norm of the gradients about to be stepped, 0-d float64."""
        assert self._corridor is not None, "asked outside fit"
        optimizers = self._plain_optimizers() if self._optimizer is None else [self._optimizer]
        return self._corridor.clipper.own_square(
            p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        )

    def hold_step(self, reason: str) -> None:
        """Have no rank take the step at hand; to be called in ``on_before_optimizer_step``.

        Args:
            reason: told in ``report.verdict``.

        Raises:
            RuntimeError: nobody has said before the first step that it may hold one.
        """
        if not self._holders:
            raise RuntimeError(
                f"hold_step({reason!r}): the ranks ask one another about each step only when a callback or the module "
                "may hold one. Give the class of the caller the attribute may_hold_step = True."
            )
        self._reasons = (*self._reasons, reason)

    def compare(self, what: Collection[Category]) -> Comparison:
        """Whether replicas hold the same bits; one small collective when they do, see ``state.consistency``.

        Args:
            what: any of "gradients" (of the optimizer about to step), "parameters" (masters with them), "optimizer"
                and "scaler".
        """
        return compare_replicas(self._replicated_state(), self.mesh, what, device=self.root_device)

    def resync(self, comparison: Comparison) -> None:
        """Give ranks that differ what the majority of their replicas holds; never gradients. A collective.

        Args:
            comparison: of ``compare``, with nothing changed since.
        """
        resync_replicas(self._replicated_state(), self.mesh, comparison, device=self.root_device)

    def _replicated_state(self) -> ReplicatedState:
        return ReplicatedState(
            self.lightning_module,
            self._plain_optimizers(),
            masters=self._masters,
            scaling=self.precision_plugin,
            stepped=self._optimizer,
        )

    def _learn_who_holds(self) -> bool:
        """Whether a callback, or the module, may hold a step; the same on all ranks, or an error on each."""
        self._forget_losses()  # of a run that was aborted within a step
        self._is_stepping = self._has_told_of_raw_steps = False
        candidates = [*self._trainer.callbacks, self.lightning_module]
        self._holders = tuple(type(c).__name__ for c in candidates if getattr(c, "may_hold_step", False))
        checks.check_same_on_all_ranks(list(self._holders), what="The list of callbacks that may hold a step")
        return bool(self._holders)

    def _begin_watch(self) -> None:
        """Before a training step: look at what was asked for, and forget the step that is over."""
        if self._has_stepped:
            self._forget_losses()
        self._reasons = ()
        self.report = replace(self.report, statistics=None, residual=None, verdict=Verdict())
        if self._corridor is not None:
            self._corridor.begin_step(
                is_watched=self._is_asked_for_statistics, is_residual_asked=self._is_asked_for_residual
            )
        self._is_asked_for_statistics = self._is_asked_for_residual = False

    def _begin_backward(self) -> None:
        """Forget the losses before this one when their step is over, or when their gradients were dropped."""
        if self._has_stepped or (self._had_gradients and not self._have_gradients()):
            self._forget_losses()

    def _have_gradients(self) -> bool:
        return any(has_gradients(optimizer) for optimizer in self.optimizers)

    def _note_loss(self, loss: Tensor, *, is_live: bool) -> None:
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        self._num_losses += is_live

    def _end_backward(self) -> None:
        self._had_gradients = self._have_gradients()

    def _forget_losses(self) -> None:
        self._loss, self._num_losses = None, 0
        self._has_stepped = self._had_gradients = False

    def _begin_optimizer_step(self, optimizer: Optimizer) -> None:
        self._optimizer, self._is_stepping = optimizer, True

    def _end_optimizer_step(self) -> None:
        self._is_stepping, self._has_stepped = False, True

    def _watch_raw_steps(self) -> None:
        """Notice steps of the optimizers that do not come through Lightning."""
        self._unwatch_raw_steps()
        # a class that wraps another optimizer and never called Optimizer.__init__ has no hooks
        hooked = [o for o in self._plain_optimizers() if hasattr(o, "_optimizer_step_pre_hooks")]
        self._step_hooks = tuple(optimizer.register_step_pre_hook(self._note_raw_step) for optimizer in hooked)

    def _unwatch_raw_steps(self) -> None:
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = ()

    def _note_raw_step(self, optimizer: Optimizer, *_: object) -> None:
        """Before any step of an optimizer: say once which callbacks do not see one that Lightning does not see."""
        if self._is_stepping:
            return
        self._has_stepped = True
        is_asked = self._corridor is not None and self._corridor.statistics.is_asked
        if (is_asked or self._holders) and not self._has_told_of_raw_steps:
            self._has_told_of_raw_steps = True
            warn_on_first_rank(
                f"{type(optimizer).__name__}.step() was called past Lightning: no hook comes before such a step, and "
                "callbacks neither see nor judge it. Step what self.optimizers() returns, without "
                "use_pl_optimizer=False."
            )

    def _publish(self, optimizer: Optimizer) -> None:
        """Before the hooks of an optimizer step: statistics of its gradients, where they were asked for."""
        corridor = self._corridor
        if corridor is None:
            return
        if corridor.reducer is not None and corridor.reducer.residual is not None:
            self._note({"residual": corridor.reducer.residual})
        if corridor.statistics.is_asked:
            scaler = self.precision_plugin.scaler
            held = [p for group in optimizer.param_groups for p in group["params"]]
            scale = None if scaler is None else scaler.scale(torch.ones((), device=self.root_device))
            self._note({"statistics": corridor.statistics.publish(held, loss_scale=scale)})

    def _agree_on_verdict(self) -> bool:
        is_held = self.agree(bool(self._reasons))
        before = self.report.verdict  # of another optimizer in the same training step
        self._note({"verdict": Verdict(before.holds_step or is_held, before.reasons + self._reasons)})
        self._reasons = ()
        return is_held

    def _note(self, fields: Mapping[str, Any]) -> None:
        self.report = replace(self.report, **fields)
