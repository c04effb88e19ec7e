"""Case 22: loads are of training tokens, once each, whatever else a Trainer runs between and inside the steps."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.modules import MoE
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

ROWS, NUM_BATCHES, ACCUMULATE, TOP_K = [5, 3], 6, 2, 2


class Loaded(TwoTowers):
    """Runs its towers again in backward, and reads the loads once per optimizer step."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.loads: list[dict[str, Tensor]] = []
        self.num_validated = 0

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, text = (
            checkpoint(tower, x, use_reentrant=False) for tower, x in zip((self.image, self.text), batch, strict=True)
        )
        return self.loss(image, text)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.compute_loss(batch)
        self.num_validated += 1

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        layers = {path: layer for path, layer in self.named_modules() if isinstance(layer, MoE)}
        self.loads.append({path: layer.pop_training_load()[None] for path, layer in layers.items()})


@on_ranks(2)
def fit(rank: Rank, ep: int) -> tuple[list[dict[str, Tensor]], int]:
    module = Loaded()
    trainer = quiet_trainer(
        2,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=1,  # also between the two micro-batches of a step
    )
    mine = loader(share(batches(NUM_BATCHES), ROWS, rank.index))
    trainer.fit(module, mine, loader(share(batches(2, seed=9), ROWS, rank.index)))
    return module.loads, module.num_validated


def choices_by_hand(step: int) -> dict[str, Tensor]:
    """Choices per expert over the rows of all ranks; the weights do not move."""
    one = TwoTowers()
    wanted = {}
    for side, name in enumerate(("image", "text")):
        tower = getattr(one, name)
        counts = torch.zeros(4, dtype=torch.int64)
        for batch in batches(NUM_BATCHES)[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            tokens = torch.cat([torch.ones(sum(ROWS), 1, dtype=torch.float64), tower.stem(batch[side]).tanh()], dim=1)
            chosen = (tokens @ tower.moe.router.weight.T).topk(TOP_K).indices
            counts += torch.bincount(chosen.flatten(), minlength=4)
        wanted[f"{name}.moe"] = counts
    return wanted


@pytest.mark.parametrize("ep", [1, 2])
def test_case_22_loads_are_of_training_tokens_once_each(ep: int) -> None:
    ranks = fit.launch(ep=ep)
    for step in range(NUM_BATCHES // ACCUMULATE):
        wanted = choices_by_hand(step)
        for layer, counts in wanted.items():
            total = sum(loads[step][layer] for loads, _ in ranks)
            assert total.sum() == ACCUMULATE * sum(ROWS) * TOP_K
            assert torch.equal(total, counts)
    for loads, num_validated in ranks:
        assert len(loads) == NUM_BATCHES // ACCUMULATE
        assert num_validated == 2 + 2 * NUM_BATCHES
