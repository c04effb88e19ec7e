"""``CosineRollback``: a step that would ruin the run is not taken, and the run goes back to a state that was healthy.

Reads a few numbers on the host in every optimizer step, before it is taken: that is what it is for.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks.rollback_ledger import RollbackLedger
from lightning_moeclip.callbacks.rollback_logs import DirectionsNews, News, OverflowCount, log_numbers
from lightning_moeclip.callbacks.rollback_record import RollbackRecord
from lightning_moeclip.callbacks.rollback_schedule import SnapshotSchedule
from lightning_moeclip.callbacks.rollback_settings import RollbackSettings
from lightning_moeclip.callbacks.snapshots import AgreedSnapshots
from lightning_moeclip.callbacks.step_numbers import (
    CotangentSums,
    DirectionalLoss,
    StepNumbers,
    losses_of,
    reduce_step_numbers,
)
from lightning_moeclip.callbacks.world import World, check_given_once, warn, world_of
from lightning_moeclip.monitor.stability import Finding, Observation, StabilityMonitor, StabilitySettings
from lightning_moeclip.state.random_numbers import begin_another_stream

__all__ = ["CosineRollback", "RollbackRecord"]


class CosineRollback(Callback):
    """Watches loss, gradient norm and directional cosine, and rolls the run back when they say that it breaks.

    Before each optimizer step all ranks judge the same numbers, see ``StabilityMonitor``. A loss or gradient norm that
    is not finite or, from 72 healthy steps on, 6 deviations above those before, holds the step, and the run goes back
    to its last healthy snapshot: parameters, buffers, optimizer, schedulers, also those that step once per epoch, loss
    scaler, random numbers and averages of ``WeightAveraging``. Counters, epochs and data go on; the next epoch draws
    its order from other random numbers. A resumed run knows no healthy steps yet. Under a loss scaler, gradients that
    overflow are the scaler's alone. The directional cosine warns and blocks snapshots, and acts only under
    ``act_on_cosine``. For 16 steps after a rollback a batch with such a finding is skipped instead, unless something
    is not finite: the state is known to be good. 32 of them in a row are a new level, within 10 times of the old loss
    and 100 times of the old gradient norm.

    A snapshot is a candidate until the next step is judged, the first one made with its parameters; when that step is
    a fault, the candidate is dropped and the run goes back to the one before. Snapshots of another layout (parameters
    were unfrozen, a scheduler was exchanged) are dropped too. None is taken while replicas differ.

    The cosine is that of ``ContrastiveLoss`` or ``SigmoidLoss``, wherever they are in the module. Another loss hands it
    in, from two cotangents of the same features::

        def training_step(self, batch, batch_idx):
            features = self.image(batch[0]), self.text(batch[1])
            first, second = image_to_text(*features), text_to_image(*features)
            grads = [torch.autograd.grad(half, features, retain_graph=True) for half in (first, second)]
            self.rollback.hand_in(*grads)  # the callback, which the module was given
            return first + second

    Logs ``tower_cosine/direction``, ``tower_cosine/deviation`` (from its level, in robust deviations),
    ``rollback/count``, of all rollbacks, and ``rollback/skipped``.

    Args:
        window: cosines whose variance counts.
        low: below it a cosine is low.
        patience: low cosines in a row that, with the variance, make a run unstable.
        variance: of the window; above it a run is unstable.
        good: from it on a cosine is worth a snapshot; where the cosine of a healthy run is lower, its own level is.
        act_on_cosine: a cosine alone rolls back.
        max_rollbacks: without 64 healthy steps and a new snapshot between them; one more ends the run on all ranks with
            the history.
        snapshot_every_n_steps: steps between snapshots; one that is due waits for a healthy step.
        on_no_snapshot: while there is none, "skip_step" leaves the step out, which counts as a rollback; "raise" ends
            the run.
        max_snapshot_bytes: of host memory for the two snapshots of one rank; None takes its share of half the memory.

    Attributes:
        history: a record of every batch whose step was not taken.
        num_rollbacks: how many count against ``max_rollbacks``.
        total_rollbacks: of the run.
        observation: what the last optimizer step showed; None before the first one.

    Raises:
        ValueError: a value out of its range, two of these callbacks, or a snapshot larger than allowed.
        TypeError: a strategy other than ``MoEClipStrategy``, or a tensor that no snapshot can hold.
        RuntimeError: on every rank, when ``max_rollbacks`` is exceeded.
    """

    may_hold_step = True

    def __init__(
        self,
        *,
        window: int = 5,
        low: float = 0.55,
        patience: int = 3,
        variance: float = 0.02,
        good: float = 0.75,
        act_on_cosine: bool = False,
        max_rollbacks: int = 3,
        snapshot_every_n_steps: int = 100,
        on_no_snapshot: Literal["skip_step", "raise"] = "skip_step",
        max_snapshot_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.settings = StabilitySettings(
            window=window, low=low, patience=patience, variance=variance, good=good, act_on_cosine=act_on_cosine
        )
        self.limits = RollbackSettings(max_rollbacks, snapshot_every_n_steps, on_no_snapshot, max_snapshot_bytes)
        self._ledger = RollbackLedger(self.limits)
        self.observation: Observation | None = None
        self._world: World | None = None
        self._sums = CotangentSums()
        self._losses: list[DirectionalLoss] = []
        self._snapshots: AgreedSnapshots | None = None
        # by the place of the optimizer: with several, each has losses and norms of its own
        self._monitors: dict[int, StabilityMonitor] = {}
        self._observations: list[Observation] = []  # of the batch at hand
        self._pending: RollbackRecord | None = None
        self._is_set_up = False
        self._schedule = SnapshotSchedule(snapshot_every_n_steps)
        self._news, self._overflows, self._directions_news = News(), OverflowCount(), DirectionsNews()

    @property
    def history(self) -> list[RollbackRecord]:
        """See the class."""
        return self._ledger.history

    @property
    def num_rollbacks(self) -> int:
        """See the class."""
        return self._ledger.in_a_row

    @property
    def total_rollbacks(self) -> int:
        """See the class."""
        return self._ledger.total

    def hand_in(self, first: Tensor | Sequence[Tensor], second: Tensor | Sequence[Tensor]) -> None:
        """Tell how far two halves of a loss of one's own agree, in the step at hand; see the class.

        Args:
            first: what one half sends to features: one tensor, or several in an order.
            second: what the other half sends to the same features.

        Raises:
            ValueError: they do not have the same shapes.
            TypeError: one is no tensor.
        """
        self._sums.add(first, second)

    @property
    @override
    def state_key(self) -> str:
        # the Trainer would refuse two of one key when it is made, without saying what to write; setup does say it
        name = type(self).__qualname__
        return name if self._is_set_up else f"{name} {id(self):x}"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_set_up = True
        if stage == "fit":
            world_of(trainer, self)
            check_given_once(trainer, self)
            if trainer.global_step == 0:  # else the same run goes on; a checkpoint is loaded later
                self._ledger = RollbackLedger(self.limits)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew with levels, snapshots and warnings; counts and history go on."""
        self._monitors, self._observations, self._pending, self.observation = {}, [], None, None
        self._news, self._overflows, self._directions_news = News(), OverflowCount(), DirectionsNews()
        self._ledger.begin()
        self._schedule = SnapshotSchedule(self.limits.snapshot_every_n_steps, begin=trainer.global_step)
        self._world = world_of(trainer, self)
        self._snapshots = AgreedSnapshots(
            self._world,
            max_bytes=self.limits.max_snapshot_bytes,
            ranks_per_node=trainer.num_devices,
            watched=(self._watched, self._set_watched),
        )
        self._snapshots.check(trainer, pl_module)
        self._ask(pl_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if number := self._ledger.pop_restored():
            # the numbers that were restored have ordered an epoch already: this one's order is drawn after this hook
            begin_another_stream(number)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # layers may have come since
            self._ask(pl_module)
        self._sums.settle(self._told())

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._world is not None and self._world.num_losses == 0:
            self._sums.forget()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums.settle(self._told())

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Judge the step by numbers of all ranks, and hold it where one of them says so."""
        world = self._world
        assert world is not None, "a step outside fit"
        sums = self._sums.pop(self._told())  # also of a step that is held: they belong to no other
        if self._pending is not None:
            world.hold_step(f"CosineRollback: {self._pending.reason}")
            return
        numbers = reduce_step_numbers(
            world, sums, micro_batches=trainer.accumulate_grad_batches if pl_module.automatic_optimization else None
        )
        index = next(i for i, other in enumerate(trainer.optimizers) if other is optimizer)
        self._directions_news.note(index, numbers)
        self.observation = observation = self._observe(trainer, index, numbers)
        self._observations.append(observation)
        acting = [finding for finding in observation.findings if finding.acts]
        self._news.tell(trainer, observation)
        if acting:
            self._decide(trainer, pl_module, world, acting)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step: go back where that was decided, else keep a snapshot when one is due, and log."""
        if not self._observations:
            return  # a micro-batch before the last of its step
        self._directions_news.tell(trainer)
        observations, pending = self._observations, self._pending
        self._observations, self._pending = [], None
        is_judged = all(observation.is_judged for observation in observations)
        self._ledger.note_batch(is_healthy=False if pending is not None else is_judged or None)
        if pending is not None:
            self._settle(trainer, pl_module, pending)
        elif self._snapshots is not None and self._schedule.keep(trainer, pl_module, self._snapshots, observations):
            self._ledger.note_confirmed()
        log_numbers(trainer, self._ledger, observations)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._directions_news.tell(trainer, is_end=True)
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._ledger.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ledger.load_state_dict(state_dict)

    def _observe(self, trainer: Trainer, index: int, numbers: StepNumbers) -> Observation:
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._overflows.note(trainer, numbers, is_scaled=is_scaled)
        monitor = self._monitors.setdefault(index, StabilityMonitor(self.settings))
        return monitor.observe(
            numbers.loss, numbers.grad_norm, numbers.cosine, is_scaled=is_scaled, is_whole=numbers.is_whole
        )

    def _decide(self, trainer: Trainer, module: LightningModule, world: World, acting: list[Finding]) -> None:
        """Hold the step at hand, and say what becomes of it; or end the run."""
        assert self._snapshots is not None, "a step outside fit"
        reason = "; ".join(finding.message for finding in acting)
        # this is the first step made with the parameters of a candidate: they are not known to be good
        is_known_good = not self._schedule.refuse(self._snapshots)
        is_finite = all(finding.kind != "non_finite" for finding in acting)
        is_skipped = self._ledger.is_cooling and is_known_good and is_finite
        if not is_skipped:
            self._schedule.drop_unfit(trainer, module, self._snapshots)
        has_snapshot = bool(self._snapshots.steps)
        record = RollbackRecord(
            trainer.global_step,
            trainer.current_epoch,
            trainer.fit_loop.epoch_loop.batch_idx,
            reason,
            "rolled back" if has_snapshot and not is_skipped else "skipped",
        )
        if not is_skipped:
            self._ledger.count(record, has_snapshot=has_snapshot)
        self._pending = record
        world.hold_step(f"CosineRollback: {reason}")

    def _settle(self, trainer: Trainer, module: LightningModule, record: RollbackRecord) -> None:
        """After the schedulers of a step that was held: go back, where that was decided, and write it down."""
        if record.action == "rolled back":
            assert self._snapshots is not None, "decided with a snapshot"
            record = replace(record, restored_step=self._snapshots.restore(trainer, module))
            self._ledger.note_restored()
        self.history.append(record)
        warn(trainer, f"CosineRollback, {record}")

    def _told(self) -> list[Tensor | None]:
        """What the losses tell of their directions, since the last time."""
        return [loss.pop_direction_sums() for loss in self._losses]

    def _watched(self) -> dict[int, Any]:
        return {index: monitor.state() for index, monitor in self._monitors.items()}

    def _set_watched(self, states: dict[int, Any]) -> None:
        for index, state in states.items():
            self._monitors[index].load_state(state)

    def _ask(self, module: LightningModule) -> None:
        # a walk through all layers takes milliseconds: not in every step
        self._losses = losses_of(module)
        for loss in self._losses:
            loss.wants_directions = True

    def _release(self) -> None:
        for loss in self._losses:
            loss.wants_directions = False
        self._losses, self._snapshots, self._world = [], None, None
