"""A snapshot brings back the whole state of training, bit by bit, and stays as it is (case 24)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.modules import MoE
from lightning_moeclip.state.snapshot import LiveState, SnapshotRing, live_state
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import NUM_EXPERTS, TwoTowers, batches, loader, quiet_trainer, share
from tests.state.timeline import Net, Schedule, Timeline, bits

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD with momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=0.05, foreach=False),
    "AdamW with foreach": lambda p: AdamW(p, lr=0.05, foreach=True, amsgrad=True),
    "fused AdamW": lambda p: AdamW(p, lr=0.05, fused=True),
    "AdamW with a tensor as lr": lambda p: AdamW(p, lr=torch.tensor(0.05), foreach=False),
    "Adagrad, whose state is there before the first step": lambda p: Adagrad(p, lr=0.05),
    "LBFGS, whose state holds lists of tensors": lambda p: LBFGS(p, lr=0.05, max_iter=2),
    "two groups": lambda p: AdamW([{"params": p[:2], "lr": 0.01}, {"params": p[2:], "weight_decay": 0.0}]),
}
SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=20),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.7),
}


def live_of(run: Timeline, **arguments: Any) -> LiveState:
    return live_state(run.module, [run.optimizer], schedulers=run.schedulers, **arguments)


def check_goes_back(run: Timeline, live: Callable[[], LiveState], look: Callable[[], Any], *, first: int = 3) -> None:
    """Two steps after a snapshot are taken again from it, twice."""
    ring = SnapshotRing(max_bytes=2**20)
    for index in range(first):
        run.step(index)
    ring.take(live(), step=first)
    at_snapshot, run.losses = look(), []
    timelines = []
    for _ in range(3):
        run.step(first)
        run.step(first + 1)
        timelines.append((look(), run.losses))
        assert timelines[-1][0] != at_snapshot
        assert ring.restore(live()) == first
        assert look() == at_snapshot
        run.losses = []
    assert timelines[1] == timelines[0]
    assert timelines[2] == timelines[0]


@pytest.mark.parametrize("first", [3, 0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_twice_it_is_bit_equal_and_so_is_the_replay_with_optimizer(name: str, first: int) -> None:
    run = Timeline(OPTIMIZERS[name])
    check_goes_back(run, lambda: live_of(run), run.bits, first=first)


@pytest.mark.parametrize("name", SCHEDULES)
def test_restored_twice_it_is_bit_equal_and_so_is_the_replay_with_schedule(name: str) -> None:
    run = Timeline(OPTIMIZERS["fused AdamW"], schedule=SCHEDULES[name])
    check_goes_back(run, lambda: live_of(run), run.bits)


def test_one_live_state_serves_the_whole_run() -> None:
    run = Timeline(OPTIMIZERS["AdamW"])
    live = live_of(run)
    check_goes_back(run, lambda: live, run.bits)


def test_parameters_and_optimizer_state_keep_their_storages() -> None:
    run = Timeline(OPTIMIZERS["AdamW with a tensor as lr"])
    ring = SnapshotRing(max_bytes=2**20)
    run.step(0)
    ring.take(live_of(run), step=1)
    run.step(1)
    lr, before, entry = run.optimizer.param_groups[0]["lr"], run.storages(), next(iter(run.optimizer.state.values()))
    lr.fill_(7.0)
    ring.restore(live_of(run))
    assert run.storages() == before
    assert run.optimizer.param_groups[0]["lr"] is lr
    assert next(iter(run.optimizer.state.values())) is entry
    assert lr.item() == pytest.approx(0.05)
    assert run.module.last.weight is run.module.first.weight


def test_optimizer_state_that_has_vanished_is_made_again() -> None:
    run = Timeline(OPTIMIZERS["LBFGS, whose state holds lists of tensors"])
    ring = SnapshotRing(max_bytes=2**20)
    run.step(0)
    ring.take(live_of(run), step=1)
    kept = run.bits()
    run.step(1)
    after = run.bits()
    run.optimizer.state.clear()
    ring.restore(live_of(run))
    assert run.bits() == kept
    run.step(1)
    assert run.bits() == after


def test_hyper_parameters_and_state_that_were_added_or_changed_go_back() -> None:
    run = Timeline(OPTIMIZERS["two groups"])
    ring = SnapshotRing(max_bytes=2**20)
    run.step(0)
    ring.take(live_of(run), step=0)
    kept = run.bits()
    run.optimizer.param_groups[0] |= {"lr": 9.0, "note": "mine"}
    run.optimizer.param_groups[1]["betas"] = (0.0, 0.1)
    state = run.optimizer.state[run.module.scale]
    state |= {"exp_avg": torch.ones(3), "note": torch.ones(2)}
    ring.restore(live_of(run))
    assert run.bits() == kept


def test_tied_parameters_are_kept_once() -> None:
    tensors = live_of(Timeline(OPTIMIZERS["AdamW"])).tensors
    assert "parameters/first.weight" in tensors
    assert "parameters/last.weight" not in tensors


def test_averaged_weights_go_back() -> None:
    run = Timeline(OPTIMIZERS["AdamW"])
    average = AveragedModel(run.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def look() -> Any:
        return bits(dict(average.state_dict()))

    def step(index: int) -> None:
        Timeline.step(run, index)
        average.update_parameters(run.module)

    run.step = step  # type: ignore[method-assign]
    check_goes_back(run, lambda: live_of(run, averages={"ema": average}), lambda: (run.bits(), look()))


def test_parameters_that_only_the_optimizer_has_go_back() -> None:
    own = nn.Parameter(torch.ones(3))
    run = Timeline(lambda p: SGD([*p, own], lr=0.1))
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(live_of(run), step=0)
    with torch.no_grad():
        own.add_(1)
    ring.restore(live_of(run))
    assert own.tolist() == [1.0, 1.0, 1.0]


class Scaled(Timeline):
    """float16 with a loss scale that grows every second step and falls at step 4."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["fused AdamW"])
        self.precision = MoEClipPrecision("16-mixed", device="cpu", growth_interval=2)

    def step(self, index: int) -> None:
        scaler = self.precision.scaler
        assert scaler is not None
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.loss(index)
        scaler.scale(loss).backward()
        if index == 4:
            self.module.scale.grad.fill_(torch.inf)
        scaler.step(self.optimizer)
        scaler.update()

    def bits(self) -> Any:
        return super().bits(), bits(self.precision.state_dict())


@pytest.mark.parametrize("first", [4, 0])
def test_the_loss_scale_and_its_counters_go_back(first: int) -> None:
    run = Scaled()
    check_goes_back(run, lambda: live_of(run, precision=run.precision), run.bits, first=first)


@pytest.mark.parametrize("first", [3, 0])
def test_float32_masters_and_their_parameters_go_back_together(first: int) -> None:
    run = Timeline(lambda p: AdamW(p, lr=1e-3), module=Net(dtype=torch.bfloat16))
    masters = MasterWeights()
    masters.cover([run.optimizer])
    check_goes_back(run, lambda: live_of(run), run.bits, first=first)
    for master in run.optimizer.param_groups[0]["params"]:
        assert master.dtype is torch.float32
        assert torch.equal(master.to(torch.bfloat16), master.model_parameter)


def test_an_edit_of_a_master_before_the_snapshot_reaches_its_parameter_after_a_restore_too() -> None:
    run = Timeline(lambda p: SGD(p, lr=1e-3), module=Net(dtype=torch.bfloat16))
    MasterWeights().cover([run.optimizer])
    with torch.no_grad():
        for master in run.optimizer.param_groups[0]["params"]:
            master.add_(1.0)
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(live_of(run), step=0)
    run.step(0)
    after = run.bits()
    ring.restore(live_of(run))
    run.step(0)
    assert run.bits() == after
    assert run.module.scale.item() > 1.4


def test_the_running_means_of_the_dense_router_go_back() -> None:
    torch.manual_seed(0)
    layer = MoE(4, 6, 3, top_k=1, router_gradient="dense")
    optimizer = SGD(layer.parameters(), lr=0.1)
    ring = SnapshotRing(max_bytes=2**20)
    x = torch.randn(5, 4)

    def step() -> Any:
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return bits(dict(layer.state_dict()))

    step()
    ring.take(live_state(layer, [optimizer]), step=0)
    after = step(), step()
    ring.restore(live_state(layer, [optimizer]))
    assert (step(), step()) == after


class ThereAndBack(Callback):
    """Takes a snapshot after batch 1, and after batch 3 goes back to it."""

    def __init__(self) -> None:
        self.ring = SnapshotRing(max_bytes=2**20)
        self.seen: list[Any] = []
        self.rows: set[int] = set()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        live = live_state(
            pl_module,
            trainer.optimizers,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            precision=trainer.precision_plugin,
        )
        self.seen.append(bits([dict(pl_module.named_parameters()), trainer.optimizers[0].state_dict()]))
        if batch_idx == 1:
            self.ring.take(live, step=trainer.global_step)
            self.rows = {len(t) for name, t in live.tensors.items() if name.endswith("w_in")}
        if batch_idx == 3:
            self.ring.restore(live)


@on_ranks(2)
def test_spread_experts_go_back_on_each_rank(rank: Rank) -> None:
    data = share(batches(4), (5, 3), rank.index)
    callback = ThereAndBack()
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2), callbacks=[callback])
    trainer.fit(TwoTowers(), loader([*data, data[2], data[3]]))
    assert callback.rows == {NUM_EXPERTS // 2}
    assert callback.seen[4:6] == callback.seen[2:4]
    assert callback.seen[2] != callback.seen[3]
