"""Case 15: a scale beyond its bound that is pulled further up stands exactly at the bound after the step."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import ContrastiveLoss
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

DIM, NUM_STEPS = 6, 3
BOUND = torch.tensor(math.log(100), dtype=torch.float32)
ROWS = [4, 2]


class Towers(LightningModule):
    """Two linear towers at the identity, and weight decay over everything.

    Features are one common direction and a little of their own, so that the logits of a pair stand 1.5 above the others
    and the loss asks for a larger scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        for tower in (self.image, self.text):
            nn.init.eye_(tower.weight)
        self.loss = ContrastiveLoss()
        nn.init.constant_(self.loss.logit_scale, 5.0)
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(self.image(batch), self.text(batch))
        self.seen.append({"loss": loss.detach(), "before": self.loss.logit_scale.detach().clone()})
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen[-1]["gradient"] = self.loss.logit_scale.grad.clone()

    def on_train_batch_end(self, *args: object) -> None:
        self.seen[-1]["after"] = self.loss.logit_scale.detach().clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # one step of decay is 1 % of the scale, 0.046: more than the 0.01 by which AdamW pulls it up
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1.0)


def rows(rank: int | None) -> list[Tensor]:
    """The same batch every step: all rows, or those of a rank."""
    batch = torch.ones(sum(ROWS), DIM) + 0.25 * torch.eye(DIM)
    return [batch if rank is None else batch.split(ROWS)[rank]] * NUM_STEPS


def run(world_size: int, rank: int | None, arguments: dict[str, Any]) -> list[dict[str, Tensor]]:
    module = Towers()
    quiet_trainer(world_size, **arguments).fit(module, loader(rows(rank)))
    return module.seen


@on_ranks(2)
def run_on_2(rank: Rank, ep: int) -> list[dict[str, Tensor]]:
    return run(2, rank.index, {"strategy": MoEClipStrategy(expert_parallel_size=ep)})


@on_ranks(2)
def run_in_half(rank: Rank) -> list[dict[str, Tensor]]:
    # no gradient overflows: every step is taken
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
    return run(2, rank.index, {"plugins": [precision]})


def check(ranks: list[list[dict[str, Tensor]]]) -> None:
    for seen in ranks:
        assert len(seen) == NUM_STEPS
        for step, found in enumerate(seen):
            assert found["loss"].isfinite()
            # a clamp in the forward would make it zero; a common gradient of all ranks
            assert found["gradient"] < -1e-3
            assert torch.equal(found["gradient"], ranks[0][step]["gradient"])
            assert found["after"].dtype is torch.float32
            assert torch.equal(found["before"], BOUND if step else torch.tensor(5.0))
            assert torch.equal(found["after"], BOUND), f"step {step}: {found['after']}"


@pytest.mark.parametrize("ep", [1, 2])
def test_case_15_scale_is_at_its_bound_on_both_ranks_after_each_step(ep: int) -> None:
    ranks = run_on_2.launch(ep=ep)
    check(ranks)
    wanted = Towers()
    wanted.training_step(rows(None)[0], 0).backward()
    # float32: some 30 sums of 6 terms
    assert ranks[0][0]["gradient"].item() == pytest.approx(wanted.loss.logit_scale.grad.item(), rel=1e-5)


def test_case_15_scale_is_at_its_bound_under_a_trainer_without_our_strategy() -> None:
    check([run(1, None, {"strategy": "auto"})])


def test_case_15_scale_is_at_its_bound_under_loss_scaling() -> None:
    check(run_in_half.launch())
