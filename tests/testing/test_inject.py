"""Each fault does exactly what it says, on its rank and in its step alone."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule
from lightning_moeclip.testing import InjectedFault, Rank, inject, on_ranks
from lightning_moeclip.testing.faults import FAULTS
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

STEP, NUM_BATCHES = 2, 4


class Net(LightningModule):
    """Two layers, linear in each parameter's gradient; keeps gradients and parameters of every step."""

    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 2).double()
        self.automatic_optimization = not is_manual
        self.kept: list[dict[str, Tensor]] = []
        self.values: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.second(self.first(batch)).pow(2).mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.kept.append({n: p.grad.clone() for n, p in self.named_parameters()})

    def on_train_batch_end(self, *args: object) -> None:
        self.values.append({n: p.detach().clone() for n, p in self.named_parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # nothing moves, so that the gradients of later steps do not know of the fault
        return torch.optim.SGD(self.parameters(), lr=0.0)


def own_data(rank: Rank, num_batches: int = NUM_BATCHES) -> Any:
    rows = torch.randn(num_batches, 2, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return loader(list(rows[:, rank.index % 2]))


def one_process(is_own: bool, rank: Rank, num_batches: int = NUM_BATCHES) -> list[dict[str, Tensor]]:
    """Gradients of every batch: of one rank's loss, or of the mean over both ranks."""
    net = Net()
    kept = []
    data = [list(own_data(Rank(r, 2), num_batches)) for r in range(2)]
    for index in range(num_batches):
        net.zero_grad()
        shares = [data[rank.index][index]] if is_own else [part[index] for part in data]
        for batch in shares:
            (net.training_step(batch, 0) / len(shares)).backward()
        kept.append({n: p.grad.clone() for n, p in net.named_parameters()})
    return kept


@on_ranks(2)
def run(
    rank: Rank, faults: list[tuple[str, dict[str, Any]]], is_manual: bool = False, strategy: Any = None, **settings: Any
) -> list[tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int | None]]:
    """Gradients, parameters and ``fired`` of a fit for each fault."""
    told = []
    for fault, arguments in faults:
        callback = inject(fault, STEP, 1, **arguments)
        net = Net(is_manual=is_manual)
        chosen = {} if strategy is None else {"strategy": strategy}
        num_batches = NUM_BATCHES * settings.get("accumulate_grad_batches", 1)
        quiet_trainer(2, callbacks=[callback], **chosen, **settings).fit(net, own_data(rank, num_batches))
        told.append((net.kept, net.values, callback.fired))
    return told
