"""Two linear towers, runs of them on one process, and what is known of each of their steps."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks.step_numbers import StepNumbers, reduce_step_numbers
from lightning_moeclip.modules import ContrastiveLoss
from lightning_moeclip.precision import MoEClipPrecision
from tests.models import loader, quiet_trainer


def pairs(num_batches: int, *, num_rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    images = [torch.randn(num_rows, 4, generator=generator) for _ in range(num_batches)]
    return [(x, x + 0.1 * torch.randn(num_rows, 4, generator=generator)) for x in images]


class Pair(LightningModule):
    """Two linear towers under the contrastive loss."""

    def __init__(self, *, lr: float = 0.05, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.loss = nn.Linear(4, 3), nn.Linear(4, 3), ContrastiveLoss()
        self.lr, self.automatic_optimization = lr, automatic

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(self.image(batch[0]), self.text(batch[1]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def run(module: LightningModule, data: list, *callbacks: Callback, **arguments: Any) -> list[Tensor]:
    """Parameters after a fit on one process."""
    quiet_trainer(1, callbacks=list(callbacks), **arguments).fit(module, loader(data))
    return [p.detach().clone() for p in module.parameters()]


def scaled(precision: str) -> dict[str, Any]:
    """Arguments of a Trainer; a plugin each, since it keeps the state of a run."""
    settings = {"init_scale": 8.0} if precision == "16-mixed" else {}
    return {"plugins": [MoEClipPrecision(precision, device="cpu", **settings)]}


def have_same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Notes(Callback):
    """What is known of each step before it is taken."""

    def __init__(self) -> None:
        self.numbers: list[StepNumbers] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        world = trainer.strategy
        automatic = pl_module.automatic_optimization
        self.losses.append(world.step_loss.item())
        self.numbers.append(
            reduce_step_numbers(world, None, micro_batches=trainer.accumulate_grad_batches if automatic else None)
        )


class Steady(LightningModule):
    """A loss that stays near -1; None in chosen batches."""

    def __init__(self, *, nones: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight, self.nones = nn.Parameter(torch.zeros(4)), nones

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.nones else (self.weight * batch).sum() - 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


def noise(num_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.ones(4) + 0.01 * torch.randn(4, generator=generator) for _ in range(num_batches)]
