"""``ResidualResync``: replicas that no longer hold the same bits are found, told of and made equal again.

In a step that is looked at, the outcome of the comparison is read on the host before the optimizer steps: it may hold
the step.
"""

import math
from typing import Any

from typing_extensions import override

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks.world import World, check_given_once, warn, world_of
from lightning_moeclip.gradients.comparison import Category, Comparison
from lightning_moeclip.monitor.consistency import ConsistencyMonitor, ConsistencySettings
from lightning_moeclip.scalars import last_step, log_scalars

__all__ = ["ResidualResync"]

_BETWEEN_STEPS: tuple[Category, ...] = ("parameters", "optimizer", "scaler")
_REDUCED: tuple[Category, ...] = ("gradients",)
_WITHIN_A_STEP: tuple[Category, ...] = ("parameters", "optimizer")
_MAX_NAMES = 4


class ResidualResync(Callback):
    """Compares replicas bit by bit every few steps, and gives those that differ what the majority holds.

    Before a step: parameters with their masters, optimizer state and the loss scale. What differs is copied from the
    majority of its replica group, of the lowest rank on a tie, and the step goes on. After the reduction of the same
    step: gradients; where they differ, no rank takes the step, and they are dropped. The same once more when training
    ends. Buffers are not compared: ranks may hold different ones until the strategy broadcasts them.

    Where gradients travel in 16 bits, a sample of them is also summed in float32. A residual above ``threshold`` times
    eps(dtype) / eps(float16) * sqrt(W / 2) of their L1 norm is told, one from ``critical_factor`` times that holds the
    step, and replicas are compared.

    Logs ``grad_residual/mismatches``, ``grad_residual/resyncs`` and, with a low-precision reduction,
    ``grad_residual/relative``. A tensor that has to be mended a fourth time ends the run on all ranks.

    Args:
        threshold: of the relative L1 residual of a reduction in float16 over 2 ranks.
        critical_factor: how many times ``threshold`` is too much.
        every_n_steps: optimizer steps between two comparisons.

    Raises:
        ValueError: a value out of its range, or two of these callbacks in one Trainer.
        TypeError: a strategy other than ``MoEClipStrategy``.
        RuntimeError: on every rank, when the same tensor differs for the fourth time.
    """

    may_hold_step = True

    def __init__(self, *, threshold: float = 1e-3, critical_factor: float = 3.0, every_n_steps: int = 50) -> None:
        super().__init__()
        self.settings = ConsistencySettings(threshold, critical_factor, every_n_steps)
        self._monitor: ConsistencyMonitor | None = None
        self._is_due = self._has_looked = self._has_warned = self._has_told_unwatched = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            world_of(trainer, self)
            check_given_once(trainer, self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with no mismatches known; on one process there is nothing to compare."""
        world = world_of(trainer, self)
        self._monitor = ConsistencyMonitor(self.settings, world_size=world.world_size)
        self._is_due = self._has_looked = self._has_warned = self._has_told_unwatched = False
        if world.world_size == 1:
            self._monitor = None
            warn(
                trainer,
                "ResidualResync on one process compares nothing: there is no other replica. Leave it out, or train on "
                "more devices.",
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._monitor is None:
            return
        if self._monitor.is_due(trainer.global_step):
            self._is_due = True
            self._look(trainer, _BETWEEN_STEPS)
        if self._is_due:  # in each micro-batch
            world_of(trainer, self).ask_for_residual()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Compare reduced gradients where a look is due; hold the step if they differ or the residual is critical."""
        if not self._is_due:
            return
        self._has_looked = True
        assert self._monitor is not None, "nothing is due on one process"
        world = world_of(trainer, self)
        residual = world.report.residual
        level = "ok" if residual is None else self._monitor.judge_residual(residual)
        comparison = world.compare(_REDUCED)
        reasons = [self._note(trainer, comparison)]
        if residual is not None and level != "ok":
            reasons.append(self._monitor.residual_story(residual, step=trainer.global_step))
            self._warn_of_residual(trainer, reasons[-1], is_held=level == "critical")
        if level == "critical" or not comparison.is_equal:
            world.hold_step("ResidualResync: " + "\n".join(filter(None, reasons)))
            # the scaler is in the middle of its step
            self._look(trainer, _WITHIN_A_STEP)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._has_looked:
            self._log(trainer)
            self._is_due = self._has_looked = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._monitor is not None:
            # what is saved from now on is the same on all ranks
            self._look(trainer, _BETWEEN_STEPS)
            self._log(trainer, step=last_step(trainer))

    def _look(self, trainer: Trainer, what: tuple[Category, ...]) -> None:
        world: World = world_of(trainer, self)
        comparison = world.compare(what)
        self._note(trainer, comparison)
        if not comparison.is_equal:
            world.resync(comparison)

    def _note(self, trainer: Trainer, comparison: Comparison) -> str:
        assert self._monitor is not None, "nothing is compared on one process"
        if comparison.unwatched and not self._has_told_unwatched:
            self._has_told_unwatched = True
            warn(trainer, _of_unwatched(comparison.unwatched))
        story = self._monitor.judge(comparison, step=trainer.global_step)
        if story:
            warn(trainer, f"ResidualResync: {story}")
        return story

    def _warn_of_residual(self, trainer: Trainer, story: str, *, is_held: bool) -> None:
        if not self._has_warned:
            self._has_warned = True
            outcome = "the step is held" if is_held else "the step is taken"
            warn(
                trainer,
                f"ResidualResync: {story}; {outcome}, and what is found of later ones is only logged. Write "
                "MoEClipStrategy(gradient_dtype=None) to sum gradients in their own dtype, or a larger threshold=...",
            )

    def _log(self, trainer: Trainer, *, step: int | None = None) -> None:
        monitor = self._monitor
        assert monitor is not None, "nothing is counted on one process"
        metrics = {
            "grad_residual/mismatches": float(monitor.num_mismatches),
            "grad_residual/resyncs": float(monitor.num_resyncs),
        }
        if not math.isnan(monitor.relative):
            metrics["grad_residual/relative"] = monitor.relative
        log_scalars(trainer, metrics, step=step)


def _of_unwatched(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    return (
        f"ResidualResync: {len(names)} parameter(s) of this rank have no other replica and are not watched: {shown}. "
        "Use a smaller expert_parallel_size, or more devices, to have each expert on two ranks or more."
    )
