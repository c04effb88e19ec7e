"""What ``CosineRollback`` did, step by step, as plain values that a checkpoint can hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["RollbackRecord", "told"]


@dataclass(frozen=True)
class RollbackRecord:
    """One batch whose step was not taken.

    Attributes:
        step: ``trainer.global_step`` before it.
        epoch: of the batch.
        batch_idx: of the batch.
        reason: what was found, with numbers.
        action: "rolled back" to a snapshot; "skipped", the step was left out and nothing else.
        restored_step: ``trainer.global_step`` of the snapshot; None for a skipped batch.
    """

    step: int
    epoch: int
    batch_idx: int
    reason: str
    action: Literal["rolled back", "skipped"]
    restored_step: int | None = None

    def __str__(self) -> str:
        where = f"step {self.step} (epoch {self.epoch}, batch {self.batch_idx})"
        done = self.action if self.restored_step is None else f"{self.action} to step {self.restored_step}"
        return f"{where}: {self.reason}; {done}"


def told(records: Iterable[RollbackRecord]) -> str:
    """One line per record, for a message."""
    return "\n".join(f"  {record}" for record in records) or "  nothing before"
