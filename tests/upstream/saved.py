"""What several files of checkpoints share: modules with much to restore, and callbacks that save."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.upstream.models import (
    Damper,
    Planned,
    ResumableRows,
)


class Resumable(Damper):
    """Adam has moments to restore, and the loader a place."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return ResumableRows()


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


class Scored(Resumable):
    def __init__(self, lr: float = 0.1, tag: str = "a") -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("error", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_error", self.loss(batch), sync_dist=True)


class Stops(Damper):
    stop_at: int | None = None
    by_error = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == self.stop_at:
            if self.by_error:
                raise Planned
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)
