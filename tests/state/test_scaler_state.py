"""The loss scale and its counters are saved, resumed, also from a stock run, and rolled back (case 25)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule, MixedPrecision
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

DIM, HALF = 4, 4
OVERFLOWS = {1: 1, 6: 0}  # rank by step of the run


class Net(LightningModule):
    """A dense layer that computes in float16, with dropout and a scheduler; gradients overflow in given batches."""

    def __init__(self, overflows: dict[int, int], *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(dropout), nn.Linear(DIM, 1))
        self.overflows = overflows
        self.seen: list[tuple[Any, ...]] = []
        self.at_start: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).float().square().mean()
        self.losses = [float(loss.detach())]
        return loss

    def on_train_start(self) -> None:
        self.at_start = self.trainer.precision_plugin.state_dict()

    def on_after_backward(self) -> None:
        if self.overflows.get(self.trainer.fit_loop.total_batch_idx) == self.global_rank:
            self.layers[0].weight.grad[0, 0] = torch.inf

    def look(self) -> None:
        """Losses, weights, moments, learning rates and the scaler's state of a step."""
        optimizers = self.trainer.optimizers
        moments = [t.flatten() for o in optimizers for s in o.state.values() for t in s.values()]
        weights = torch.cat([p.detach().flatten() for p in self.parameters()])
        self.seen.append(
            (
                *self.losses,
                *(group["lr"] for o in optimizers for group in o.param_groups),
                weights.numpy().tobytes(),
                torch.cat(moments).numpy().tobytes() if moments else b"",
                plain(self.trainer.precision_plugin.state_dict()),
            )
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class InTurns(Net):
    """Manual optimization with two optimizers, after which the scale is decided upon at the next backward only."""

    def __init__(self, overflows: dict[int, int], **arguments: Any) -> None:
        super().__init__(overflows, **arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.AdamW(self.layers[place].parameters(), lr=1e-2) for place in (0, 2)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.9) for o in optimizers]


def plain(state: Any) -> Any:
    """The same with lists in place of tensors, for comparison; NaN, of what was not counted yet, becomes None."""
    if isinstance(state, Tensor):
        return [None if value != value else value for value in state.flatten().tolist()]
    return {key: plain(value) for key, value in state.items()} if isinstance(state, dict) else state


def batches(rank: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, DIM, generator=generator) for _ in range(number)]


def precision(*, growth_interval: int = 3) -> MoEClipPrecision:
    return MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0, growth_interval=growth_interval)


class Look(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        pl_module.look()


@on_ranks(2)
def fit(rank: Rank, epochs: int, ckpt_path: str | None = None, save: str | None = None) -> Net:
    module = Net(OVERFLOWS)
    trainer = quiet_trainer(2, plugins=[precision()], max_epochs=epochs, callbacks=[Look()])
    trainer.fit(module, loader(batches(rank.index, HALF)), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    module.trainer = None
    return module


def test_scale_and_counters_are_saved_and_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole, first = fit.launch(epochs=2), fit.launch(epochs=1, save=path)
    saved = torch.load(path, weights_only=False)["MoEClipPrecision"]
    assert (saved["scale"], saved["_growth_tracker"]) == (128.0, 2)
    assert (saved["regions"]["num_steps"], saved["regions"]["num_overflows"].tolist()) == (HALF, [1.0])
    for rank, module in enumerate(fit.launch(epochs=2, ckpt_path=path)):
        assert plain(module.at_start) == plain(saved)
        assert first[rank].seen + module.seen == whole[rank].seen
        assert [step[-1]["scale"] for step in whole[rank].seen] == [256, 128, 128, 128, 256, 256, 128, 128]
        assert whole[rank].seen[-1][-1]["regions"]["num_overflows"] == [2.0]


@on_ranks(2)
def stock_fit(rank: Rank, save: str) -> dict[str, Any]:
    module = Net({})
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    trainer = quiet_trainer(2, strategy="ddp", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer.fit(module, loader(batches(rank.index, HALF)))
    trainer.save_checkpoint(save)
    return module.at_start


def test_run_goes_on_from_the_scale_of_a_stock_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "stock.ckpt")
    stock_fit.launch(save=path)
    saved = torch.load(path, weights_only=False)["MixedPrecision"]
    assert (saved["scale"], saved["_growth_tracker"]) == (128.0, 1)
    for module in fit.launch(epochs=2, ckpt_path=path):
        assert {**module.at_start, "regions": None} == {**saved, "regions": None}
        # two more clean steps and it has grown; step 6 of the run overflows, counted from its own first step
        assert [step[-1]["scale"] for step in module.seen] == [128.0, 256.0, 128.0, 128.0]
        assert module.seen[-1][-1]["regions"]["num_steps"] == HALF


def test_settings_of_a_stock_scaler_are_taken_over() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5, growth_factor=4.0, backoff_factor=0.25)
    ours = MoEClipStrategy(precision_plugin=MixedPrecision("16-mixed", "cpu", scaler)).precision_plugin.scaler
    assert (ours.get_scale(), ours.get_growth_interval()) == (64.0, 5)
    assert (ours.get_growth_factor(), ours.get_backoff_factor()) == (4.0, 0.25)


class RollBack(Callback):
    """Takes a snapshot after the third step and goes back to it after every four more, the last of them unseen.

    Nobody asks for the scaler's state between that one and the way back, so what it has found is still undecided.
    """

    def __init__(self) -> None:
        self.snapshot: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        is_last = batch_idx > 2 and batch_idx % 4 == 2
        if not is_last:
            pl_module.look()
        if batch_idx == 2:
            self.snapshot = copy.deepcopy(
                {
                    "module": pl_module.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
                    "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
                }
            )
            self.snapshot["precision"] = trainer.precision_plugin.state_dict()
            self.snapshot["rng"] = torch.get_rng_state()
            pl_module.at_start = plain(self.snapshot["precision"])
        elif is_last:
            pl_module.load_state_dict(self.snapshot["module"])
            for optimizer, state in zip(trainer.optimizers, self.snapshot["optimizers"], strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))  # torch would alias it
            for config, state in zip(trainer.lr_scheduler_configs, self.snapshot["schedulers"], strict=True):
                config.scheduler.load_state_dict(state)
            trainer.precision_plugin.load_state_dict(self.snapshot["precision"])
            torch.set_rng_state(self.snapshot["rng"])
            assert plain(self.snapshot["precision"]) == pl_module.at_start, "the snapshot itself"
            assert plain(trainer.precision_plugin.state_dict()) == pl_module.at_start


@on_ranks(2)
def roll_back(rank: Rank, kind: type[Net]) -> list[tuple[Any, ...]]:
    data = batches(rank.index, 7)
    # in the second step; in the second of each replay, the third, and the unseen one before the way back
    overflows = {1: 0, **{start + 1: 1 for start in (3, 7, 11)}, **{start + 2: 0 for start in (3, 7, 11)}}
    module = kind({**overflows, **{start + 3: 1 for start in (3, 7, 11)}}, dropout=0.3)
    torch.manual_seed(rank.index)
    trainer = quiet_trainer(2, plugins=[precision(growth_interval=2)], callbacks=[RollBack()])
    trainer.fit(module, loader([*data[:3], *(data[3:] * 3)]))
    return module.seen


@pytest.mark.parametrize("kind", [Net, InTurns])
def test_case_25_replay_after_a_roll_back_is_bit_equal_twice(kind: type[Net]) -> None:
    for seen in roll_back.launch(kind=kind):
        assert len(seen) == 12
        assert seen[3:6] == seen[6:9] == seen[9:12]
        assert [step[-1]["scale"] for step in seen[:6]] == [256.0, 128.0, 128.0, 256.0, 128.0, 64.0]
        assert len({step[0] for step in seen[3:6]}) == 3
        assert seen[5][-1]["regions"]["num_overflows"] == [3.0]
