"""The model that step time and gradient memory are measured on: two small transformers and a temperature."""

import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule

WIDTH, DEPTH, VOCABULARY, TOKENS = 256, 4, 1000, 16


class Tower(nn.Module):
    """Tokens to one feature per row."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(DEPTH)
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.normalize(
            self.projection(self.norm(self.blocks(self.embed(tokens) + self.position)).mean(1)), dim=-1
        )


class TwoTowers(LightningModule):
    """6.8 M parameters in float32; every rank uses all of them in every step.

    Attributes:
        gradients: what the optimizer saw in the first step, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image = Tower(nn.Linear(48, WIDTH))
        self.text = Tower(nn.Embedding(VOCABULARY, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(2.6))
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        image, text = batch
        logits = self.logit_scale.exp() * self.image(image) @ self.text(text).T
        target = torch.arange(len(logits))
        return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [*self.image.parameters(), *self.text.parameters()]
        return torch.optim.AdamW([{"params": weights}, {"params": [self.logit_scale], "weight_decay": 0.0}], lr=1e-4)


def batches(rank: int, number: int, *, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Image patches [rows, 16, 48] and text tokens [rows, 16], different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(rows, TOKENS, 48, generator=generator),
            torch.randint(VOCABULARY, (rows, TOKENS), generator=generator),
        )
        for _ in range(number)
    ]
