"""A checkpoint holds what one process holds, whatever the layout that wrote it (cases 20 and 21)."""

from pathlib import Path

import torch
from torch import Tensor

from lightning_moeclip.binding import DDPStrategy
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import OneProcess, TwoTowers, batches, loader, quiet_trainer, share, train_one_process

ROWS = {1: [8], 2: [5, 3], 4: [4, 3, 0, 1]}
HALF, WHOLE = 3, 6  # one and two epochs
BOUND = 1e-9


def train(rank: Rank, ep: int, *, until: int, ckpt_path: str | None = None, save: str | None = None) -> TwoTowers:
    """Train up to step ``until``, from ``ckpt_path`` if given."""
    module = TwoTowers()
    trainer = quiet_trainer(
        rank.world_size, strategy=MoEClipStrategy(expert_parallel_size=ep), max_epochs=until // HALF
    )
    trainer.fit(module, loader(share(batches(HALF), ROWS[rank.world_size], rank.index)), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


@on_ranks(1)
def train_on_1(rank: Rank, **how: object) -> dict[str, Tensor]:
    return train(rank, 1, **how).state_dict()


@on_ranks(2)
def train_on_2(rank: Rank, ep: int, **how: object) -> dict[str, Tensor]:
    return train(rank, ep, **how).state_dict()


@on_ranks(4)
def train_on_4(rank: Rank, ep: int, **how: object) -> dict[str, Tensor]:
    return train(rank, ep, **how).state_dict()


def reference(num_steps: int) -> tuple[OneProcess, torch.optim.Optimizer]:
    module = TwoTowers()
    optimizer = module.configure_optimizers()
    return train_one_process(module, (batches(HALF) * 2)[:num_steps], optimizer=optimizer), optimizer


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() < BOUND, name


def test_checkpoint_of_spread_experts_equals_one_process_with_moments(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    train_on_2.launch(ep=2, until=HALF, save=str(path))
    checkpoint = torch.load(path, weights_only=False)
    one, optimizer = reference(HALF)
    assert_close(checkpoint["state_dict"], one.module.state_dict())
    (saved,), wanted = checkpoint["optimizer_states"], optimizer.state_dict()
    assert saved["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert (saved["state"][index][name] - state[name]).abs().max() < BOUND
    assert checkpoint["moeclip"]["expert_parallel_size"] == 2


def test_resume_under_any_layout_continues_as_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    train_on_2.launch(ep=2, until=HALF, save=path)
    one, _ = reference(WHOLE)
    wanted = one.module.state_dict()
    resumed = {
        "1 process": train_on_1.launch(until=WHOLE, ckpt_path=path),
        "2 ranks, experts whole": train_on_2.launch(ep=1, until=WHOLE, ckpt_path=path),
        "4 ranks, experts over 4": train_on_4.launch(ep=4, until=WHOLE, ckpt_path=path),
        "4 ranks, experts over 2": train_on_4.launch(ep=2, until=WHOLE, ckpt_path=path),
    }
    for ranks in resumed.values():
        for found in ranks:  # after fit every rank holds whole experts
            assert_close(found, wanted)


def test_load_from_checkpoint_finds_whole_experts(tmp_path: Path) -> None:
    path = tmp_path / "whole.ckpt"
    states = train_on_2.launch(ep=2, until=HALF, save=str(path))
    module = TwoTowers.load_from_checkpoint(path)
    assert_close(module.state_dict(), states[0])


@on_ranks(2)
def train_stock(rank: Rank, path: str) -> None:
    module = TwoTowers()
    strategy = DDPStrategy(find_unused_parameters=True)
    trainer = quiet_trainer(2, strategy=strategy)
    trainer.fit(module, loader(share(batches(HALF), ROWS[2], rank.index)))
    trainer.save_checkpoint(path)


def test_checkpoint_of_stock_ddp_resumes_with_spread_experts(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    train_stock.launch(path=path)
    one, _ = reference(WHOLE)
    for found in train_on_2.launch(ep=2, until=WHOLE, ckpt_path=path):
        assert_close(found, one.module.state_dict())


@on_ranks(2)
def gather_in_fit_and_after(rank: Rank) -> dict[str, object]:
    module = TwoTowers()
    strategy = MoEClipStrategy(expert_parallel_size=2)
    trainer = quiet_trainer(2, strategy=strategy)
    inside: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        assert module.image.moe.w_in.shape[0] == 2
        inside.update({n: v.clone() for n, v in strategy.lightning_module_state_dict().items()})

    module.on_train_end = keep
    trainer.fit(module, loader(share(batches(HALF), ROWS[2], rank.index)))
    return {"inside": inside, "after": strategy.lightning_module_state_dict()}


def test_state_dict_is_whole_on_every_rank_in_fit_and_after() -> None:
    one, _ = reference(HALF)
    for states in gather_in_fit_and_after.launch():
        assert_close(states["inside"], one.module.state_dict())
        assert_close(states["after"], one.module.state_dict())
