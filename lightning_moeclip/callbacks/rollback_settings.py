"""When ``CosineRollback`` keeps snapshots, and when it gives up."""

from dataclasses import dataclass
from typing import Literal

from lightning_moeclip.monitor.bounds import check_steps, is_integer

__all__ = ["RollbackSettings"]

_INTEGERS = {
    "max_rollbacks": "The default is 3.",
    "max_snapshot_bytes": "None takes a share of the memory.",
}


@dataclass(frozen=True)
class RollbackSettings:
    """Limits of a run that may be rolled back.

    Attributes:
        max_rollbacks: without 64 healthy steps and a new snapshot between them.
        snapshot_every_n_steps: steps between snapshots.
        on_no_snapshot: what happens before there is one.
        max_snapshot_bytes: of host memory for the snapshots of one rank; None for a share of it.

    Raises:
        ValueError: a value out of its range.
    """

    max_rollbacks: int = 3
    snapshot_every_n_steps: int = 100
    on_no_snapshot: Literal["skip_step", "raise"] = "skip_step"
    max_snapshot_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, hint in _INTEGERS.items():
            value = getattr(self, name)
            if not is_integer(value) and not (name == "max_snapshot_bytes" and value is None):
                raise ValueError(f"{name}={value!r} must be an integer. {hint}")
        if self.max_rollbacks < 0:
            raise ValueError(f"max_rollbacks={self.max_rollbacks} must be 0 or more. Use max_rollbacks=3.")
        check_steps("snapshot_every_n_steps", self.snapshot_every_n_steps, advice="Use snapshot_every_n_steps=100.")
        if self.on_no_snapshot not in ("skip_step", "raise"):
            raise ValueError(f"on_no_snapshot={self.on_no_snapshot!r} is no such choice. Use 'skip_step' or 'raise'.")
        if self.max_snapshot_bytes is not None and self.max_snapshot_bytes < 1:
            raise ValueError(
                f"max_snapshot_bytes={self.max_snapshot_bytes} leaves no room for a snapshot. Use a number of bytes, "
                "or None for a share of the memory."
            )
