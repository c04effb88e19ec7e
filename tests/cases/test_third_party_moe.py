"""Layers of other libraries, whose experts live on every rank, train as in one process without a change."""

import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import contrastive_loss
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import batches, gradient_errors, gradients_of, loader, quiet_trainer, share

ROWS = [6, 2]


class MixtralTowers(LightningModule):
    """A transformers block in the image tower, a plain layer in the text tower."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        torch.manual_seed(5)
        config = MixtralConfig(
            hidden_size=8,
            intermediate_size=12,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
        )
        self.image_tower = MixtralSparseMoeBlock(config)
        for parameter in self.image_tower.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.text_tower = nn.Linear(7, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.double()
        self.gradients: list[dict[str, Tensor | None]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image = self.image_tower(batch[0].unsqueeze(1)).squeeze(1)
        return contrastive_loss(image, self.text_tower(batch[1]), self.logit_scale)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


@on_ranks(2)
def fit(rank: Rank) -> list[dict[str, Tensor | None]]:
    module = MixtralTowers()
    quiet_trainer(2).fit(module, loader(share(batches(3), ROWS, rank.index)))
    return module.gradients


def test_transformers_moe_block_equals_one_process() -> None:
    module = MixtralTowers()
    optimizer = module.configure_optimizers()
    wanted = []
    for index, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        wanted.append(gradients_of(module))
        optimizer.step()
    for found in fit.launch():
        for step in range(3):
            assert max(gradient_errors(found[step], wanted[step], 0).values()) < 1e-10
