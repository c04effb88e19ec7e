"""Snapshots of a run that all ranks take, keep and restore alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.callbacks.world import World
from lightning_moeclip.state.snapshot import LiveState, NotFinite, SnapshotRing, live_state

__all__ = ["AgreedSnapshots"]

GetAndSet = tuple[Callable[[], Any], Callable[[Any], None]]


class AgreedSnapshots:
    """The ring of this rank, with all ranks agreed on what is in it.

    Args:
        world: the strategy.
        max_bytes: bound of this rank's snapshots together; None is the ring's own.
        ranks_per_node: ranks on this machine.
        watched: get and set what the callback remembers, which goes back with the rest.
    """

    def __init__(self, world: World, *, max_bytes: int | None, ranks_per_node: int, watched: GetAndSet) -> None:
        self._world = world
        self._ring = SnapshotRing(max_bytes=max_bytes, ranks_per_node=ranks_per_node)
        self._watched = watched
        self._steps: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that every rank has a snapshot of, oldest first."""
        return self._steps

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that this rank's snapshots take."""
        return self._ring.num_bytes

    def take(self, trainer: Trainer, module: LightningModule, *, step: int) -> str:
        """Keep the state as it is, on all ranks or on none; a collective.

        Returns:
            Why not; empty when it was taken.

        Raises:
            ValueError: on every rank, when it is too large for one of them.
        """
        error: Exception | None = None
        try:
            self._ring.take(self._live(trainer, module), step=step)
        except (NotFinite, ValueError, MemoryError) as caught:
            error = caught
        if not self._world.agree(error is not None):
            self._steps = self._ring.steps if self._world.world_size == 1 else self._common(self._ring.steps)
            return ""
        self._ring.drop(step)
        told = self._world.gather((type(error).__name__, str(error)) if error is not None else None)
        kinds, stories = zip(*(t for t in told if t is not None), strict=True)
        story = "\n".join(dict.fromkeys(stories))
        if "ValueError" in kinds:
            raise ValueError(story)
        self._steps = self._common(self._ring.steps)
        return story or kinds[0]

    def restore(self, trainer: Trainer, module: LightningModule) -> int:
        """Go back to the newest snapshot that is whole on every rank; a collective.

        Returns:
            Its step.

        Raises:
            RuntimeError: on every rank, when there is none.
        """
        self._steps = self._common(self._ring.verify())
        if not self._steps:
            raise RuntimeError(
                "There is no snapshot that is whole on every rank: those that were taken were damaged in memory. "
                "Resume from a checkpoint."
            )
        step, story = self._steps[-1], ""
        try:
            restored = self._ring.restore(self._live(trainer, module), step=step)
            story = "" if restored == step else f"it went back to step {restored} and not {step}"
        except RuntimeError as error:
            story = str(error)
        if self._world.agree(bool(story)):
            told = {rank: s for rank, s in enumerate(self._world.gather(story)) if s}
            raise RuntimeError("\n".join(f"Rank {rank}: {s}" for rank, s in told.items()))
        return step

    def _common(self, steps: tuple[int, ...]) -> tuple[int, ...]:
        lists = self._world.gather(steps)
        return tuple(step for step in steps if all(step in others for others in lists))

    def _live(self, trainer: Trainer, module: LightningModule) -> LiveState:
        live = live_state(
            module,
            trainer.optimizers,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            precision=trainer.precision_plugin,
            averages=_held_by_callbacks(trainer, module),
        )
        return replace(live, objects={"CosineRollback": self._watched, **live.objects})


def _held_by_callbacks(trainer: Trainer, module: nn.Module) -> dict[str, nn.Module]:
    """Modules that callbacks hold, such as the averages of ``WeightAveraging``."""
    return {
        f"{index} {type(callback).__name__}.{name}": value
        for index, callback in enumerate(trainer.callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, nn.Module) and value is not module
    }
