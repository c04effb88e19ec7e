"""A small CLIP for 16-bit precisions, and runs of it with masters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip import MoEClipPrecision
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import ContrastiveLoss, MoE
from tests.models import loader, quiet_trainer

DIM = 8


def masters(precision: str = "bf16-true", **settings: Any) -> MoEClipPrecision:
    return MoEClipPrecision(precision, device="cpu", master_weights=True, **settings)


class Clip(LightningModule):
    """Dense layers, experts and our loss; notes each gradient as autograd hands it over, and the outcome."""

    def __init__(self, *, lr: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.lr = lr
        self.stem = nn.Linear(DIM, DIM)
        self.moe = MoE(DIM, 16, 4, top_k=2)
        self.head = nn.Linear(DIM, DIM)
        self.loss = ContrastiveLoss()
        self.arrived: dict[str, list[Tensor]] = {}
        self.reduced: dict[str, Tensor] = {}

    def features(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return self.head(hidden + self.moe(hidden))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        dtype = self.stem.weight.dtype
        return self.loss(self.features(batch[0].to(dtype)), self.features(batch[1].to(dtype)))

    def on_train_start(self) -> None:
        for name, p in self.named_parameters():
            if p.dtype.itemsize == 2 and p.requires_grad:
                arrived = self.arrived.setdefault(name, [])
                p.register_hook(lambda g, arrived=arrived: arrived.append(g.detach().clone()))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.reduced = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def pairs(num_batches: int, *, num_rows: int = 12, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(2, num_rows, DIM, generator=generator).unbind()) for _ in range(num_batches)]


def fit(module: LightningModule, data: list, *, world_size: int = 1, **settings: Any) -> Any:
    plugins = settings.pop("plugins", None) or [masters()]
    trainer = quiet_trainer(world_size, plugins=plugins, **settings)
    trainer.fit(module, loader(data))
    return trainer


def held_by(trainer: Any, index: int = 0) -> list[nn.Parameter]:
    return [p for group in trainer.optimizers[index].param_groups for p in group["params"]]
