"""A run with faults at chosen steps, and the bits of all that it holds after each batch."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moeclip.binding import Callback, Trainer
from lightning_moeclip.callbacks.cosine_rollback import CosineRollback
from tests.models import TwoTowers


class Faulty(TwoTowers):
    """Two towers with dropout, a learning rate that falls, and faults on one rank.

    Args:
        nan_loss: values of ``global_step`` at which the loss of ``rank`` is NaN.
        nan_gradient: at which an element of its gradients is NaN; of the text tower.
        spikes: at which its loss is 50 times as large.
        rank: where faults happen.
    """

    def __init__(
        self,
        *,
        nan_loss: Sequence[int] = (),
        nan_gradient: Sequence[int] = (),
        spikes: Sequence[int] = (),
        rank: int = 0,
        has_own_moe: bool = True,
    ) -> None:
        super().__init__(has_own_moe=has_own_moe)
        self.dropout = nn.Dropout(0.2)
        self.nan_loss, self.nan_gradient, self.spikes, self.rank = nan_loss, nan_gradient, spikes, rank

    def is_at(self, steps: Sequence[int]) -> bool:
        return self.global_rank == self.rank and self.global_step in steps

    @override
    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().compute_loss((self.dropout(batch[0]), batch[1]))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.compute_loss(batch)
        if self.is_at(self.nan_loss):
            loss = loss * torch.nan
        return 50 * loss if self.is_at(self.spikes) else loss

    @override
    def on_after_backward(self) -> None:
        if self.is_at(self.nan_gradient):
            self.text.head.bias.grad[0] = torch.nan

    @override
    def on_train_batch_end(self, *args: object) -> None:
        pass

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Spy(Callback):
    """The bits after each batch, by ``global_step``; given after the callback that it looks at."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Any]] = {}
        self.snapshots: dict[int, tuple[int, ...]] = {}
        self.has_gradients: dict[int, bool] = {}
        self.remembered: dict[int, Any] = {}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step in self.after:
            return  # in the middle of a step of several batches
        self.after[trainer.global_step] = bits(trainer, pl_module)
        self.has_gradients[trainer.global_step] = any(p.grad is not None for p in pl_module.parameters())
        for callback in trainer.callbacks:
            if isinstance(callback, CosineRollback) and callback._snapshots is not None:
                self.snapshots[trainer.global_step] = callback._snapshots.steps
                self.remembered[trainer.global_step] = callback._watched()


def bits(trainer: Trainer, module: nn.Module) -> dict[str, Any]:
    """All that the next training step depends on, but data and counters; copies."""
    found: dict[str, Any] = {f"module {n}": v for n, v in (*module.named_parameters(), *module.named_buffers())}
    for callback in trainer.callbacks:
        for value in vars(callback).values():
            if isinstance(value, nn.Module) and value is not module:
                found |= {f"average {n}": v for n, v in value.state_dict().items()}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            found[f"optimizer {i} group {j} lr"] = group["lr"]
            for k, parameter in enumerate(group["params"]):
                found |= {f"optimizer {i} {j}.{k} {n}": v for n, v in optimizer.state[parameter].items()}
    for config in trainer.lr_scheduler_configs:
        found["scheduler"] = config.scheduler.state_dict()
    found["scaler"] = trainer.precision_plugin.state_dict()
    found["torch"], found["python"] = torch.get_rng_state(), random.getstate()
    found["numpy"] = np.random.get_state()[1].tolist()
    return {n: v.detach().clone() if isinstance(v, Tensor) else repr(v) for n, v in found.items()}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what is not the same in every bit."""
    assert a.keys() == b.keys()
    return [n for n, v in a.items() if not (v.equal(b[n]) if isinstance(v, Tensor) else v == b[n])]
