"""Checks look at what is trained: not at frozen parts, and also at what only an optimizer holds."""

import re
import warnings

import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

CODE = re.compile(r"\[(MOE\d+): ")


class Student(LightningModule):
    """A layer that learns from a frozen model, in which everything would be refused or warned of if it were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.teacher = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "experts": nn.Linear(4, 4)})
        self.teacher.logit_scale = nn.Parameter(torch.zeros(()))
        self.teacher.requires_grad_(False).eval()

    def on_train_start(self) -> None:
        self.teacher["experts"].to("meta")

    def on_train_end(self) -> None:
        self.teacher["experts"].to_empty(device="cpu")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - self.teacher["norm"](batch)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layer.parameters(), lr=0.1)


class Outside(LightningModule):
    """Its temperature is in the optimizer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = [nn.Parameter(torch.zeros(()))]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) * self.scale[0].exp()).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.parameters(), *self.scale], lr=0.1, weight_decay=0.1)


def codes_of(rank: Rank, module: LightningModule) -> list[str]:
    generator = torch.Generator().manual_seed(rank.index)
    data = [torch.randn(2, 4, generator=generator) for _ in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet_trainer(2, accumulate_grad_batches=2).fit(module, loader(data))
    return sorted({code for w in told for code in CODE.findall(str(w.message))})


@on_ranks(2)
def test_frozen_parts_are_left_alone_and_parameters_of_the_optimizer_are_seen(rank: Rank) -> None:
    told = [codes_of(rank, Student()), codes_of(rank, Outside())]
    assert told == [[], ["MOE111", "MOE112", "MOE404"] if rank.index == 0 else []]
