"""Warnings appear once, on the first rank; values that are read too early say when they are there."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer


class Net(LightningModule):
    def __init__(self, *, norms: int = 0, optimizer: str = "sgd", decay: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), *(nn.BatchNorm1d(2) for _ in range(norms)))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.optimizer, self.decay = optimizer, decay

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) * self.logit_scale.exp()).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=self.decay)


def rows() -> object:
    return loader([torch.tensor([[1.0, 2.0], [3.0, 5.0]])])


def warnings_of(net: Net, part: str) -> list[list[str]]:
    """By rank, the warnings of a fit that hold ``part``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(2).fit(net, rows())
    return gather_objects([str(w.message) for w in caught if part in str(w.message)])


@on_ranks(2)
def test_batch_norm_warns_once_for_all_ranks_and_layers(rank: Rank) -> None:
    told = warnings_of(Net(norms=2), "BatchNorm")
    assert [len(messages) for messages in told] == [1, 0]
    assert told[0][0].startswith("layers.1 is a BatchNorm")
    assert "Write Trainer(sync_batchnorm=True)." in told[0][0]


@on_ranks(2)
def test_decayed_temperature_warns_once_for_all_ranks(rank: Rank) -> None:
    told = warnings_of(Net(decay=0.1), "weight_decay")
    assert [len(messages) for messages in told] == [1, 0]
    assert told[0][0].startswith("logit_scale has weight_decay=0.1, which pulls it towards 0, whatever the data say: ")
    assert warnings_of(Net(decay=0.0), "weight_decay") == [[], []]


@on_ranks(1)
def test_lbfgs_under_loss_scaling_is_refused(rank: Rank) -> None:
    trainer = quiet_trainer(1, plugins=[MoEClipPrecision("16-mixed", device="cpu")])
    with pytest.raises(TypeError, match=r"precision='16-mixed' with LBFGS: .* Use precision='32-true', or another"):
        trainer.fit(Net(optimizer="lbfgs"), rows())


def test_mesh_and_plan_say_when_they_are_there() -> None:
    strategy = MoEClipStrategy()
    with pytest.raises(RuntimeError, match=r"strategy\.mesh exists once the ranks have met: read it in setup\(\)"):
        _ = strategy.mesh
    with pytest.raises(RuntimeError, match=r"strategy\.plan exists while fit runs .*on_fit_start or later"):
        _ = strategy.plan
