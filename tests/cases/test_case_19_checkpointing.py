"""Reentrant checkpointing of spread experts: exact, also where a rank's training_step returns None."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel import ledger
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, Notebook, gradients, parameters, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(3, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SKIPPED = 1


class Net(LightningModule):
    """Spread experts without a checkpoint, in one that returns several things, and in one within another."""

    def __init__(self, *, skipping_ranks: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(DIM, DIM).double()
        self.first, self.second, self.third = (TinyExperts(DIM, 4) for _ in range(3))
        self.skipping_ranks = skipping_ranks

    def pair(self, x: Tensor) -> tuple[int, Tensor, Tensor]:
        y = self.second(x)
        return 1, y, y.sum()

    def nested(self, x: Tensor) -> Tensor:
        return checkpoint(self.third, x.tanh(), use_reentrant=True) + x

    def loss(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        _, y, total = checkpoint(self.pair, x, use_reentrant=True)
        z = checkpoint(self.nested, y, use_reentrant=True)
        return z.pow(2).mean() + (total + y.sum()) / z.numel()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx == SKIPPED and self.global_rank in self.skipping_ranks else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def in_plain_torch(skipping_ranks: tuple[int, ...]) -> tuple[Net, list[dict[str, Tensor | None]]]:
    """One process, in which a skipped rank's rows have no loss; momentum shows a step that is left out."""
    net, seen = Net(), []
    optimizer = net.configure_optimizers()
    for k, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        halves = [half for rank, half in enumerate(batch.chunk(2)) if k != SKIPPED or rank not in skipping_ranks]
        for half in halves:
            (net.loss(half) / 2).backward()
        seen.append(gradients(net))
        optimizer.step()
    return net, seen


@on_ranks(2)
def test_case_19_reentrant_checkpointing_is_exact_also_where_ranks_have_no_loss(rank: Rank) -> None:
    for ranks in ((), (0,), (1,), (0, 1)):
        net, notebook = Net(skipping_ranks=ranks), Notebook()
        fit = trainer(strategy=MoEClipStrategy(expert_parallel_size=2), callbacks=[notebook])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit.fit(net, share_of(BATCHES, rank))
        true, seen = in_plain_torch(ranks)
        for k, (got, want) in enumerate(zip(notebook.gradients, seen, strict=True)):
            mine = {n: v.chunk(2)[rank.index] if v is not None and "weight" in n and v.ndim == 3 else v
                    for n, v in want.items()}  # fmt: skip
            assert worst_error(got, mine) < TOLERANCE, f"without a loss: {ranks}, step {k}"
        assert worst_error(parameters(net), parameters(true)) < TOLERANCE, ranks


@on_ranks(2)
def test_wrapped_experts_are_spread_once(rank: Rank) -> None:
    net = Net()
    net.first = checkpoint_wrapper(net.first, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    notebook = Notebook()
    fit = trainer(strategy=MoEClipStrategy(expert_parallel_size=2), callbacks=[notebook])
    fit.fit(net, share_of(BATCHES, rank))
    wanted = in_plain_torch(())[0].first.weight
    assert (net.first.weight - wanted).abs().max() < 1e-12


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_ledger_remembers_a_checkpoint_once_and_only_one_that_has_a_graph() -> None:
    weight = torch.ones(2, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return ledger.enter(ledger.enter(x * weight) * 2)

    with ledger.recording() as page:
        x = torch.ones(2, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=True)
        assert [node is y.grad_fn for node in page.checkpoints] == [True]
        assert (len(page), len(page.hidden)) == (0, 2)
        checkpoint(layer, torch.ones(2), use_reentrant=True)  # nothing that goes in needs a gradient
        with torch.no_grad():
            layer(x)
        assert (len(page.checkpoints), len(page.hidden)) == (1, 2)
        checkpoint(layer, x, use_reentrant=False)
    assert (len(page), len(page.checkpoints)) == (2, 1)
    del y
    ledger.stand_in(page, device=torch.device("cpu")).backward()
    assert weight.grad is not None
    assert not weight.grad.any()
