"""Two ranks under Lightning's ``ddp`` and under our strategy: the same calls, numbers and bits.

A mean of two float32 gradients is exact in either order of its sum and its division, so nothing is left to tolerate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_moeclip.binding import Callback, DDPStrategy, Trainer, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    ResumableRows,
    differences,
    nudged,
    ours,
    recorded,
    rows,
    weights,
)
from tests.upstream.test_logging import Keeps

callbacks = pl.callbacks


def ddp(**arguments: Any) -> Trainer:
    """The Trainer of ``ours`` under Lightning's own strategy for ranks."""
    trainer = ours(2, **arguments)
    stock = Trainer(**{**QUIET, "devices": 2, "strategy": "ddp", **arguments})
    assert type(stock.strategy) is DDPStrategy
    assert stock.world_size == trainer.world_size
    return stock


QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
}


class Shared(Damper):
    """Each rank has every second batch; gradients and places are written down."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.mean = MeanMetric()

    def own(self, num_batches: int, seed: int) -> DataLoader:
        rank = self.trainer.global_rank
        return DataLoader(list(rows(2 * num_batches, seed=seed))[rank::2], batch_size=None)

    def train_dataloader(self) -> Any:
        return self.own(5, 0)

    def val_dataloader(self) -> Any:
        return self.own(2, 1)

    def test_dataloader(self) -> Any:
        return self.own(2, 2)

    def predict_dataloader(self) -> Any:
        return self.own(2, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("own", loss)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.mean(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append([p.grad.clone() for p in self.parameters()])


def left_by(trainer: Trainer, module: Damper) -> dict[str, Any]:
    return {
        "weights": weights(module),
        "seen": module.seen,
        "metrics": dict(trainer.callback_metrics),
        "place": (trainer.global_step, trainer.current_epoch),
        "loops": trainer.fit_loop.state_dict(),
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "hooks": [len(p._post_accumulate_grad_hooks or {}) for p in module.parameters()],
    }


def fit(make: MakeTrainer, folder: Path, **settings: Any) -> Any:
    module = Shared()
    trainer = make(max_epochs=2, **settings)
    trainer.fit(module)
    return left_by(trainer, module)


def clipped(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def accumulated(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, accumulate_grad_batches=2, val_check_interval=2)


def cut_short(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, max_steps=7, limit_val_batches=1, num_sanity_val_steps=0)


def hooks(make: MakeTrainer, folder: Path) -> Any:
    log: list[Any] = []
    module = recorded(Shared, log)()
    callback = recorded(Callback, log, label="callback ")()
    keeps = callbacks.ModelCheckpoint(folder, monitor="val", save_last=True)
    make(callbacks=[callback, keeps], enable_checkpointing=True, accumulate_grad_batches=2).fit(module)
    return [entry for entry in log if entry[0] != "callback state_key"], sorted(p.name for p in folder.iterdir())


def stages(make: MakeTrainer, folder: Path) -> Any:
    module, logger = Shared(), Keeps()
    trainer = make(logger=logger, callbacks=[callbacks.LearningRateMonitor()])
    trainer.fit(module)
    tested = trainer.test(module, verbose=False)
    validated = trainer.validate(module, verbose=False)
    predicted = trainer.predict(module)
    return tested, validated, predicted, weights(module), logger.written, logger.states


def sampled(make: MakeTrainer, folder: Path) -> Any:
    class Sampled(Damper):
        seen: list[Any]

        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            return batch

        def train_dataloader(self) -> Any:
            return DataLoader(torch.cat(list(rows(5))), batch_size=2, shuffle=True)

        predict_dataloader = test_dataloader = train_dataloader

    module = Sampled()
    module.seen = []
    trainer = make(use_distributed_sampler=True, max_epochs=2)
    trainer.fit(module)
    return left_by(trainer, module), trainer.predict(module), trainer.num_training_batches


def resumed(make: MakeTrainer, folder: Path) -> Any:
    class Resumable(Shared):
        def train_dataloader(self) -> Any:
            return ResumableRows(4, seed=self.trainer.global_rank)

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    module = Resumable()
    make(callbacks=[Saves()]).fit(module)
    again = nudged(Resumable())
    trainer = make(max_epochs=2)
    trainer.fit(again, ckpt_path=folder / "2.ckpt")
    saved = torch.load(folder / "2.ckpt", weights_only=False)
    assert sorted(p.name for p in folder.iterdir()) == [f"{n}.ckpt" for n in range(1, 5)]
    return left_by(trainer, again), {k: v for k, v in saved.items() if k != "moeclip"}


def stopped(make: MakeTrainer, folder: Path) -> Any:
    class Worse(Shared):
        def on_validation_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch + self.global_rank), sync_dist=True)

    stops = callbacks.EarlyStopping(monitor="score", patience=1)
    module, trainer = Worse(), make(callbacks=[stops], max_epochs=6, num_sanity_val_steps=0)
    trainer.fit(module)
    return trainer.current_epoch, stops.stopped_epoch, stops.best_score, weights(module)


def by_hand(make: MakeTrainer, folder: Path) -> Any:
    class Manual(ByHand, Shared):
        def configure_optimizers(self) -> Any:
            return ByHand.configure_optimizers(self)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(self.loss(batch))
            self.seen.append([p.grad.clone() for p in self.parameters()])
            first.step()
            if batch_idx % 2:
                second.step()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    module, trainer = Manual(), make(limit_val_batches=0)
    trainer.fit(module)
    return left_by(trainer, module)


def averaged(make: MakeTrainer, folder: Path) -> Any:
    module = Shared()
    make(callbacks=[callbacks.WeightAveraging()], max_epochs=2).fit(module)
    return weights(module)


def scheduled(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, callbacks=[callbacks.GradientAccumulationScheduler(scheduling={1: 2})])


def buffers(make: MakeTrainer, folder: Path) -> Any:
    class Counts(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def on_train_batch_end(self, *args: object) -> None:
            self.total += 1 + self.global_rank

    module, trainer = Counts(), make()
    trainer.fit(module)
    path = folder / "m.ckpt"
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False)["state_dict"]


def line_search(make: MakeTrainer, folder: Path) -> Any:
    class Searches(Shared):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass  # comes before the closure has run

    module, trainer = Searches(), make()
    trainer.fit(module)
    return left_by(trainer, module)


def own_backward(make: MakeTrainer, folder: Path) -> Any:
    class Backward(Shared):
        def backward(self, loss: Tensor) -> None:
            (2 * loss).backward()

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    module, trainer = Backward(), make(max_epochs=2)
    trainer.fit(module)
    return left_by(trainer, module)


def gathered(make: MakeTrainer, folder: Path) -> Any:
    class Gathers(Shared):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            every = self.all_gather(self(batch), sync_grads=True)  # [ranks, rows, 2]
            return (every.flatten(0, 1) @ every.flatten(0, 1).T).logsumexp(-1).mean()

    module, trainer = Gathers(), make(limit_val_batches=0)
    trainer.fit(module)
    return left_by(trainer, module)


def half(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, precision="bf16-mixed")["weights"]


def double(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, precision="64-true")


def overfitted(make: MakeTrainer, folder: Path) -> Any:
    return fit(make, folder, overfit_batches=2, reload_dataloaders_every_n_epochs=1, detect_anomaly=True)


def asked_to_stop(make: MakeTrainer, folder: Path) -> Any:
    class Stops(Shared):
        def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 1

    module, trainer = Stops(), make(max_epochs=4, min_steps=3)
    trainer.fit(module)
    return left_by(trainer, module)


SCRIPTS = [
    *(fit, clipped, accumulated, cut_short, hooks, stages, sampled, resumed, stopped, by_hand, averaged, scheduled),
    *(buffers, line_search, own_backward, gathered, half, double, overfitted, asked_to_stop),
]


@on_ranks(2)
def compare(rank: Rank, folder: str, names: list[str]) -> dict[str, list[str]]:
    """Where the strategies differ, by script."""
    found = {}
    for script in SCRIPTS:
        if script.__name__ in names:
            results = []
            for make in (ddp, lambda **arguments: ours(2, **arguments)):
                place = Path(folder) / f"{script.__name__} {len(results)}"
                place.mkdir(exist_ok=True)
                torch.manual_seed(0)
                results.append(script(make, place))
            found[script.__name__] = list(differences(results[1], results[0]))
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    names = [script.__name__ for script in SCRIPTS]
    return compare.launch(folder=str(tmp_path_factory.mktemp("two_ranks")), names=names)


@pytest.mark.parametrize("name", [script.__name__ for script in SCRIPTS])
def test_two_ranks_do_what_they_do_under_stock_ddp(name: str, compared: list[dict[str, list[str]]]) -> None:
    for of_rank in compared:
        assert of_rank[name] == []
