"""Parameters that only an optimizer holds: compared over ranks, moved, saved and loaded by their place."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moeclip.binding import DDPStrategy, LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*parameter.s. are in an optimizer and not in the LightningModule")


class Net(LightningModule):
    """A layer of one weight, and parameters that only ``groups`` hands to the optimizer."""

    def __init__(self, groups: str = "weight scale table", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.groups = groups
        self.outside = {
            "scale": nn.Parameter(torch.tensor(0.5, dtype=dtype)),
            "table": nn.Parameter(torch.ones(3, dtype=dtype)),
        }

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).mean()
        for name in self.groups.replace("+", " ").split():
            loss = loss + self.outside[name].sum() if name in self.outside else loss
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        values = {"weight": self.layer.weight, **self.outside}
        parts = [[{"params": [values[n]]} for n in part.split()] for part in self.groups.split("+")]
        self.automatic_optimization = len(parts) == 1
        return [torch.optim.SGD(part, lr=0.1) for part in parts]


def data(dtype: torch.dtype = torch.float32) -> DataLoader:
    return loader([torch.ones(2, 2, dtype=dtype)] * 2)


@pytest.mark.parametrize(
    ("on_rank_0", "on_rank_1"),
    [("weight scale", "weight"), ("weight", "weight scale"), ("weight scale table", "weight table scale"),
     ("weight+scale", "weight scale"), ("weight table", "table weight")],
)  # fmt: skip
@on_ranks(2, timeout_s=20.0)
def test_optimizers_that_differ_between_ranks_are_refused_on_both(rank: Rank, on_rank_0: str, on_rank_1: str) -> None:
    net = Net(on_rank_1 if rank.index else on_rank_0)
    with pytest.raises(RuntimeError, match=r"What the optimizers hold differs between ranks, first at .*optimizer0"):
        quiet_trainer(2).fit(net, data())


PRECISIONS = [
    ("64-true", torch.float64, torch.float64),
    ("bf16-true", torch.float32, torch.bfloat16),
    ("bf16-mixed", torch.float32, torch.float32),
]


@pytest.mark.parametrize(("precision", "scale", "table"), PRECISIONS)
@on_ranks(2)
def test_parameter_of_an_optimizer_alone_gets_the_dtype_of_the_run(
    rank: Rank, precision: str, scale: torch.dtype, table: torch.dtype
) -> None:
    net = Net()
    with torch.no_grad():
        net.outside["scale"] += rank.index
    quiet_trainer(2, precision=precision).fit(net, data(net_dtype(precision)))
    assert net.outside["scale"].dtype == scale
    assert net.outside["table"].dtype == table
    assert gather_objects(net.outside["scale"].item()) == [pytest.approx(0.3)] * 2


def net_dtype(precision: str) -> torch.dtype:
    return torch.float64 if precision == "64-true" else torch.float32


def saved_by(path: Path, **arguments: Any) -> Net:
    net = Net("weight table")
    trainer = quiet_trainer(1, **arguments)
    trainer.fit(net, data())
    trainer.save_checkpoint(path)
    return net


@on_ranks(1)
def test_reordered_groups_are_refused_when_a_run_resumes(rank: Rank, tmp_path: Path) -> None:
    saved_by(tmp_path / "last.ckpt")
    told = r"outside the LightningModule at \{'optimizer0.group1.0': \[3\]\}, and this run has .*'optimizer0.group0.0'"
    with pytest.raises(ValueError, match=told):
        quiet_trainer(1, max_epochs=2).fit(Net("table weight"), data(), ckpt_path=tmp_path / "last.ckpt")


@on_ranks(1)
def test_missing_optimizers_are_refused_when_a_run_resumes(rank: Rank, tmp_path: Path) -> None:
    saved_by(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"state of 1 optimizers and configure_optimizers made 2\. Resume with"):
        quiet_trainer(1, max_epochs=2).fit(Net("weight+table"), data(), ckpt_path=tmp_path / "last.ckpt")


@on_ranks(1)
def test_checkpoint_of_another_strategy_warns_that_it_has_no_values(rank: Rank, tmp_path: Path) -> None:
    saved_by(tmp_path / "last.ckpt", strategy=DDPStrategy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(1, max_epochs=2).fit(Net("weight table"), data(), ckpt_path=tmp_path / "last.ckpt")
    told = [str(w.message) for w in caught if "holds no values of optimizer0.group1.0" in str(w.message)]
    assert len(told) == 1
