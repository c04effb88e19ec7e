"""Every expert survives evaluation, and a forward that only some ranks run never waits for the others."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

ROWS = [5, 3]


class Evaluated(TwoTowers):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.compute_loss(batch), sync_dist=True, batch_size=1)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.compute_loss(batch), sync_dist=True, batch_size=1)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.image(batch[0])


def mine(rank: Rank, num_batches: int) -> DataLoader:
    return loader(share(batches(num_batches), ROWS, rank.index))


@on_ranks(2)
def every_order(rank: Rank) -> dict[str, object]:
    module, strategy = Evaluated(), MoEClipStrategy(expert_parallel_size=2)
    trainer = quiet_trainer(2, strategy=strategy, max_epochs=1)
    before = trainer.validate(module, mine(rank, 2), verbose=False)[0]["val_loss"]
    trainer.fit(module, mine(rank, 4), mine(rank, 2))
    after_fit = {n: p.clone() for n, p in module.state_dict().items()}
    tested = trainer.test(module, mine(rank, 2), verbose=False)[0]["test_loss"]
    validated = trainer.validate(module, mine(rank, 2), verbose=False)[0]["val_loss"]
    after_tests = {n: p.clone() for n, p in module.state_dict().items()}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, mine(rank, 4))
    return {
        "before": before,
        "after_fit": after_fit,
        "tested": tested,
        "validated": validated,
        "after_tests": after_tests,
        "hooks": len(module.image.moe.w_in._post_accumulate_grad_hooks or {}),
        "after_second_fit": module.state_dict(),
    }


def loss_of(module: TwoTowers) -> float:
    with torch.no_grad():
        return torch.stack([module.compute_loss(batch) for batch in batches(2)]).mean().item()


def test_validate_fit_test_validate_fit_keep_every_expert() -> None:
    one = TwoTowers()
    wanted_before = loss_of(one)
    optimizer = one.configure_optimizers()
    train_one_process(one, batches(4), optimizer=optimizer)
    after_one_epoch, wanted_after = {n: p.clone() for n, p in one.state_dict().items()}, loss_of(one)
    train_one_process(one, batches(4), optimizer=one.configure_optimizers())
    for found in every_order.launch():
        assert found["before"] == pytest.approx(wanted_before, rel=1e-10)
        assert found["tested"] == pytest.approx(wanted_after, rel=1e-10)
        assert found["validated"] == pytest.approx(wanted_after, rel=1e-10)
        assert found["hooks"] == 0, "hooks outlive fit"
        for name, value in after_one_epoch.items():
            assert (found["after_fit"][name] - value).abs().max() < 1e-9
            assert torch.equal(found["after_tests"][name], found["after_fit"][name])
            assert (found["after_second_fit"][name] - one.state_dict()[name]).abs().max() < 1e-9


@on_ranks(2)
def predict_unevenly(rank: Rank) -> tuple[Tensor, Tensor, int]:
    module = Evaluated()
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2), use_distributed_sampler=True)
    trainer.fit(module, mine(rank, 2))
    images = torch.cat([image for image, _ in batches(1, num_rows=5)])
    predicted = trainer.predict(module, DataLoader(TensorDataset(images), batch_size=1))
    if rank.index == 0:  # a call of one rank alone: the experts are whole after fit
        module.image(images)
    with torch.no_grad():
        return torch.cat(predicted), module.image(images)[rank.index :: 2], len(predicted)


def test_predict_with_different_numbers_of_batches_does_not_hang() -> None:
    by_rank = predict_unevenly.launch()
    assert [num_batches for _, _, num_batches in by_rank] == [3, 2]
    for predicted, wanted, _ in by_rank:
        assert (predicted - wanted).abs().max() < 1e-12


@on_ranks(2)
def validate_unevenly(rank: Rank) -> None:
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2))
    trainer.fit(Evaluated(), mine(rank, 2), mine(rank, 2 + rank.index))


def test_different_numbers_of_validation_batches_are_named_on_both_ranks() -> None:
    with pytest.raises(AssertionError) as caught:
        validate_unevenly()
    for text in caught.value.failures.values():
        assert "different numbers of validation batches (rank 0: 2, rank 1: 3)" in text


class CallsOutsideAStep(TwoTowers):
    def on_train_batch_end(self, *args: object) -> None:
        if self.global_rank == 0:
            self.image(batches(1)[0][0])


@on_ranks(2)
def call_on_one_rank(rank: Rank) -> None:
    quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2)).fit(CallsOutsideAStep(), mine(rank, 2))


def test_forward_on_one_rank_in_fit_raises_the_reason() -> None:
    with pytest.raises(AssertionError, match="called outside a step of the strategy"):
        call_on_one_rank()
