"""Layers of other libraries, whose experts live on every rank, train as in one process without a change."""

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import contrastive_loss, paired_features
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


class TransformersClip(MixtralTowers):
    """A CLIPModel that is trained through its output's features and its own scale."""

    def __init__(self) -> None:
        super(MixtralTowers, self).__init__()
        from transformers import CLIPConfig, CLIPModel

        torch.manual_seed(5)
        small = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
        tokens = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 7}
        vision = {**small, "image_size": 2, "patch_size": 1, "num_channels": 2}
        config = CLIPConfig(text_config={**small, **tokens}, vision_config=vision, projection_dim=6)
        self.model = CLIPModel(config).double()
        self.gradients = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[1].abs() * 20).long().clamp(3, 49)
        output = self.model(pixel_values=batch[0].view(-1, 2, 2, 2), input_ids=tokens)
        return contrastive_loss(*paired_features(output), self.model.logit_scale)


MODULES = {"block": MixtralTowers, "model": TransformersClip}


@on_ranks(2)
def fit(rank: Rank) -> dict[str, list[dict[str, Tensor | None]]]:
    found = {}
    for name, build in MODULES.items():
        module = build()
        quiet_trainer(2).fit(module, loader(share(batches(3), ROWS, rank.index)))
        found[name] = module.gradients
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, list[dict[str, Tensor | None]]]]:
    return fit.launch()


def assert_equals_one_process(name: str, two_ranks: list[dict[str, list[dict[str, Tensor | None]]]]) -> None:
    module = MODULES[name]()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        wanted = gradients_of(module)
        assert any(name.endswith("logit_scale") and g is not None for name, g in wanted.items())
        optimizer.step()
        for found in two_ranks:
            assert max(gradient_errors(found[name][index], wanted, 0).values()) < 1e-10


def test_transformers_moe_block_equals_one_process(two_ranks: list) -> None:
    assert_equals_one_process("block", two_ranks)


def test_case_33_a_transformers_clip_equals_one_process(two_ranks: list) -> None:
    assert_equals_one_process("model", two_ranks)
