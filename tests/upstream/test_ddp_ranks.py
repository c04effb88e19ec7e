"""What Lightning promises of DDP on a CPU, of two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_moeclip.binding import (
    Callback,
    LightningModule,
    Trainer,
    pl,
)
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    ROWS,
    Damper,
    Idle,
    Planned,
    differences,
    nudged,
    ours,
    rows,
    stock,
    weights,
)

ModelCheckpoint = pl.callbacks.ModelCheckpoint


class Scores(Damper):
    """Logs its errors over all ranks."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("error", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_error", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_error", self.loss(batch), sync_dist=True)


def mine(rank: Rank, num_batches: int = 4) -> DataLoader:
    """Every second batch of ``rows``."""
    return DataLoader(list(rows(num_batches))[rank.index :: rank.world_size], batch_size=None)


@on_ranks(2)
def all_stages(rank: Rank) -> dict[str, Any]:
    module = nudged(Scores()) if rank.index else Scores()  # the first rank's weights are those of all
    trainer = ours(2, max_epochs=2, precision="64-true")
    trainer.fit(module, mine(rank), mine(rank))
    found = {"weights": weights(module), "fit": {k: v.clone() for k, v in trainer.callback_metrics.items()}}
    assert trainer.world_size == 2
    assert trainer.global_rank == module.global_rank == rank.index
    assert trainer.is_global_zero == (rank.index == 0)
    assert module.device == torch.device("cpu")
    found["validate"] = trainer.validate(module, mine(rank), verbose=False)
    found["test"] = trainer.test(module, mine(rank), verbose=False)
    found["predict"] = trainer.predict(module, mine(rank))
    found["after"] = weights(module)
    return found


def test_two_ranks_fit_validate_test_and_predict_together() -> None:
    one = Scores().double()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for lr in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        for pair in torch.stack(list(rows(4))).double().split(2):
            optimizer.zero_grad()
            one.loss(pair.flatten(0, 1)).backward()
            optimizer.step()
    wanted = one.loss(torch.cat(list(rows(4))).double()).item()

    first, second = all_stages.launch()

    assert list(differences(second["weights"], first["weights"])) == []
    for name, value in one.state_dict().items():
        assert (first["weights"][name] - value).abs().max() < 1e-12, name
    for key, stage in (("val_error", "validate"), ("test_error", "test")):
        assert first[stage] == second[stage]
        assert first[stage][0][key] == pytest.approx(wanted, rel=1e-6)
    assert first["fit"]["val_error"] == pytest.approx(wanted, rel=1e-6)
    for found in (first, second):
        assert list(differences(found["after"], found["weights"])) == []
        assert [p.shape for p in found["predict"]] == [(ROWS, 2)] * 2


@on_ranks(2)
def talk(rank: Rank) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Talks(Damper):
        def on_train_start(self) -> None:
            strategy, own = self.trainer.strategy, torch.tensor(1.0 + rank.index)
            for op in ("mean", "sum", "avg", dist.ReduceOp.MAX):
                found[str(op)] = strategy.reduce(own.clone(), reduce_op=op).item()
            found["kept"] = strategy.reduce("text")
            found["broadcast"] = strategy.broadcast({"from": rank.index}, src=1)
            found["gathered"] = self.all_gather({"a": own, "b": [own * 10]})
            own.requires_grad_()
            total = (self.all_gather(own, sync_grads=True) * torch.tensor([3.0, 5.0])).sum()
            (found["gradient"],) = torch.autograd.grad(total * (1 + rank.index), own)
            found["all"] = strategy.reduce_boolean_decision(rank.index == 0)
            found["any"] = strategy.reduce_boolean_decision(rank.index == 0, all=False)
            strategy.barrier("here")
            found["sampler"] = strategy.distributed_sampler_kwargs
            found["distributed"] = strategy.is_distributed

    ours(2).fit(Talks(), mine(rank), mine(rank))
    return found


def test_reduce_broadcast_gather_and_decisions_are_those_of_lightning() -> None:
    for rank, found in enumerate(talk.launch()):
        assert (found["mean"], found["avg"], found["sum"], found[str(dist.ReduceOp.MAX)]) == (1.5, 1.5, 3.0, 2.0)
        assert found["kept"] == "text"
        assert found["broadcast"] == {"from": 1}
        assert found["gathered"]["a"].tolist() == [1.0, 2.0]
        assert found["gathered"]["b"][0].tolist() == [10.0, 20.0]
        # the factor of a rank's own entry, times the losses 1 and 2 of both ranks
        assert found["gradient"].item() == [3.0, 5.0][rank] * (1 + 2)
        assert (found["all"], found["any"]) == (False, True)
        assert found["sampler"] == {"num_replicas": 2, "rank": rank}
        assert found["distributed"]


@on_ranks(2)
def sampled(rank: Rank) -> dict[str, Any]:
    class Sees(Damper):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, list[Tensor]] = {}

        def loss(self, batch: Tensor) -> Tensor:
            stage = "sanity" if self.trainer.sanity_checking else self.trainer.state.stage.value
            self.seen.setdefault(f"{stage}{self.current_epoch}", []).append(batch)
            return super().loss(batch)

    module = Sees()
    trainer = ours(2, use_distributed_sampler=True, max_epochs=2)
    trainer.fit(module)
    sampler = trainer.train_dataloader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert isinstance(trainer.val_dataloaders.sampler, DistributedSampler)
    # Lightning shuffles what it samples for training, also where the loader did not
    assert (sampler.shuffle, trainer.val_dataloaders.sampler.shuffle) == (True, False)
    return {stage: torch.cat(batches) for stage, batches in module.seen.items()}


def test_samplers_are_injected_and_share_out_the_rows() -> None:
    first, second = sampled.launch()
    for stage, wanted in (("train0", rows()), ("train1", rows()), ("validate1", rows(2, seed=1))):
        pairs = torch.stack([first[stage], second[stage]], dim=1).flatten(0, 1)
        whole = torch.cat(list(wanted))
        assert sorted(pairs.tolist()) == sorted(whole.tolist()), stage


class Decides(Scores):
    """Its score gets worse on one rank before it does on the other."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        worse_from = 1 if self.global_rank == 0 else 4
        self.log("score", float(self.current_epoch >= worse_from), sync_dist=self.averages)

    averages = True


@on_ranks(2)
def stop_early(rank: Rank) -> tuple[int, int, int]:
    module = Decides()
    stops = pl.callbacks.EarlyStopping(monitor="score", patience=2, mode="min")
    trainer = ours(2, callbacks=[stops], max_epochs=9, num_sanity_val_steps=0)
    trainer.fit(module, mine(rank), mine(rank))
    trainer.strategy.barrier()
    return trainer.current_epoch, trainer.global_step, stops.stopped_epoch


def test_early_stopping_ends_all_ranks_after_the_same_epoch() -> None:
    first, second = stop_early.launch()
    assert first == second == (3, 6, 2)  # the mean is worse from epoch 1 on


@on_ranks(2)
def stop_one(rank: Rank) -> tuple[int, int]:
    class Stops(Scores):
        def on_train_batch_end(self, *args: object) -> None:
            if self.current_epoch == 1:
                self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(rank.index == 1, all=False)

    trainer = ours(2, max_epochs=5)
    trainer.fit(Stops(), mine(rank), mine(rank))
    return trainer.current_epoch, trainer.global_step


def test_a_stop_that_ranks_agree_on_ends_both() -> None:
    assert stop_one.launch() == [(2, 3), (2, 3)]


@on_ranks(2)
def shard_an_optimizer(rank: Rank, folder: str) -> tuple[Any, Any, bool]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns where it is imported

    class Sharded(Damper):
        def configure_optimizers(self) -> Any:
            return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=self.lr)

    module = Sharded()
    trainer = ours(2)
    trainer.fit(module, mine(rank), mine(rank))
    trainer.save_checkpoint(f"{folder}/m.ckpt")
    plain = Damper()
    plain.configure_optimizers = lambda: torch.optim.Adam(plain.parameters(), lr=plain.lr)
    ours(2).fit(plain, mine(rank), mine(rank))
    return weights(module), weights(plain), trainer.is_global_zero


def test_an_optimizer_that_shards_its_state_trains_as_a_plain_one_and_is_saved_whole(tmp_path: Path) -> None:
    for sharded, plain, _ in shard_an_optimizer.launch(folder=str(tmp_path)):
        assert list(differences(sharded, plain)) == []
        saved = torch.load(tmp_path / "m.ckpt", weights_only=False)
        assert list(differences(saved["state_dict"], sharded)) == []
        assert len(saved["optimizer_states"][0]["state"]) == len(sharded)


@on_ranks(2)
def idle_layer(rank: Rank) -> Any:
    module = Idle()
    ours(2).fit(module, mine(rank), mine(rank))
    return weights(module)


def test_a_layer_without_gradient_is_no_error_on_two_ranks() -> None:
    found = idle_layer.launch()
    assert list(differences(found[1], found[0])) == []
    assert torch.equal(found[0]["idle.weight"], Idle().idle.weight)
    assert not torch.equal(found[0]["inner.weight"], Idle().inner.weight)


@on_ranks(2)
def save_the_best(rank: Rank, folder: str) -> tuple[list[str], str, int]:
    keeps = ModelCheckpoint(folder, monitor="val_error", save_top_k=2, filename="{epoch}")
    trainer = ours(2, callbacks=[keeps], enable_checkpointing=True, max_epochs=3)
    trainer.fit(Scores(), mine(rank), mine(rank))
    trainer.test(ckpt_path="best", dataloaders=mine(rank), verbose=False)
    return sorted(Path(p).name for p in keeps.best_k_models), Path(keeps.best_model_path).name, len(os.listdir(folder))


def test_ranks_agree_on_the_best_checkpoints(tmp_path: Path) -> None:
    first, second = save_the_best.launch(folder=str(tmp_path))
    assert first == second
    assert first[0] == sorted(os.listdir(tmp_path))
    assert first[2] == 2


class FailsOnOne(Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_rank == 1:
            raise Planned("on the second rank")

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self.told.append(str(exception))


@on_ranks(2)
def fail_on_one(rank: Rank) -> None:
    ours(2, callbacks=[FailsOnOne()]).fit(Scores(), mine(rank), mine(rank))


def test_an_error_on_one_rank_ends_both_with_it() -> None:
    with pytest.raises(AssertionError) as caught:
        fail_on_one.launch()
    assert "Planned: on the second rank" in caught.value.failures[1]
    assert "on the second rank" in caught.value.failures[0]


def test_stock_and_ours_are_told_apart() -> None:
    assert type(ours().strategy) is MoEClipStrategy
    assert not isinstance(stock().strategy, MoEClipStrategy)
