"""Runs of two ranks that go the same way under Lightning's ``ddp`` and under our strategy."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_moeclip.binding import Callback, Trainer, pl
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    ResumableRows,
    nudged,
    recorded,
    rows,
    weights,
)
from tests.upstream.test_logging import Keeps

callbacks = pl.callbacks


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


def watched(make: MakeTrainer, folder: Path, **settings: Any) -> Any:
    class Watches(Shared):
        """Sees gradients where a user may: after each backward, and before they are dropped."""

        def on_after_backward(self) -> None:
            self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.on_after_backward()

    module, trainer = Watches(), make(limit_val_batches=0, max_epochs=2, **settings)
    trainer.fit(module)
    return left_by(trainer, module)


def watched_in_parts(make: MakeTrainer, folder: Path) -> Any:
    return watched(make, folder, accumulate_grad_batches=3)


def changed(make: MakeTrainer, folder: Path) -> Any:
    class Changes(Shared):
        """Changes gradients in place, puts new ones in their place, and drops one."""

        def on_after_backward(self) -> None:
            self.outer.weight.grad.mul_(2)
            self.outer.bias.grad = self.outer.bias.grad + 1
            self.inner.bias.grad = None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    module, trainer = Changes(), make(limit_val_batches=0, accumulate_grad_batches=2)
    trainer.fit(module)
    return left_by(trainer, module)


def fitted_again(make: MakeTrainer, folder: Path) -> Any:
    module, trainer, left = Shared(), make(), []
    for epochs in (2, 3):
        trainer.fit(module)
        left.append(left_by(trainer, module))
        trainer.test(module, verbose=False)
        trainer.fit_loop.max_epochs = epochs
    return left


def added_up(make: MakeTrainer, folder: Path) -> Any:
    class Adds(Shared):
        """Drops gradients in every second batch, and fills them with zeros."""

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad(set_to_none=False)

    module, trainer = Adds(), make(limit_val_batches=0)
    trainer.fit(module)
    return left_by(trainer, module)


def two_backwards(make: MakeTrainer, folder: Path) -> Any:
    class Twice(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            for rows_ in (batch, batch + 1):
                self.manual_backward(self.loss(rows_))
                self.seen.append([p.grad.clone() for p in self.parameters()])
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module, trainer = Twice(), make(limit_val_batches=0)
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
    *(watched, watched_in_parts, changed, fitted_again, added_up, two_backwards),
]
