"""Optimizers that are toggled in turn, also over ranks and without a sync."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule, LightningOptimizer
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    MakeTrainer,
    ours,
    rows,
    under_both,
    weights,
)


class Adversaries(LightningModule):
    """A generator and a critic with layers of their own, each toggled while it trains."""

    def __init__(self, *, how: str, every: int = 1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.how, self.every = how, every
        self.generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.critic = nn.Linear(4, 1)
        self.critic.bias.requires_grad_(False)  # the user's own choice, which must outlive a toggle
        self.seen: list[Any] = []

    def turn(self, optimizer: LightningOptimizer, own: nn.Module, other: nn.Module, loss: Any, batch_idx: int) -> None:
        steps = batch_idx % self.every == self.every - 1
        if self.how == "toggle_model":
            context = optimizer.toggle_model(sync_grad=steps)
        else:
            context = nullcontext()
            self.toggle_optimizer(optimizer)
        with context:
            assert all(not p.requires_grad for p in other.parameters())
            assert all(p.requires_grad for p in own.parameters() if p is not self.critic.bias)
            self.manual_backward(loss())
            if steps:
                self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        if self.how != "toggle_model":
            self.untoggle_optimizer(optimizer)
        assert [p.requires_grad for p in self.parameters()] == [True, True, True, False]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        score = lambda: (self.critic(self.generator(batch)) - 1).square().mean()  # noqa: E731
        self.turn(first, self.generator, self.critic, score, batch_idx)
        self.turn(second, self.critic, self.generator, lambda: self.critic(batch).square().mean() + score(), batch_idx)

    def configure_optimizers(self) -> Any:
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        return [torch.optim.Adam(self.generator.parameters(), lr=0.1), second]


@pytest.mark.parametrize("how", ["toggle_model", "toggle_optimizer"])
@pytest.mark.parametrize("every", [1, 2])
def test_toggled_optimizers_train_their_own_part_and_give_the_rest_back(how: str, every: int) -> None:
    def script(make: MakeTrainer) -> Any:
        module = Adversaries(how=how, every=every)
        trainer = make()
        trainer.fit(module, rows(4))
        return weights(module), module.seen, trainer.global_step

    assert under_both(script)[2] == 2 * 4 // every


@on_ranks(2)
def toggle_on_ranks(rank: Rank) -> Any:
    module = Adversaries(how="toggle_model", every=2)
    module.double()
    batches = torch.cat(list(rows(4))).double().view(4, 2, 4)
    ours(2).fit(module, torch.utils.data.DataLoader(list(batches[:, rank.index : rank.index + 1]), batch_size=None))
    return weights(module), module.seen


def test_toggled_parts_without_sync_are_reduced_when_the_user_steps() -> None:
    module = Adversaries(how="", every=2).double()
    generator, critic = module.configure_optimizers()
    gradients = []
    for i, batch in enumerate(torch.cat(list(rows(4))).double().view(4, 2, 4)):
        for optimizer, own in ((generator, module.generator), (critic, module.critic)):
            score = (module.critic(module.generator(batch)) - 1).square().mean()
            loss = score if optimizer is generator else module.critic(batch).square().mean() + score
            learns = [p for p in own.parameters() if p.requires_grad]
            for p, g in zip(learns, torch.autograd.grad(loss, learns), strict=True):
                p.grad = g if p.grad is None else p.grad + g
            if i % 2 == 1:
                gradients.append([None if p.grad is None else p.grad.clone() for p in own.parameters()])
                optimizer.step()
                optimizer.zero_grad()

    for found, seen in toggle_on_ranks.launch():
        for name, value in module.state_dict().items():
            assert (found[name] - value).abs().max() < 1e-12, name
        own = [seen[turn][:2] if turn % 2 == 0 else seen[turn][2:] for turn in range(4)]
        for one, wanted in zip(own, gradients, strict=True):
            for g, w in zip(one, wanted, strict=True):
                assert (g is None) == (w is None)
                assert g is None or (g - w).abs().max() < 1e-12
