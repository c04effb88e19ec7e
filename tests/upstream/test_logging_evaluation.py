"""What evaluation logs, and what loggers and the progress bar get."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import Callback, Trainer, pl
from tests.upstream.logged import Keeps, fitted, kept
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    Planned,
    ours,
    rows,
    under_both,
)


class Evaluated(Damper):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("a", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("a2", 2)
        return {"loss": loss}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("b", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("c", loss, sync_dist=True)
        self.log("d", loss, on_step=True, on_epoch=False, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("g/h/i", torch.tensor(2.0), on_epoch=True, prog_bar=True, sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("t", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)

    def on_test_epoch_end(self) -> None:
        self.log("u", 3.0, sync_dist=True)


def test_validation_logs_steps_for_loggers_and_epochs_for_callbacks() -> None:
    found = fitted(Evaluated, max_epochs=2)
    assert set(found["logged"]) == {"a_step", "a_epoch", "a2", "b_step", "b_epoch", "c", "d", "g/h/i"}
    assert set(found["callback"]) == {"a", "a_step", "a_epoch", "a2", "b", "b_epoch", "c", "g/h/i"}
    assert found["bar"] == {"g/h/i": 2.0}
    losses = [Damper().loss(batch) for batch in rows(2, seed=1)]
    assert found["callback"]["b"] == found["callback"]["b_epoch"] == found["callback"]["c"]
    assert found["callback"]["b"] != torch.stack(losses).mean()  # it has learned


def test_a_test_returns_what_its_epochs_logged() -> None:
    def script(make: MakeTrainer) -> Any:
        module, trainer = Evaluated(), make()
        tested = trainer.test(module, verbose=False)
        validated = trainer.validate(module, verbose=False)
        return tested, validated, kept(trainer)

    (tested,), (validated,), _ = under_both(script)
    assert set(tested) == {"t_epoch", "u"}
    assert set(validated) == {"b_epoch", "c", "g/h/i"}
    losses = [Damper().loss(batch).item() for batch in rows(2, seed=2)]
    assert tested["t_epoch"] == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_values_of_several_loaders_are_kept_apart(num_loaders: int) -> None:
    class Several(Damper):
        def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("error", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)
            self.log("same", 7.0, sync_dist=True)
            self.log(f"own {dataloader_idx}", dataloader_idx + 1.0, add_dataloader_idx=False, sync_dist=True)

        def on_test_epoch_end(self) -> None:
            self.log("all", 9.0, sync_dist=True)

        def test_dataloader(self) -> Any:
            return [rows(2, seed=i) for i in range(num_loaders)]

    def script(make: MakeTrainer) -> Any:
        return make().test(Several(), verbose=False)

    results = under_both(script)
    assert len(results) == num_loaders
    for i, result in enumerate(results):
        suffix = f"/dataloader_idx_{i}" if num_loaders > 1 else ""
        assert set(result) == {f"error_epoch{suffix}", f"same{suffix}", f"own {i}", "all"}
        assert result[f"own {i}"] == i + 1


@pytest.mark.parametrize("interval", [0.5, 1.0])
def test_each_validation_starts_its_means_anew(interval: float) -> None:
    class Numbers(Damper):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("train", (1.0 + batch_idx) * 10**self.current_epoch, on_epoch=True, on_step=True, sync_dist=True)
            return self.loss(batch)

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val", (1.0 + batch_idx) * (1 + dataloader_idx) * 10**self.current_epoch, sync_dist=True)

        def on_validation_end(self) -> None:
            self.seen.append({k: v.item() for k, v in self.trainer.callback_metrics.items() if "val" in k})

        def train_dataloader(self) -> Any:
            return rows(4)

        def val_dataloader(self) -> Any:
            return [rows(3), rows(3)]

    def script(make: MakeTrainer) -> Any:
        module = Numbers()
        trainer = make(max_epochs=2, val_check_interval=interval, num_sanity_val_steps=0)
        trainer.fit(module)
        return module.seen, kept(trainer)

    seen, found = under_both(script)
    assert seen[-1] == {"val/dataloader_idx_0": 20.0, "val/dataloader_idx_1": 40.0}
    assert len(seen) == 2 / interval
    assert found["callback"]["train_epoch"] == 25.0


def test_loggers_get_steps_and_epochs_at_the_right_step() -> None:
    class Logs(Damper):
        def on_train_start(self) -> None:
            self.log("start", 123.0, sync_dist=True)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("foo", 0.0, on_step=True, on_epoch=True, sync_dist=True)
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        logger = Keeps()
        make(logger=logger, max_epochs=2, limit_train_batches=2, limit_val_batches=0).fit(Logs())
        return logger.written, logger.states

    written, states = under_both(script)
    numbers = [entry for entry in written if entry[0] != "hyperparameters"]
    assert numbers == [
        ({"foo_step": 0.0, "epoch": 0}, 0),
        ({"foo_step": 0.0, "epoch": 0}, 1),
        ({"start": 123.0, "foo_epoch": 0.0, "epoch": 0}, 1),
        ({"foo_step": 0.0, "epoch": 1}, 2),
        ({"foo_step": 0.0, "epoch": 1}, 3),
        ({"foo_epoch": 0.0, "epoch": 1}, 3),
    ]
    assert states == ["success"]


@pytest.mark.parametrize("num_loaders", [1, 2])
def test_steps_of_evaluation_are_counted_through_all_epochs(num_loaders: int) -> None:
    class Logs(Damper):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            name = f"val {self.trainer.state.fn.value}"
            self.log(name, float(batch_idx), on_step=True, on_epoch=False, sync_dist=True)

        def val_dataloader(self) -> Any:
            return [rows(3) for _ in range(num_loaders)]

    def script(make: MakeTrainer) -> Any:
        logger, module = Keeps(), Logs()
        trainer = make(logger=logger, max_epochs=2, limit_train_batches=1)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        return [entry for entry in logger.written if entry[0] != "hyperparameters"]

    written = under_both(script)
    assert [step for _, step in written][: 3 * num_loaders] == [*range(3)] * num_loaders


@pytest.mark.parametrize("num_loggers", [0, 1, 2])
def test_a_module_finds_its_loggers_and_places_through_the_trainer(num_loggers: int) -> None:
    class Looks(Damper):
        def on_train_start(self) -> None:
            self.seen = (self.loggers, self.logger, self.global_rank, self.local_rank, self.current_epoch)

    module, loggers = Looks(), [Keeps() for _ in range(num_loggers)]
    assert module.loggers == []
    ours(logger=loggers).fit(module)
    assert module.seen == (loggers, loggers[0] if loggers else None, 0, 0, 0)


@pytest.mark.parametrize("error", [None, Planned])
def test_loggers_are_finalized_after_every_stage_and_told_of_a_failure(error: type | None) -> None:
    class Fails(Damper):
        def on_train_end(self) -> None:
            if error:
                raise error

    def script(make: MakeTrainer) -> Any:
        logger, module = Keeps(), Fails()
        trainer = make(logger=logger)
        if error:
            with pytest.raises(error):
                trainer.fit(module)
        else:
            for verb in (trainer.fit, trainer.test, trainer.validate, trainer.predict):
                verb(module)
        return logger.states

    assert under_both(script) == (["failed"] if error else ["success"] * 4)


def test_a_logger_is_not_written_to_before_the_ranks_are_known() -> None:
    class Asks(Callback):
        def setup(self, trainer: Trainer, module: Damper, stage: str) -> None:
            assert trainer.logger.written == []
            assert torch.distributed.is_initialized()

        def on_train_start(self, trainer: Trainer, module: Damper) -> None:
            assert trainer.logger.written[0][0] == "hyperparameters"

    class Hyper(Damper):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr=lr)
            self.save_hyperparameters()

    ours(logger=Keeps(), callbacks=[Asks()]).fit(Hyper())


def test_epoch_is_the_users_name_when_the_user_logs_it() -> None:
    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("epoch", -1.0 * batch_idx)
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        trainer = make(logger=Keeps(), limit_val_batches=0)
        trainer.fit(Logs())
        return kept(trainer)["logged"]

    assert under_both(script) == {"epoch": -2.0}


def test_metrics_of_a_reserved_name_in_the_bar_are_warned_of() -> None:
    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("v_num", loss, prog_bar=True)
            return loss

    trainer = ours(enable_progress_bar=True, logger=Keeps())
    with pytest.warns(UserWarning, match="The progress bar already tracks a metric with the .* 'v_num'"):
        trainer.fit(Logs())


def test_the_bar_holds_what_epochs_logged_when_training_ends() -> None:
    class Reads(pl.callbacks.TQDMProgressBar):
        def on_train_end(self, trainer: Trainer, module: Damper) -> None:
            super().on_train_end(trainer, module)
            self.read = dict(self.get_metrics(trainer, module))

    class Logs(Damper):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("foo", float(self.current_epoch), on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.log("bar", float(self.current_epoch), prog_bar=True, reduce_fx="sum", sync_dist=True)

    bar = Reads()
    ours(callbacks=[bar], enable_progress_bar=True, max_epochs=2, limit_val_batches=0).fit(Logs())
    assert bar.read == {"foo": 1.0, "bar": 1.0}
