"""A step that would ruin the run is held on all ranks, and the run goes back bit by bit."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moeclip.binding import Trainer, pl
from lightning_moeclip.callbacks.cosine_rollback import CosineRollback
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.rolled_back import Faulty, Spy, differing
from tests.models import batches, loader, quiet_trainer, share

ROWS = {1: (6,), 2: (4, 2)}


def watch(**arguments: Any) -> CosineRollback:
    """One for which every cosine of a tiny model is good enough."""
    return CosineRollback(**{"good": -0.9, "low": -0.95, "snapshot_every_n_steps": 4, **arguments})


def train(rank: Rank, module: pl.LightningModule, data: list, *callbacks: pl.Callback, **arguments: Any) -> Trainer:
    warnings.simplefilter("ignore", UserWarning)
    trainer = quiet_trainer(rank.world_size, callbacks=list(callbacks), **arguments)
    trainer.fit(module, loader(share(data, ROWS[rank.world_size], rank.index)))
    return trainer


def told(rollback: CosineRollback) -> list[tuple[int, str, int | None]]:
    return [(record.step, record.action, record.restored_step) for record in rollback.history]


def twice_back() -> list[tuple[Tensor, Tensor]]:
    """A snapshot after batch 3; batches 6 and 7 are to be faulty; then 4 and 5 come once more."""
    data = batches(8, num_rows=6)
    return data + data[4:6]


def assert_went_back_twice(spy: Spy) -> None:
    """Restored twice, and what followed was as it had been the first time."""
    for first, again in ((4, 7), (4, 8), (5, 9), (6, 10)):
        assert not differing(spy.after[first], spy.after[again]), (first, again)
        assert spy.remembered[first] == spy.remembered[again]
    assert spy.remembered[4] != spy.remembered[5]
    assert [spy.has_gradients[step] for step in (6, 7, 8, 9)] == [True, False, False, True]
    changed = differing(spy.after[4], spy.after[5])
    for kind in ("module image.stem.weight", "optimizer 0 0.0 exp_avg", "torch", "scheduler", "optimizer 0 group 0 lr"):
        assert kind in changed, kind  # the test would see it


@on_ranks(2)
def test_nan_loss_on_rank_1_takes_all_ranks_back_to_the_same_bits(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    train(rank, Faulty(nan_loss=(6, 7), rank=1), twice_back(), rollback, spy)
    assert told(rollback) == [(6, "rolled back", 4), (7, "rolled back", 4)]
    assert [(r.epoch, r.batch_idx) for r in rollback.history] == [(0, 6), (0, 7)]
    assert "loss nan" in rollback.history[0].reason
    assert_went_back_twice(spy)


@on_ranks(2)
def test_replay_is_bit_equal_with_spread_experts_accumulation_and_averages(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    data = [part for batch in twice_back() for part in (batch, batch)]
    average = pl.callbacks.EMAWeightAveraging(decay=0.5)
    train(
        rank,
        Faulty(nan_gradient=(6, 7), rank=0),
        data,
        average,
        rollback,
        spy,
        strategy=MoEClipStrategy(expert_parallel_size=2),
        accumulate_grad_batches=2,
    )
    assert told(rollback) == [(6, "rolled back", 4), (7, "rolled back", 4)]
    assert_went_back_twice(spy)
    assert any(name.startswith("average") for name in differing(spy.after[4], spy.after[5]))


@on_ranks(2)
def test_replay_is_bit_equal_under_a_loss_scaler(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0, growth_interval=5)
    train(rank, Faulty(nan_loss=(6, 7), rank=1), twice_back(), rollback, spy, plugins=[precision])
    assert told(rollback) == [(6, "rolled back", 4), (7, "rolled back", 4)]
    assert_went_back_twice(spy)
    assert spy.after[5]["scaler"] != spy.after[4]["scaler"]


@on_ranks(2)
def test_overflow_under_a_loss_scaler_is_the_scalers_and_not_kept(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
    train(rank, Faulty(nan_gradient=(3,), rank=1), batches(6, num_rows=6), rollback, spy, plugins=[precision])
    assert rollback.history == []
    assert not [n for n in differing(spy.after[3], spy.after[4]) if n.startswith("module")]
    assert (spy.snapshots[4], spy.snapshots[5]) == ((), (5,))


@on_ranks(2)
def test_watching_changes_no_bit(rank: Rank) -> None:
    spies = []
    for callbacks in ((), (watch(),)):
        spies.append(Spy())
        torch.manual_seed(5)
        train(rank, Faulty(), batches(7, num_rows=6), *callbacks, spies[-1])
    assert len(spies[0].after) == 7
    for step, found in spies[0].after.items():
        assert not differing(found, spies[1].after[step]), step


@on_ranks(2)
def test_nan_gradient_on_a_step_that_is_not_logged_leaves_the_parameters(rank: Rank) -> None:
    rollback, spy = watch(snapshot_every_n_steps=100), Spy()
    train(rank, Faulty(nan_gradient=(2,), rank=1), batches(4, num_rows=6), rollback, spy, log_every_n_steps=50)
    assert told(rollback) == [(2, "skipped", None)]
    assert rollback.num_rollbacks == 1
    changed = differing(spy.after[2], spy.after[3])
    assert not [n for n in changed if n.startswith("module") or "exp_avg" in n]
    assert "scheduler" in changed


@on_ranks(2)
def test_no_snapshot_ends_the_run_where_that_was_asked_for(rank: Rank) -> None:
    rollback = watch(on_no_snapshot="raise")
    with pytest.raises(RuntimeError, match=r"no snapshot to go back to at step 2 .*\n.*\nWrite on_no_snapshot='skip"):
        train(rank, Faulty(nan_loss=(2,), rank=1), batches(4, num_rows=6), rollback)


@on_ranks(2)
def test_fourth_fault_in_a_row_ends_the_run_on_all_ranks_with_the_history(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    with pytest.raises(RuntimeError) as caught:
        train(rank, Faulty(nan_loss=(5, 6, 7, 8), rank=1), batches(10, num_rows=6), rollback, spy)
    message = str(caught.value)
    assert message.startswith("CosineRollback gives up after 3 rollbacks without 64 healthy steps and a new ")
    assert "at step 8 (epoch 0, batch 8)" in message
    for step in (5, 6, 7):
        assert f"step {step} (epoch 0, batch {step}): loss nan" in message
    assert message.count("rolled back to step 4") == 3
    assert not differing(spy.after[4], spy.after[8])


@on_ranks(1)
def test_no_rollback_at_all_may_be_asked_for(rank: Rank) -> None:
    with pytest.raises(RuntimeError, match=r"gives up after 0 rollbacks.*\n  nothing before\n"):
        train(rank, Faulty(nan_loss=(5,)), batches(10, num_rows=6), watch(max_rollbacks=0))


@on_ranks(2)
def test_healthy_snapshots_survive_a_nan_at_the_step_of_a_new_one(rank: Rank) -> None:
    rollback, spy = watch(snapshot_every_n_steps=10), Spy()
    train(rank, Faulty(nan_gradient=(39,), rank=1), batches(43, num_rows=6), rollback, spy)
    assert told(rollback) == [(39, "rolled back", 30)]
    assert spy.snapshots[39] == spy.snapshots[40] == (20, 30)
    assert spy.snapshots[41] == (30, 41)  # the one that was due at 40, of a healthy step


@on_ranks(2)
def resumed(rank: Rank, folder: str) -> None:
    rollback, again = watch(), watch()
    path = Path(folder) / "last.ckpt"
    train(rank, Faulty(nan_loss=(5, 6), rank=1), batches(8, num_rows=6), rollback).save_checkpoint(path)
    module = Faulty(nan_loss=(9, 11), rank=1)
    rows = share(batches(8, num_rows=6), ROWS[2], rank.index)
    with pytest.raises(RuntimeError, match=r"gives up after 3 rollbacks without .* at step 11") as caught:
        quiet_trainer(2, callbacks=[again], max_epochs=2).fit(module, loader(rows), ckpt_path=path)
    assert again.history[:2] == rollback.history
    assert told(again)[2:] == [(9, "skipped", None)]
    assert "step 5 (epoch 0, batch 5)" in str(caught.value)


def test_history_and_count_survive_a_checkpoint(tmp_path: Path) -> None:
    resumed.launch(folder=str(tmp_path))


@on_ranks(2, timeout_s=100)
def test_gradient_of_a_million_times_rolls_back_and_later_ones_are_skipped_while_it_cools(rank: Rank) -> None:
    spikes = (90, 91, 95, 110)
    rollback, spy = watch(snapshot_every_n_steps=20), Spy()
    train(rank, Million(spikes, rank=1), batches(112, num_rows=6), rollback, spy)
    skipped = [(91, "skipped", None), (95, "skipped", None)]
    assert told(rollback) == [(90, "rolled back", 80), *skipped, (110, "rolled back", 100)]
    assert "gradient norm" in rollback.history[0].reason
    assert rollback.num_rollbacks == 2
    assert not differing(spy.after[80], spy.after[91])
    assert not [n for n in differing(spy.after[91], spy.after[92]) if n.startswith("module")]


class Million(Faulty):
    """Gradients of one rank are a million times as large at some steps."""

    def __init__(self, steps: tuple[int, ...], *, rank: int) -> None:
        super().__init__(rank=rank)
        self.steps = steps

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(1e6 * loss if self.is_at(self.steps) else loss, *args, **kwargs)


class TwoOptimizers(Faulty):
    """Manual optimization, one optimizer per tower."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        # global_step counts the steps of both
        self.manual_backward(self.compute_loss(batch))
        for optimizer in optimizers:
            optimizer.step()

    @override
    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        rest = [*self.text.parameters(), *self.loss.parameters()]
        return [torch.optim.AdamW(p, lr=self.lr) for p in (list(self.image.parameters()), rest)]


@on_ranks(2)
def test_two_optimizers_act_once_and_go_back_together(rank: Rank) -> None:
    rollback, spy = watch(), Spy()
    # the text tower is stepped second: the image tower has stepped when its NaN is seen
    train(rank, TwoOptimizers(nan_gradient=(6,), rank=1), batches(5, num_rows=6), rollback, spy)
    assert told(rollback) == [(7, "rolled back", 4)]
    assert not differing(spy.after[4], spy.after[8])
    assert (spy.has_gradients[6], spy.has_gradients[8]) == (True, False)
    assert "module image.stem.weight" in differing(spy.after[4], spy.after[6])


class HandsIn(Faulty):
    """A loss that the package does not know."""

    def __init__(self, rollback: CosineRollback) -> None:
        super().__init__(has_own_moe=False)
        self.rollback = [rollback]  # no module, and none of this module's attributes

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features = self.image(batch[0]), self.text(batch[1])
        halves = [(features[0] - features[1]).square().mean(), features[0].square().mean() + features[1].sum()]
        self.rollback[0].hand_in(*(torch.autograd.grad(half, features, retain_graph=True) for half in halves))
        return halves[0] + halves[1]


@on_ranks(2)
def test_cotangents_that_are_handed_in_are_the_cosine_over_all_ranks(rank: Rank) -> None:
    rollback = watch()
    data = batches(1, num_rows=6)
    module = HandsIn(rollback)
    expected = []
    for batch in share(data, ROWS[2], 0) + share(data, ROWS[2], 1):
        features = module.image(module.dropout.eval()(batch[0])), module.text(batch[1])
        halves = [(features[0] - features[1]).square().mean(), features[0].square().mean() + features[1].sum()]
        grads = [torch.autograd.grad(half, features, retain_graph=True) for half in halves]
        expected.append([torch.cat([g.flatten() for g in grad]) for grad in grads])
    a, b = (torch.cat(parts) for parts in zip(*expected, strict=True))
    trainer = train(rank, module, data, rollback, log_every_n_steps=1)
    cosine = trainer.callback_metrics["tower_cosine/direction"].item()
    assert cosine == pytest.approx(torch.cosine_similarity(a, b, 0).item(), rel=1e-6)


class NoLoss(Faulty):
    """A rank gives no loss at some steps."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.is_at(self.spikes) else loss


@on_ranks(2)
def test_rank_without_a_loss_is_no_finding_and_teaches_nothing(rank: Rank) -> None:
    rollback = watch()
    train(rank, NoLoss(spikes=(2,), rank=1), batches(5, num_rows=6), rollback)
    assert rollback.history == []
    assert len(rollback._monitors[0].state().loss.recent) == 4


@on_ranks(1)
def test_batch_without_a_loss_on_one_process_teaches_nothing(rank: Rank) -> None:
    rollback = watch()
    train(rank, NoLoss(spikes=(2,)), batches(5, num_rows=6), rollback)
    assert rollback.history == []
    assert len(rollback._monitors[0].state().loss.recent) == 4


class Kept(pl.loggers.CSVLogger):
    """Keeps what it is given in memory."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.kept: dict[int, dict[str, float]] = {}

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.kept.setdefault(step, {}).update(metrics)


@on_ranks(2)
def logged_numbers(rank: Rank, folder: str) -> None:
    loggers = [Kept(folder), Kept(folder)]
    rollback = watch()
    trainer = train(
        rank, Faulty(nan_loss=(2,), rank=1), batches(4, num_rows=6), rollback, logger=loggers, log_every_n_steps=2
    )
    names = {"tower_cosine/direction", "rollback/count", "rollback/skipped"}
    assert names <= trainer.callback_metrics.keys()
    for logger in loggers:
        found = {step: names & metrics.keys() for step, metrics in logger.kept.items()}
        assert found == ({1: names, 3: names} if rank.index == 0 else {})
        if rank.index == 0:
            assert logger.kept[1]["rollback/count"] == 0
            assert logger.kept[3]["rollback/count"] == logger.kept[3]["rollback/skipped"] == 1
            assert -1 <= logger.kept[3]["tower_cosine/direction"] <= 1


def test_numbers_go_to_every_logger_at_the_steps_that_are_logged(tmp_path: Path) -> None:
    logged_numbers.launch(folder=str(tmp_path))


@on_ranks(1)
def test_fast_dev_run_runs(rank: Rank) -> None:
    rollback = watch()
    train(rank, Faulty(), batches(2, num_rows=6), rollback, fast_dev_run=True)
    assert rollback.history == []


@on_ranks(2)
def test_one_warning_per_event_on_rank_0(rank: Rank) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(2, callbacks=[watch()])
        trainer.fit(Faulty(nan_loss=(5,), rank=1), loader(share(batches(7, num_rows=6), ROWS[2], rank.index)))
    ours = [str(w.message) for w in caught if "CosineRollback" in str(w.message)]
    expected = r"CosineRollback, step 5 \(epoch 0, batch 5\): loss nan and .*; rolled back to step 4"
    assert len(ours) == (1 if rank.index == 0 else 0), ours
    assert all(re.fullmatch(expected, message) for message in ours), ours


class Plain(pl.LightningModule):
    """No loss of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1).double()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(1)
def test_a_loss_without_directions_is_told_of_once_and_watched_all_the_same(rank: Rank) -> None:
    with pytest.warns(UserWarning, match="no loss tells of its directions. Use ContrastiveLoss") as caught:
        quiet_trainer(1, callbacks=[watch()]).fit(Plain(), loader(batches(5, num_rows=6)))
    assert len([w for w in caught if "directions" in str(w.message)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, r"window=1 has no variance.*Use window=5"),
        ({"window": -3}, r"window=-3 has no variance"),
        ({"patience": 0}, r"patience=0 must lie between 1 and window=5 steps. Use patience=3"),
        ({"patience": 6}, r"patience=6 must lie between 1 and window=5"),
        ({"low": 0.8}, r"low=0.8 and good=0.75 must be cosines with low < good.*Use low=0.55, good=0.75"),
        ({"good": 1.5}, r"good=1.5 must be cosines"),
        ({"variance": 0.0}, r"variance=0.0 must be above 0.*Use variance=0.02"),
        ({"variance": -1.0}, r"variance=-1.0 must be above 0"),
        ({"max_rollbacks": -1}, r"max_rollbacks=-1 must be 0 or more. Use max_rollbacks=3"),
        ({"snapshot_every_n_steps": 0}, r"snapshot_every_n_steps=0 must be an integer from 1. Use .*=100"),
        ({"on_no_snapshot": "stop"}, r"on_no_snapshot='stop' is no such choice. Use 'skip_step' or 'raise'"),
        ({"window": 5.0}, r"window=5.0 must be an integer. The default is 5"),
        ({"patience": True}, r"patience=True must be an integer. The default is 3"),
        ({"max_rollbacks": 3.0}, r"max_rollbacks=3.0 must be an integer. The default is 3"),
        ({"max_rollbacks": None}, r"max_rollbacks=None must be an integer"),
        ({"snapshot_every_n_steps": "9"}, r"snapshot_every_n_steps='9' must be an integer from 1"),
        ({"max_snapshot_bytes": 1e9}, r"max_snapshot_bytes=1000000000.0 must be an integer. None takes a share"),
        ({"max_snapshot_bytes": 0}, r"max_snapshot_bytes=0 leaves no room .* or None"),
    ],
)
def test_value_out_of_range_says_what_to_write(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CosineRollback(**arguments)


@on_ranks(2)
def test_snapshot_larger_than_allowed_ends_the_run_on_all_ranks_with_the_number_to_write(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"max_bytes=1,000 allows less. Write CosineRollback\(max_snapshot_bytes="):
        train(rank, Faulty(), batches(6, num_rows=6), watch(max_snapshot_bytes=1000))


@on_ranks(1)
def test_two_of_them_and_another_strategy_are_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"holds 2 of CosineRollback: both would act on one step. Give one"):
        train(rank, Faulty(), batches(1, num_rows=6), watch(), watch())
    with pytest.raises(TypeError, match=r"Write Trainer\(strategy=MoEClipStrategy\(\), callbacks=\[CosineRollback\(\)"):
        train(rank, Faulty(), batches(1, num_rows=6), watch(), strategy="auto")


def test_cotangents_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"their shapes are \[\[2, 3\]\] and \[\[3, 2\]\]. Give torch.autograd.grad"):
        watch().hand_in(torch.zeros(2, 3), torch.zeros(3, 2))
