"""What ``CosineRollback`` counts: rollbacks in a row and in all, healthy steps since, batches of cooling down."""

from dataclasses import asdict
from typing import Any

from lightning_moeclip.callbacks.rollback_record import RollbackRecord, told
from lightning_moeclip.callbacks.rollback_settings import RollbackSettings

__all__ = ["RollbackLedger"]

# chosen: longer skips more bad batches in a row without a rollback, and goes on longer in a state that broke after all
_COOL_DOWN_STEPS = 16
# chosen: as many as teach a level; fewer forget a fault that comes back, more add up faults far apart
_HEALTHY_STEPS = 64


class RollbackLedger:
    """Counts that are the same on all ranks, and that no snapshot takes back.

    Args:
        limits: of the run.

    Attributes:
        history: a record of every batch whose step was not taken.
        in_a_row: rollbacks without 64 healthy steps and a new snapshot between them.
        total: all of them.
    """

    def __init__(self, limits: RollbackSettings) -> None:
        self.limits = limits
        self.history: list[RollbackRecord] = []
        self.in_a_row = self.total = 0
        self._has_restored = False
        self.begin()

    def begin(self) -> None:
        """Before training: no batch was seen yet."""
        self._num_batches = self._cool_until = self._num_healthy = 0
        self._has_new_snapshot = False

    @property
    def num_skipped(self) -> int:
        """Batches that were left out, with nothing restored."""
        return sum(record.action == "skipped" for record in self.history)

    @property
    def is_cooling(self) -> bool:
        """Whether the last rollback is so recent that a spike says more of its batch than of the state."""
        return self._num_batches < self._cool_until

    def count(self, record: RollbackRecord, *, has_snapshot: bool) -> None:
        """Count a rollback that is about to happen.

        Raises:
            RuntimeError: it is one too many, or has nothing to go back to where that is not allowed.
        """
        self.in_a_row += 1
        self.total += 1
        here = f"step {record.step} (epoch {record.epoch}, batch {record.batch_idx}): {record.reason}"
        if self.in_a_row > self.limits.max_rollbacks:
            raise RuntimeError(
                f"CosineRollback gives up after {self.limits.max_rollbacks} rollbacks without {_HEALTHY_STEPS} healthy "
                f"steps and a new snapshot between them, at {here}. Before:\n{told(self.history)}\nThe weights are "
                "those before this step. Look at the data of these batches, lower the learning rate, or write "
                "CosineRollback(max_rollbacks=...). Where the level of the loss was changed on purpose, change it by "
                "less than 10 times: with the default of 3 rollbacks or more, such a level is taken over after 32 "
                "batches."
            )
        if not has_snapshot and self.limits.on_no_snapshot == "raise":
            raise RuntimeError(
                f"CosineRollback(on_no_snapshot='raise') has no snapshot to go back to at {here}. Before:\n"
                f"{told(self.history)}\nWrite on_no_snapshot='skip_step' to leave the step out, or a smaller "
                f"snapshot_every_n_steps than {self.limits.snapshot_every_n_steps}."
            )
        self._has_new_snapshot = False
        self._cool_until = self._num_batches + 1 + _COOL_DOWN_STEPS

    def note_batch(self, *, is_healthy: bool | None) -> None:
        """After a batch with a step; None when nothing could be said of it."""
        self._num_batches += 1
        if is_healthy is not None:
            self._num_healthy = self._num_healthy + 1 if is_healthy else 0
        if self._has_new_snapshot and self._num_healthy >= _HEALTHY_STEPS:
            self.in_a_row = 0

    def note_confirmed(self) -> None:
        """A snapshot that was taken since the last rollback has shown to be healthy."""
        self._has_new_snapshot = True

    def note_restored(self) -> None:
        """Random numbers of before have come back."""
        self._has_restored = True

    def pop_restored(self) -> int:
        """Number of all rollbacks, which grows with each, when some random numbers have come back since; else 0."""
        number, self._has_restored = self.total if self._has_restored else 0, False
        return number

    def state_dict(self) -> dict[str, Any]:
        """Counts and history, for a checkpoint."""
        return {
            "num_rollbacks": self.in_a_row,
            "total_rollbacks": self.total,
            "history": [asdict(record) for record in self.history],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.in_a_row, self.total = state_dict["num_rollbacks"], state_dict["total_rollbacks"]
        self.history = [RollbackRecord(**record) for record in state_dict["history"]]
        self._has_restored = False
