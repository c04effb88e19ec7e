"""``CosineRollback``: a step that would ruin the run is not taken, and the run goes back to a state that was healthy.

Reads a few numbers on the host in every optimizer step, before it is taken: that is what it is for.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks.rollback_record import RollbackRecord, told
from lightning_moeclip.callbacks.rollback_settings import RollbackSettings
from lightning_moeclip.callbacks.snapshots import AgreedSnapshots
from lightning_moeclip.callbacks.step_numbers import (
    CotangentSums,
    DirectionalLoss,
    StepNumbers,
    losses_of,
    reduce_step_numbers,
)
from lightning_moeclip.callbacks.world import World, check_given_once, world_of
from lightning_moeclip.monitor.stability import Finding, Observation, StabilityMonitor, StabilitySettings

__all__ = ["CosineRollback", "RollbackRecord"]

_COOL_DOWN_STEPS = 16


class CosineRollback(Callback):
    """Watches loss, gradient norm and directional cosine, and rolls the run back when they say that it breaks.

    Before each optimizer step all ranks judge the same numbers, see ``StabilityMonitor``. A loss or gradient norm that
    is not finite, or 6 deviations above the steps before it, holds the step, and the run goes back to its last healthy
    snapshot: parameters, buffers, optimizer, schedulers, loss scaler, random numbers and averages of
    ``WeightAveraging``. Counters and data go on. Under a loss scaler, gradients that overflow are the scaler's alone.
    The directional cosine warns and blocks snapshots, and acts only under ``act_on_cosine``. For 16 steps after a
    rollback a batch with such a finding is skipped instead, unless something is not finite: the state is known to be
    good.

    The cosine is that of ``ContrastiveLoss`` or ``SigmoidLoss``, wherever they are in the module. Another loss hands it
    in, from two cotangents of the same features::

        def training_step(self, batch, batch_idx):
            features = self.image(batch[0]), self.text(batch[1])
            first, second = image_to_text(*features), text_to_image(*features)
            grads = [torch.autograd.grad(half, features, retain_graph=True) for half in (first, second)]
            self.rollback.hand_in(*grads)  # the callback, which the module was given
            return first + second

    Logs ``tower_cosine/direction``, ``tower_cosine/deviation`` (from its level, in robust deviations),
    ``rollback/count`` and ``rollback/skipped``.

    Args:
        window: cosines whose variance counts.
        low: below it a cosine is low.
        patience: low cosines in a row that, with the variance, make a run unstable.
        variance: of the window; above it a run is unstable.
        good: from it on a cosine is worth a snapshot; where the cosine of a healthy run is lower, its own level is.
        act_on_cosine: a cosine alone rolls back.
        max_rollbacks: of one run; one more ends it on all ranks with the history.
        snapshot_every_n_steps: steps between snapshots; one that is due waits for a healthy step.
        on_no_snapshot: before there is one, "skip_step" leaves the step out, which counts as a rollback; "raise" ends
            the run.
        max_snapshot_bytes: of host memory for the two snapshots of one rank; None takes its share of half the memory.

    Attributes:
        history: a record of every batch whose step was not taken.
        num_rollbacks: how many of them count against ``max_rollbacks``.
        observation: what the last optimizer step showed; None before the first one.

    Raises:
        ValueError: a value out of its range, two of these callbacks, or a snapshot larger than allowed.
        TypeError: a strategy other than ``MoEClipStrategy``.
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
        self.settings = StabilitySettings(window, low, patience, variance, good, act_on_cosine)
        self.limits = RollbackSettings(max_rollbacks, snapshot_every_n_steps, on_no_snapshot, max_snapshot_bytes)
        self.history: list[RollbackRecord] = []
        self.num_rollbacks = 0
        self.observation: Observation | None = None
        self._handed_in = CotangentSums()
        self._losses: list[DirectionalLoss] = []
        self._snapshots: AgreedSnapshots | None = None
        # by the place of the optimizer: with several, each has losses and norms of its own
        self._monitors: dict[int, StabilityMonitor] = {}
        self._observations: list[Observation] = []  # of the batch at hand
        self._pending: RollbackRecord | None = None
        self._kinds: set[str] = set()
        self._is_set_up = False
        self._cool_until = self._num_batches = self._snapshots_due = 0

    def hand_in(self, first: Tensor | Sequence[Tensor], second: Tensor | Sequence[Tensor]) -> None:
        """Tell how far two halves of a loss of one's own agree, in the step at hand; see the class.

        Args:
            first: what one half sends to features: one tensor, or several in an order.
            second: what the other half sends to the same features.

        Raises:
            ValueError: they do not have the same shapes.
        """
        self._handed_in.add(first, second)

    # -- hooks

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

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitors, self._observations, self._pending, self._kinds = {}, [], None, set()
        self._cool_until = self._num_batches = 0
        self._snapshots_due = trainer.global_step // self.limits.snapshot_every_n_steps
        self._snapshots = AgreedSnapshots(
            world_of(trainer, self),
            max_bytes=self.limits.max_snapshot_bytes,
            ranks_per_node=trainer.num_devices,
            watched=(self._watched, self._set_watched),
        )
        self._ask(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # layers may have come since
            self._ask(pl_module)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        world = world_of(trainer, self)
        if self._pending is not None:
            world.hold_step(f"CosineRollback: {self._pending.reason}")
            return
        sums = [self._handed_in.pop(), *(loss.pop_direction_sums() for loss in self._losses)]
        numbers = reduce_step_numbers(world, sums)
        if not self._monitors and not numbers.has_directions:
            _warn(
                trainer,
                "CosineRollback watches loss and gradient norm alone: no loss tells of its directions. Use "
                "ContrastiveLoss or SigmoidLoss as a layer of the module, or CosineRollback.hand_in(...).",
            )
        index = next(i for i, other in enumerate(trainer.optimizers) if other is optimizer)
        self.observation = observation = self._observe(trainer, index, numbers)
        self._observations.append(observation)
        acting = [finding for finding in observation.findings if finding.acts]
        self._warn_of_news(trainer, observation)
        if acting:
            self._decide(trainer, world, acting)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._observations:
            return  # a micro-batch before the last of its step
        observations, pending = self._observations, self._pending
        self._observations, self._pending = [], None
        self._num_batches += 1
        if pending is not None:
            self._settle(trainer, pl_module, pending)
        elif self._is_due(trainer, observations):
            self._take(trainer, pl_module)
        self._log(trainer, observations)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for loss in self._losses:
            loss.wants_directions = False
        self._losses = []

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._snapshots = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_rollbacks": self.num_rollbacks, "history": [asdict(record) for record in self.history]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_rollbacks = state_dict["num_rollbacks"]
        self.history = [RollbackRecord(**record) for record in state_dict["history"]]

    # -- what they do

    def _observe(self, trainer: Trainer, index: int, numbers: StepNumbers) -> Observation:
        monitor = self._monitors.setdefault(index, StabilityMonitor(self.settings))
        return monitor.observe(
            numbers.loss,
            numbers.grad_norm,
            numbers.cosine,
            is_scaled=getattr(trainer.precision_plugin, "scaler", None) is not None,
            is_whole=numbers.is_whole,
        )

    def _decide(self, trainer: Trainer, world: World, acting: list[Finding]) -> None:
        """Hold the step at hand, and say what becomes of it; or end the run."""
        reason = "; ".join(finding.message for finding in acting)
        is_cooling = self._num_batches < self._cool_until
        is_skipped = is_cooling and all(finding.kind != "non_finite" for finding in acting)
        has_snapshot = self._snapshots is not None and bool(self._snapshots.steps)
        batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        record = RollbackRecord(
            trainer.global_step,
            trainer.current_epoch,
            batch_idx,
            reason,
            "rolled back" if has_snapshot and not is_skipped else "skipped",
        )
        if not is_skipped:
            self.num_rollbacks += 1
            self._end_if_hopeless(record, has_snapshot=has_snapshot)
        self._pending = record
        world.hold_step(f"CosineRollback: {reason}")

    def _end_if_hopeless(self, record: RollbackRecord, *, has_snapshot: bool) -> None:
        here = f"step {record.step} (epoch {record.epoch}, batch {record.batch_idx}): {record.reason}"
        if self.num_rollbacks > self.limits.max_rollbacks:
            raise RuntimeError(
                f"CosineRollback gives up after {self.limits.max_rollbacks} rollbacks in this run, at {here}. Before:\n"
                f"{told(self.history)}\nThe weights are those before this step. Look at the data of these batches, "
                "lower the learning rate, or write CosineRollback(max_rollbacks=...)."
            )
        if not has_snapshot and self.limits.on_no_snapshot == "raise":
            raise RuntimeError(
                f"CosineRollback(on_no_snapshot='raise') has no snapshot to go back to at {here}. Before:\n"
                f"{told(self.history)}\nWrite on_no_snapshot='skip_step' to leave the step out, or a smaller "
                f"snapshot_every_n_steps than {self.limits.snapshot_every_n_steps}."
            )

    def _settle(self, trainer: Trainer, module: LightningModule, record: RollbackRecord) -> None:
        """After the schedulers of a step that was held: go back, where that was decided, and write it down."""
        if record.action == "rolled back":
            assert self._snapshots is not None, "decided with a snapshot"
            # gradients in flight belong to what is left behind
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)
            module.zero_grad(set_to_none=True)
            restored = self._snapshots.restore(trainer, module)
            record = RollbackRecord(**{**asdict(record), "restored_step": restored})
            self._cool_until = self._num_batches + _COOL_DOWN_STEPS
        self.history.append(record)
        _warn(trainer, f"CosineRollback, {record}")

    def _is_due(self, trainer: Trainer, observations: list[Observation]) -> bool:
        is_taken = not world_of(trainer, self).report.verdict.holds_step
        is_due = trainer.global_step // self.limits.snapshot_every_n_steps > self._snapshots_due
        return is_due and is_taken and all(observation.is_good for observation in observations)

    def _take(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._snapshots is not None, "a step outside fit"
        self._snapshots_due = trainer.global_step // self.limits.snapshot_every_n_steps
        if reason := self._snapshots.take(trainer, module, step=trainer.global_step):
            _warn(trainer, f"CosineRollback, step {trainer.global_step}: {reason}")

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

    def _warn_of_news(self, trainer: Trainer, observation: Observation) -> None:
        """Once when a finding that does not act begins, and not while it lasts."""
        quiet = [finding for finding in observation.findings if not finding.acts]
        for finding in quiet:
            if finding.kind not in self._kinds:
                outcome = "no snapshots while this lasts" if finding.blocks else "nothing else changes"
                _warn(trainer, f"CosineRollback, step {trainer.global_step}: {finding.message}; {outcome}.")
        self._kinds = {finding.kind for finding in quiet}

    def _log(self, trainer: Trainer, observations: list[Observation]) -> None:
        if not (trainer._logger_connector.should_update_logs or trainer.fast_dev_run):
            return
        metrics = {
            "rollback/count": float(self.num_rollbacks),
            "rollback/skipped": float(sum(record.action == "skipped" for record in self.history)),
        }
        for observation in observations:
            if observation.cosine is not None:
                metrics["tower_cosine/direction"] = observation.cosine
            if observation.deviation is not None:
                metrics["tower_cosine/deviation"] = observation.deviation
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _warn(trainer: Trainer, message: str) -> None:
    if trainer.is_global_zero:
        warnings.warn(message, stacklevel=2)
