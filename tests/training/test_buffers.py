"""Buffers: the first rank's at start, before validation and before saving, where they are saved at all."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

STEPS = 2


class Counts(LightningModule):
    """Each step adds rank + 1 to both buffers, which start at 10 * rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("saved", torch.tensor([10.0 * rank]))
        self.register_buffer("own", torch.tensor([10.0 * rank]), persistent=False)
        self.seen: dict[str, tuple[float, float]] = {}

    def note(self, when: str) -> None:
        self.seen.setdefault(when, (self.saved.item(), self.own.item()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note("start")
        for buffer in (self.saved, self.own):
            buffer += self.global_rank + 1
        return self.layer(batch).mean()

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validation")

    def on_fit_start(self) -> None:
        self.note("fit start")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows() -> object:
    return loader([torch.ones(2, 2)] * STEPS)


@pytest.mark.parametrize("has_validation", [False, True])
@on_ranks(2)
def test_saved_buffers_are_the_first_ranks_and_others_are_left_alone(
    rank: Rank, tmp_path: Path, has_validation: bool
) -> None:
    own = 10.0 * rank.index
    net = Counts(rank.index)
    trainer = quiet_trainer(2, num_sanity_val_steps=0)
    trainer.fit(net, rows(), rows() if has_validation else None)
    grown = own + STEPS * (rank.index + 1)
    # both start from the first rank's 0 and count for themselves between the broadcasts
    assert net.seen["start"] == (0.0, own)
    if has_validation:
        assert net.seen["validation"] == (STEPS * 1.0, grown)
    else:
        assert net.seen["epoch end"] == (STEPS * (rank.index + 1.0), grown)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["saved"].item() == STEPS
    assert (net.saved.item(), net.own.item()) == (STEPS, grown)


@on_ranks(2)
def test_validation_alone_starts_from_the_first_ranks_buffers(rank: Rank) -> None:
    net = Counts(rank.index)
    quiet_trainer(2).validate(net, rows(), verbose=False)
    assert net.seen["validation"] == (0.0, 10.0 * rank.index)


class Normed(Counts):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.norm = nn.BatchNorm1d(2)  # not called: its synchronised form runs on GPUs alone
        self.kinds: list[type] = []

    def on_train_start(self) -> None:
        self.kinds.append(type(self.norm))


@on_ranks(2)
def test_sync_batchnorm_is_in_place_while_fit_runs_and_gone_after_it(rank: Rank) -> None:
    net = Normed(rank.index)
    quiet_trainer(2, sync_batchnorm=True).fit(net, rows())
    assert net.kinds == [nn.SyncBatchNorm]
    assert type(net.norm).__name__ == "_BatchNormXd"  # what Lightning puts back
    assert gather_objects(isinstance(net.norm, nn.SyncBatchNorm)) == [False, False]


class SparseBuffers(Counts):
    """Values of rank r are r + 1 at start and grow like the others'; ``grows`` ranks add an element."""

    def __init__(self, rank: int, *, grows: tuple[int, ...] = ()) -> None:
        super().__init__(rank)
        self.grows = grows
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sparse tensors are young
            self.register_buffer("coo", (torch.eye(2) * (rank + 1)).to_sparse())
            self.register_buffer("csr", (torch.eye(2) * (rank + 1)).to_sparse_csr())

    def note(self, when: str) -> None:
        self.seen.setdefault(when, (self.coo.to_dense()[1, 1].item(), self.csr.to_dense()[1, 1].item()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.coo._values().add_(self.global_rank)
        self.csr.values().add_(self.global_rank)
        if self.global_rank in self.grows:
            self.coo = torch.ones(2, 2).to_sparse()
        return loss


@on_ranks(2)
def test_sparse_buffers_are_the_first_ranks_and_other_numbers_of_elements_end_the_run_on_all(rank: Rank) -> None:
    with pytest.raises(RuntimeError, match=r"A sparse buffer differs between ranks.*'coo \(sparse_coo \[2, 2\], coal"):
        quiet_trainer(2, num_sanity_val_steps=0).fit(SparseBuffers(rank.index, grows=(1,)), rows(), rows())
    for grows in ((), (0, 1)):
        net = SparseBuffers(rank.index, grows=grows)
        quiet_trainer(2, num_sanity_val_steps=0).fit(net, rows(), rows())
        assert (net.seen["start"], net.seen["validation"]) == ((1.0, 1.0), (1.0, 1.0))


class SparseParameter(Counts):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.table = nn.Parameter(torch.eye(2).to_sparse())


@on_ranks(1)
def test_sparse_parameter_is_refused_with_what_to_write(rank: Rank) -> None:
    message = r"table is a parameter of torch\.sparse_coo.*Write register_buffer\(\.\.\.\) where it is not trained"
    with pytest.raises(ValueError, match=message):
        quiet_trainer(1).fit(SparseParameter(0), rows())
