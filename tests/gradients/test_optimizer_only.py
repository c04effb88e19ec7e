"""Parameters that an optimizer holds and the LightningModule does not."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, share_of, trainer, worst_error

DIM = 4
BATCHES = torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Loss:
    """No module: its temperature is nobody's parameter but the optimizer's."""

    def __init__(self, start: float) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(start, dtype=torch.float64))


class Net(LightningModule):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(DIM, DIM).double()
        self.loss = Loss(1.0 + rank)  # another value on each rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.a(batch) * self.loss.logit_scale.exp()).tanh().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.parameters(), self.loss.logit_scale], lr=1e-2)

    def values(self) -> dict[str, Tensor]:
        return {"weight": self.a.weight.data.clone(), "logit_scale": self.loss.logit_scale.data.clone()}


class Grown(Net):
    """Gets a head and a temperature in the second epoch, each rank with values of its own."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.rank = rank
        self.head: nn.Module | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self.a(batch) * self.loss.logit_scale.exp()
        return (y if self.head is None else self.head(y) * self.second.exp()).tanh().pow(2).mean()

    def grow(self, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(self.rank)
        self.head = nn.Linear(DIM, DIM).double()
        self.__dict__["second"] = nn.Parameter(torch.tensor(0.5 + self.rank, dtype=torch.float64))
        optimizer.add_param_group({"params": [*self.head.parameters(), self.second]})

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.grow(self.optimizers().optimizer)

    def values(self) -> dict[str, Tensor]:
        return super().values() | {"head": self.head.weight.data.clone(), "second": self.second.data.clone()}


def in_plain_torch(net: Net, *, epochs: int) -> list[dict[str, Tensor]]:
    optimizer = net.configure_optimizers()
    values = []
    for epoch in range(epochs):
        if epoch == 1 and isinstance(net, Grown):
            net.grow(optimizer)
        for batch in BATCHES:
            optimizer.zero_grad()
            net.training_step(batch, 0).backward()
            optimizer.step()
        values.append(net.values() if not isinstance(net, Grown) or epoch else {})
    return values


@on_ranks(2)
def test_parameter_of_an_optimizer_alone_is_broadcast_reduced_and_resumed_exactly(rank: Rank, tmp_path: Path) -> None:
    want = in_plain_torch(Net(), epochs=2)
    net = Net(rank.index)
    loop = trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.fit(net, share_of(BATCHES, rank))
    told = [str(w.message) for w in caught if "load_from_checkpoint will not see them" in str(w.message)]
    assert len(told) == (rank.index == 0)
    assert all("optimizer0.group0.2" in message for message in told)
    assert not loop.strategy.plan["optimizer0.group0.2"].is_in_module
    assert worst_error(net.values(), want[0]) < TOLERANCE
    assert len(set(gather_objects(float(net.loss.logit_scale)))) == 1

    loop.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["moeclip"]["optimizer_parameters"]
    assert torch.equal(saved["optimizer0.group0.2"], net.loss.logit_scale.data)
    resumed = Net(rank.index + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(max_epochs=2).fit(resumed, share_of(BATCHES, rank), ckpt_path=tmp_path / "last.ckpt")
    assert worst_error(resumed.values(), want[1]) < TOLERANCE


@on_ranks(2)
def test_parameters_made_while_training_start_equal_on_all_ranks(rank: Rank) -> None:
    net = Grown(rank.index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(max_epochs=2).fit(net, share_of(BATCHES, rank))
    assert worst_error(net.values(), in_plain_torch(Grown(), epochs=2)[1]) < TOLERANCE
