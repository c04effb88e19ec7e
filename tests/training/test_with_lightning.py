"""Parts of Lightning that keep copies of the model, or change it while it trains."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import pl
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

ROWS = [5, 3]
WeightAveraging = pl.callbacks.WeightAveraging


def mine(rank: Rank, num_batches: int):
    return loader(share(batches(num_batches), ROWS, rank.index))


@on_ranks(2)
def average(rank: Rank, path: str) -> dict[str, Tensor]:
    module = TwoTowers()
    trainer = quiet_trainer(
        2,
        strategy=MoEClipStrategy(expert_parallel_size=2),
        callbacks=[WeightAveraging(), pl.callbacks.ModelCheckpoint(path, filename="last", save_top_k=1)],
        enable_checkpointing=True,
    )
    trainer.fit(module, mine(rank, 4))
    return module.state_dict()


def test_weight_averaging_averages_every_expert(tmp_path: Path) -> None:
    module = TwoTowers()
    optimizer, averaged = module.configure_optimizers(), torch.optim.swa_utils.AveragedModel(module)
    for batch in batches(4):
        train_one_process(module, [batch], optimizer=optimizer)
        averaged.update_parameters(module)
    for found in average.launch(path=str(tmp_path)):
        for name, value in averaged.module.state_dict().items():
            assert (found[name] - value).abs().max() < 1e-9, name
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    for name, value in averaged.module.state_dict().items():
        assert (checkpoint["state_dict"][name] - value).abs().max() < 1e-9, name
    for name, value in module.state_dict().items():
        assert (checkpoint["current_model_state"][name] - value).abs().max() < 1e-9, name


@on_ranks(2)
def find_lr(rank: Rank, folder: str) -> dict[str, object]:
    module = TwoTowers()
    before = {n: v.clone() for n, v in module.state_dict().items()}
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2), default_root_dir=folder, max_epochs=1)
    finder = pl.tuner.Tuner(trainer).lr_find(
        module, mine(rank, 8), num_training=8, update_attr=False, early_stop_threshold=None
    )
    restored = {n: v.clone() for n, v in module.state_dict().items()}
    trainer.fit(module, mine(rank, 2))
    return {"losses": finder.results["loss"], "before": before, "restored": restored, "after": module.state_dict()}


def test_lr_find_restores_every_expert_and_fit_goes_on(tmp_path: Path) -> None:
    one = TwoTowers()
    train_one_process(one, batches(2))
    found = find_lr.launch(folder=str(tmp_path))
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-10)
    for rank in found:
        for name, value in rank["before"].items():
            assert torch.equal(rank["restored"][name], value), name
            assert (rank["after"][name] - one.state_dict()[name]).abs().max() < 1e-9, name


def test_one_device_without_ranks_equals_plain_loop() -> None:
    one = TwoTowers()
    train_one_process(one, batches(3), clip=0.05)
    found = one_device.launch()[0]
    for name, value in one.state_dict().items():
        assert (found[name] - value).abs().max() < 1e-12, name


@on_ranks(1)
def one_device(rank: Rank) -> dict[str, Tensor]:
    torch.distributed.destroy_process_group()
    module = TwoTowers()
    trainer = quiet_trainer(1, gradient_clip_val=0.05)
    trainer.fit(module, loader(batches(3)))
    return module.state_dict()
