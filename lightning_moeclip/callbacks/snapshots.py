"""Snapshots of a run that all ranks take, keep and restore alike."""

from dataclasses import replace

from torch import nn

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.callbacks.averages import counters_of_averages
from lightning_moeclip.callbacks.world import World
from lightning_moeclip.state.finite import checked_names, not_finite
from lightning_moeclip.state.host_copy import enough_memory, num_bytes_of, places_of
from lightning_moeclip.state.live import GetAndSet
from lightning_moeclip.state.snapshot import LiveState, NotFinite, SnapshotRing, difference, live_state

__all__ = ["AgreedSnapshots"]


class AgreedSnapshots:
    """The ring of this rank, with all ranks agreed on what is in it.

    The newest one is a candidate until ``confirm``: whether its parameters are healthy shows in the step after it.

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
        self._candidate: int | None = None
        self._layouts: dict[int, tuple[str, ...]] = {}
        self._has_warned = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that every rank has a snapshot of, oldest first."""
        return self._steps

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that this rank's snapshots take."""
        return self._ring.num_bytes

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse a run with a tensor that no snapshot can hold.

        Raises:
            TypeError: there is one.
        """
        self._live(trainer, module)

    def take(self, trainer: Trainer, module: LightningModule, *, step: int) -> str:
        """Keep the state as it is, as a candidate, on all ranks or on none; a collective.

        Returns:
            What is to be told of it: why there is none, or that nothing else is kept; empty when all is well.

        Raises:
            ValueError: on every rank, when it is too large for one of them.
        """
        live = self._live(trainer, module)
        # before anything is overwritten: where there is room for one, a rank that refuses alone would lose the old one
        if story := self._agreed(_refusal(live, step, self._ring.max_bytes)):
            return story
        lines, error = live.layout_lines(live.current()), None
        try:
            self._ring.take(live, step=step)
        except (NotFinite, ValueError, MemoryError) as caught:
            error = caught
        if story := self._agreed(error):
            self._ring.drop(step)
            self._steps = self._common(self._ring.steps)
            return story
        had_others = any(self._layouts[old] == lines for old in self._steps if old != step)
        self._steps = self._common(self._ring.steps)
        self._candidate = step
        self._layouts = {old: self._layouts.get(old, lines) for old in self._ring.steps} | {step: lines}
        return self._tell_of_room() if had_others and self._steps == (step,) else ""

    def confirm(self) -> bool:
        """The step after the candidate was healthy: it is good from now on. Returns whether there was a candidate."""
        was_there, self._candidate = self._candidate is not None, None
        return was_there

    def refuse(self) -> bool:
        """The step after the candidate was not healthy: let go of it. Returns whether there was a candidate."""
        step, self._candidate = self._candidate, None
        if step is None:
            return False
        self._ring.drop(step)
        self._steps = tuple(other for other in self._steps if other != step)
        return True

    def drop_unfit(self, trainer: Trainer, module: LightningModule) -> str:
        """Let go of all when the run has another layout on any rank than they have; a collective.

        Returns:
            How they differ, empty when they do not: parameter groups or schedulers were added, say.
        """
        live = self._live(trainer, module)
        lines = live.layout_lines(live.current())
        own = next((story for step in self._steps if (story := difference(self._layouts[step], lines))), "")
        if not self._world.agree(bool(own)):
            return ""
        for step in self._ring.steps:
            self._ring.drop(step)
        self._steps, self._candidate = (), None
        return next(story for story in self._world.gather(own) if story)

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
        # gradients in flight belong to what is left behind
        for optimizer in trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
        module.zero_grad(set_to_none=True)
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

    def _agreed(self, error: Exception | None) -> str:
        """The story of all ranks that refuse, empty when none does; a collective.

        Raises:
            ValueError: on every rank, when one of them says that a snapshot is too large.
        """
        if not self._world.agree(error is not None):
            return ""
        told = self._world.gather((type(error).__name__, str(error)) if error is not None else None)
        kinds, stories = zip(*(t for t in told if t is not None), strict=True)
        story = "\n".join(dict.fromkeys(stories))
        if "ValueError" in kinds:
            raise ValueError(story)
        return story or str(kinds[0])

    def _tell_of_room(self) -> str:
        if self._has_warned:
            return ""
        self._has_warned = True
        return (
            "there is room for one snapshot only. Until the step after it has shown that it is healthy, there is "
            f"nothing to go back to. Write CosineRollback(max_snapshot_bytes={2 * self.num_bytes}) to keep two."
        )

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
        counters = counters_of_averages(trainer.callbacks)
        return replace(live, objects={"CosineRollback": self._watched, **counters, **live.objects})


def _refusal(live: LiveState, step: int, max_bytes: int) -> Exception | None:
    """Why this rank would not keep what is live; None where it would, or where the ring itself says it best."""
    for get, _ in live.objects.values():
        get()  # masters settle, as they will when it is taken
    tensors = live.current()
    size = num_bytes_of(places_of(tensors))
    if size > max_bytes:
        return None  # the ring refuses with the numbers to write, and ends the run
    try:
        with enough_memory(size):
            names = not_finite(tensors, checked_names(tensors))
    except MemoryError as error:
        return error
    return NotFinite(names, step=step) if names else None


def _held_by_callbacks(trainer: Trainer, module: nn.Module) -> dict[str, nn.Module]:
    """Modules that callbacks hold, such as the averages of ``WeightAveraging``."""
    return {
        f"{index} {type(callback).__name__}.{name}": value
        for index, callback in enumerate(trainer.callbacks)
        for name, value in vars(callback).items()
        if isinstance(value, nn.Module) and value is not module
    }
