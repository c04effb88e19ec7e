"""A layer whose tokens name the expert that they go to, and a fit that is watched."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.callbacks.expert_load_monitor import ExpertLoadMonitor
from lightning_moeclip.modules import MoE
from tests.models import loader, quiet_trainer

EXPERTS = 4
Wishes = Mapping[str | None, list[int]]  # expert that each token wants, by tower
Rows = dict[tuple[str, str], tuple[list[int], list[int]]]  # choices and drops


class Shared(LightningModule):
    """Both towers go through one layer, where token i goes to the expert that it names."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.moe = MoE(EXPERTS, 6, EXPERTS, top_k=1, **options)
        with torch.no_grad():
            self.moe.router.weight.copy_(9.0 * torch.eye(EXPERTS))
        self.history: list[tuple[int, Rows]] = []

    def training_step(self, batch: Wishes, batch_idx: int) -> Tensor:
        outputs = [self.moe(self.tokens(wishes), tower=tower) for tower, wishes in batch.items()]
        return torch.cat(outputs).sum()

    def tokens(self, wishes: list[int]) -> Tensor:
        return one_hot(torch.tensor(wishes, dtype=torch.int64), EXPERTS).to(self.moe.w_in.dtype)

    def on_train_batch_end(self, *args: object) -> None:
        self.keep()

    def on_train_end(self) -> None:
        self.keep()

    def keep(self) -> None:
        last = next(c for c in self.trainer.callbacks if isinstance(c, ExpertLoadMonitor)).last
        if last is not None and (not self.history or self.history[-1][0] != last.step):
            self.history.append((last.step, rows_of(last.loads)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows_of(loads: Mapping[Any, Any]) -> Rows:
    return {tuple(key): (row.choices.tolist(), row.drops.tolist()) for key, row in loads.items()}


def fit(
    data: list[Wishes],
    *,
    module: LightningModule | None = None,
    world_size: int = 1,
    every: int | None = 1,
    **options: Any,
) -> tuple[Any, ExpertLoadMonitor, Trainer]:
    module = Shared() if module is None else module
    monitor = ExpertLoadMonitor(every_n_steps=every)
    trainer = quiet_trainer(world_size, callbacks=[monitor], **options)
    trainer.fit(module, loader(data))
    return module, monitor, trainer
