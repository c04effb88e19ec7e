"""Modules of users that hide what they train, and factories of them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from tests.models import ListMoE, TwoTowers

DIM = 4


class BareLoss:
    """No module: nobody registers its temperature."""

    def __init__(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


@dataclass
class Extras:
    """Hides a module in a dict in a dataclass."""

    heads: dict[str, nn.Module] = field(default_factory=lambda: {"first": nn.Linear(DIM, 2)})


class Hiding(LightningModule):
    """One registered layer, and seven tensors that hide."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.loss = BareLoss()
        self.extras = Extras()
        self.listed = [nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)]
        self.leaf = torch.zeros(5, requires_grad=True)
        self.register_buffer("trained_buffer", torch.zeros(2, requires_grad=True))
        # what must not be found: known, frozen, no leaf, and a cycle
        self.known = [self.layer, self.layer.weight]
        self.teacher = [nn.Linear(2, 2).requires_grad_(False)]
        self.result = self.leaf * 2
        self.cycle: list[Any] = [self]
        self.cycle.append(self.cycle)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.parameters(), self.loss.logit_scale], lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean() * self.loss.logit_scale


class Restless(LightningModule):
    """Its configure_optimizers freezes, assigns, adds a module and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)

    def configure_optimizers(self) -> Any:
        self.body.requires_grad_(False)
        self.head.drawn = torch.rand(3)
        self.extra = nn.Linear(DIM, DIM)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=torch.rand(()).item())
        return {"optimizer": self.optimizer}


class NeedsTrainer(Hiding):
    """Asks its Trainer how long it will train."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


class Scheduled(Hiding):
    """Hides nothing but its temperature, which its optimizer holds, with a schedule as long as its Trainer says."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.layer, self.loss = nn.Linear(DIM, DIM), BareLoss()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches) // self.trainer.world_size
        self.num_steps = min(steps, self.trainer.max_steps, self.trainer.max_epochs * self.trainer.num_training_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.num_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Unanswered(Scheduled):
    """Asks its Trainer for what only a real one has."""

    def configure_optimizers(self) -> Any:
        self.trainer.strategy.optimizer_of_its_own()


class Soft(LightningModule):
    """Experts in a list, all of which see every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 2), nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BuiltForTrainer(LightningModule):
    """Makes its layer late, as wide as there are ranks."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(DIM, self.trainer.world_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NeverBuilt(BuiltForTrainer):
    """Fails to make its layer."""

    def configure_model(self) -> None:
        raise KeyError("no such weights")


class HalfBuilt(NeverBuilt):
    """Has another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)


class Empty(nn.Module):
    """Trains nothing."""


class Lazy(nn.Module):
    """Its layer has no shape before its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(3)


class Lists(LightningModule):
    """Experts in a list, a temperature of its own, and a parameter that DDP is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = ListMoE(DIM, 2)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.ignored = nn.Parameter(torch.ones(2))
        self._ddp_params_and_buffers_to_ignore = ["ignored"]
        self.loss = BareLoss()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD([self.loss.logit_scale], lr=0.1)]


class Tagged(nn.Module):
    """Experts of this rank alone, tagged as DeepSpeed tags its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(DIM, DIM), nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        for parameter in self.experts.parameters():
            parameter.allreduce = False


class Built(LightningModule):
    """Makes its layer late."""

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(DIM, DIM)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def two_towers() -> TwoTowers:
    return TwoTowers()


def emoji() -> LightningModule:
    """The example's task, with the sizes of its data and without the data."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python does for a script in that folder
    from emoji_clip.training import EmojiTask

    return EmojiTask(num_words=1739, max_words=11, num_pairs=327, total_steps=2)


def with_batches() -> tuple[TwoTowers, list[tuple[Tensor, Tensor]]]:
    return TwoTowers(), [(torch.zeros(4, 8), torch.zeros(4, 7))] * 2


def broken() -> nn.Module:
    """Fails where nobody expects it: when its parameters are looked at."""

    class Broken(nn.Module):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("gone")

    return Broken()


def a_number() -> int:
    return 3


NOT_A_FUNCTION = 3
