"""When ``CosineRollback`` takes a snapshot, and when it lets go of those that it has."""

from collections.abc import Sequence

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.callbacks.snapshots import AgreedSnapshots
from lightning_moeclip.callbacks.world import warn, world_of
from lightning_moeclip.gradients.comparison import Category
from lightning_moeclip.monitor.stability import Observation

__all__ = ["SnapshotSchedule"]

_COMPARED: tuple[Category, ...] = ("parameters", "optimizer")
_NOW = -1


class SnapshotSchedule:
    """A snapshot is due every few steps, and waits for a healthy one with equal replicas.

    Args:
        every_n_steps: steps between snapshots.
        begin: ``global_step`` when training begins.
    """

    def __init__(self, every_n_steps: int, *, begin: int = 0) -> None:
        self._every = every_n_steps
        self._last = begin // every_n_steps
        self._has_told_unequal = self._has_told_refusal = False

    def keep(
        self,
        trainer: Trainer,
        module: LightningModule,
        snapshots: AgreedSnapshots,
        observations: Sequence[Observation],
    ) -> bool:
        """After a step without a fault: confirm the last snapshot, and take another where one is due.

        Returns:
            Whether there was one to confirm.
        """
        # a step that tells nothing, such as an overflow, leaves it as it is
        is_confirmed = all(observation.is_judged for observation in observations) and snapshots.confirm()
        if any(observation.is_new_level for observation in observations):
            self._last = _NOW  # those before know nothing of it
        is_due = trainer.global_step // self._every > self._last
        is_taken = not world_of(trainer, self).report.verdict.holds_step
        if is_due and is_taken and all(observation.is_good for observation in observations):
            self._take(trainer, module, snapshots)
        return is_confirmed

    def refuse(self, snapshots: AgreedSnapshots) -> bool:
        """Let go of a candidate; where it was the only one, the next healthy step is due.

        Returns:
            Whether there was one.
        """
        if not snapshots.refuse():
            return False
        self._last = self._last if snapshots.steps else _NOW
        return True

    def drop_unfit(self, trainer: Trainer, module: LightningModule, snapshots: AgreedSnapshots) -> None:
        """Let go of snapshots that the run has outgrown, where there are any; the next healthy step is due."""
        if snapshots.steps and (story := snapshots.drop_unfit(trainer, module)):
            self._last = _NOW
            warn(
                trainer,
                f"CosineRollback, step {trainer.global_step}: parameters, buffers, optimizers or schedulers are not "
                f"those of the snapshots any more: the last {story}. They are dropped, and the next healthy step is "
                "kept.",
            )

    def _take(self, trainer: Trainer, module: LightningModule, snapshots: AgreedSnapshots) -> None:
        world, step = world_of(trainer, self), trainer.global_step
        if world.world_size > 1 and not world.compare(_COMPARED).is_equal:
            if not self._has_told_unequal:
                self._has_told_unequal = True
                warn(
                    trainer,
                    f"CosineRollback, step {step}: no snapshot while parameters or optimizer state differ between "
                    "replicas. ResidualResync() makes them equal again.",
                )
            return
        self._last = step // self._every
        reason = snapshots.take(trainer, module, step=step)
        if reason and not self._has_told_refusal:
            warn(trainer, f"CosineRollback, step {step}: {reason}")
        self._has_told_refusal = bool(reason)
