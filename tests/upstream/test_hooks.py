"""Which hooks are called, in which order and with what: the same as under Lightning's strategy for one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import Callback, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    ByHand,
    Damper,
    Planned,
    ResumableRows,
    differences,
    ours,
    recorded,
    rows,
    stock,
    under_both,
    weights,
)

ModelCheckpoint = pl.callbacks.ModelCheckpoint


class Counting(Callback):
    """A callback with a state, so that it is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"so far": 3}


class StepsByHand(ByHand):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step(lambda: self.on_closure())
        second.step()
        return {"loss": loss}

    def on_closure(self) -> None:
        self.trainer.callbacks[0].on_closure()


class Closures(Counting):
    def __init__(self, log: list[Any]) -> None:
        self.log_ = log

    def on_closure(self) -> None:
        self.log_.append("closure")


def sequence(make: Any, base: type, verb: str, folder: Path, **arguments: Any) -> list[Any]:
    """All calls of hooks of a module and of a callback in one run."""
    log: list[Any] = []
    module = recorded(base, log)()
    callback = recorded(Closures, log, label="callback ")(log)
    keeps = [ModelCheckpoint(folder / make.__name__)] if verb == "fit" else []
    files = arguments.pop("ckpt_path", None)
    trainer = make(callbacks=[callback, *keeps], enable_checkpointing=bool(keeps), **arguments)
    log.clear()  # a Trainer asks for the callback's state_key
    getattr(trainer, verb)(module, **({"verbose": False} if verb in ("validate", "test") else {}), ckpt_path=files)
    return log


def names_of(log: list[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in log]


@pytest.mark.parametrize("base", [Damper, StepsByHand], ids=["automatic", "by hand"])
def test_fit_calls_the_hooks_that_one_device_calls(base: type, tmp_path: Path) -> None:
    log = under_both(lambda make: sequence(make, base, "fit", tmp_path, limit_train_batches=2))
    assert names_of(log).count("on_train_batch_end") == 2
    assert ("closure" in log) == (base is StepsByHand)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_calls_the_hooks_that_one_device_calls(accumulate: int, tmp_path: Path) -> None:
    log = under_both(
        lambda make: sequence(make, Damper, "fit", tmp_path, accumulate_grad_batches=accumulate, max_epochs=2)
    )
    steps = 2 * -(-3 // accumulate)  # the last one of each epoch may be short
    assert names_of(log).count("on_before_optimizer_step") == steps
    assert names_of(log).count("on_after_backward") == 6


def test_one_batch_calls_these_hooks_in_this_order(tmp_path: Path) -> None:
    log = names_of(sequence(ours, Damper, "fit", tmp_path, limit_train_batches=1))
    begin = log.index("callback on_train_batch_start") - 3
    end = log.index("on_train_batch_end") + 1
    assert log[begin:end] == [
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "callback on_train_batch_start",
        "on_train_batch_start",
        "optimizer_step",
        "training_step",
        "forward",
        "callback on_before_zero_grad",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "callback on_before_backward",
        "on_before_backward",
        "backward",
        "callback on_after_backward",
        "on_after_backward",
        "callback on_before_optimizer_step",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "clip_gradients",
        "lr_scheduler_step",
        "callback on_train_batch_end",
        "on_train_batch_end",
    ]


class FromTheMiddle(Damper):
    def train_dataloader(self) -> Any:
        return ResumableRows()


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_steps": 3, "max_epochs": -1}], ids=["epochs", "steps"])
def test_a_resumed_fit_calls_the_hooks_that_one_device_calls(limits: dict[str, int], tmp_path: Path) -> None:
    steps = 2 if "max_epochs" in limits and limits["max_epochs"] > 0 else 1
    known = recorded(Closures, [], label="callback ")([])
    first = ours(max_steps=steps, limit_train_batches=2, limit_val_batches=0, callbacks=[known])
    first.fit(FromTheMiddle())
    first.save_checkpoint(tmp_path / "begun.ckpt")
    settings = {"limit_val_batches": 0, "ckpt_path": tmp_path / "begun.ckpt", **limits}
    if limits["max_epochs"] > 0:
        settings["limit_train_batches"] = 2

    wanted = sequence(stock, FromTheMiddle, "fit", tmp_path, **settings)
    found = sequence(ours, FromTheMiddle, "fit", tmp_path, **settings)

    assert list(differences(found, wanted)) == []
    assert names_of(found).count("on_train_batch_end") == 2
    assert ("callback load_state_dict", [{"so far": 3}], {}) in found


@pytest.mark.parametrize("num_batches", [0, 2])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_calls_the_hooks_that_one_device_calls(verb: str, num_batches: int, tmp_path: Path) -> None:
    limit = {f"limit_{'val' if verb == 'validate' else verb}_batches": num_batches}
    log = under_both(lambda make: sequence(make, Damper, verb, tmp_path, **limit))
    assert names_of(log).count("forward") == num_batches
    assert names_of(log)[-1] == "teardown"
    assert "configure_optimizers" not in names_of(log)


class Loaders(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return rows()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_a_data_module_is_asked_as_on_one_device(verb: str) -> None:
    def script(make: Any) -> list[Any]:
        log: list[Any] = []
        data = recorded(Loaders, log)()
        trainer = make(reload_dataloaders_every_n_epochs=1, max_epochs=2)
        getattr(trainer, verb)(Damper(), datamodule=data)
        return log

    assert names_of(under_both(script))[:2] == ["prepare_data", "setup"]


class Loads(Damper):
    def __init__(self, log: list[Any]) -> None:
        super().__init__()
        self.log_ = log

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.log_.append(("saves", sorted(checkpoint)))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.log_.append(("loads", sorted(set(checkpoint) - {"moeclip"})))


def test_saving_without_a_run_and_load_from_checkpoint_call_the_hooks_of_both(tmp_path: Path) -> None:
    class Stated(Loaders):
        def state_dict(self) -> dict[str, str]:
            return {"at": "row 3"}

        def load_state_dict(self, state: dict[str, str]) -> None:
            self.loaded = state

    def script(make: Any) -> list[Any]:
        log: list[Any] = []
        path = tmp_path / f"{make.__name__}.ckpt"
        data = Stated()
        trainer = make(limit_val_batches=0)
        trainer.fit(Loads(log), datamodule=data)
        trainer.save_checkpoint(path)
        Loads.load_from_checkpoint(path, log=log)
        return [*log, Stated.load_from_checkpoint(path).loaded]

    assert under_both(script)[-1] == {"at": "row 3"}


class OtherNames(Damper):
    def training_step(self, x, number):
        assert x.shape == (2, 4)
        assert isinstance(number, int)
        return self.loss(x)

    def validation_step(self, rows_, number):
        return self.loss(rows_)

    def test_step(self, rows_, number, dataloader_idx):
        assert isinstance(dataloader_idx, int)

    def predict_step(self, rows_, number, dataloader_idx):
        return self(rows_)

    def test_dataloader(self):
        return [rows(2), rows(2)]

    predict_dataloader = test_dataloader


def test_hooks_may_name_their_arguments_as_they_like() -> None:
    module = OtherNames()
    trainer = ours(fast_dev_run=2)
    trainer.fit(module)
    trainer.test(module)
    predicted = trainer.predict(module)
    assert [len(of_one_loader) for of_one_loader in predicted] == [2, 2]


class Frozen(Damper):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(2, 2).eval().requires_grad_(False)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        modes = (self.inner.training, self.fixed.training, self.inner.weight.requires_grad, torch.is_grad_enabled())
        self.seen.append((str(self.trainer.state.stage.value), *modes))
        return super().forward(x)


def test_each_part_keeps_its_mode_of_training_through_all_stages() -> None:
    def script(make: Any) -> Any:
        module = Frozen()
        trainer = make(val_check_interval=1, limit_val_batches=1)
        with pytest.warns(UserWarning, match="1 module\\(s\\) in eval mode at the start of training"):
            trainer.fit(module)
        for verb in (trainer.validate, trainer.test, trainer.predict):
            verb(module)
        return module.seen, module.inner.training, module.fixed.training

    seen, is_training, fixed_is_training = under_both(script)
    assert (is_training, fixed_is_training) == (True, False)
    assert ("train", True, False, True, True) in seen
    assert ("test", False, False, True, False) in seen


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_before_zero_grad_comes_once_a_step_and_never_in_a_test(num_steps: int) -> None:
    log: list[Any] = []
    module = recorded(Damper, log, names=["on_before_zero_grad"])()
    trainer = ours(max_steps=num_steps, max_epochs=2)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    assert len(log) == num_steps


class Bundle:
    """A batch of the user's own type."""

    def __init__(self, samples: Tensor) -> None:
        self.samples, self.moves = samples, 0

    def to(self, device: torch.device, **_: Any) -> "Bundle":
        self.samples, self.moves = self.samples.to(device), self.moves + 1
        return self


class OfBundles(Damper):
    def on_after_batch_transfer(self, batch: Bundle, dataloader_idx: int) -> Bundle:
        assert batch.moves == 1
        batch.samples = batch.samples * 2
        return batch

    def training_step(self, batch: Bundle, batch_idx: int) -> Tensor:
        assert batch.samples.device == self.device
        return self.loss(batch.samples)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            rows().dataset, batch_size=2, collate_fn=lambda items: Bundle(torch.stack(items))
        )


def test_a_batch_of_the_users_own_type_is_moved_once_and_may_be_changed_afterwards() -> None:
    def script(make: Any) -> Any:
        module = OfBundles()
        make(limit_val_batches=0).fit(module)
        return weights(module)

    under_both(script)


@on_ranks(2)
def spied_fit(rank: Rank, folder: str) -> list[Any]:
    log: list[Any] = []
    module = recorded(OfBundles, log)()
    ours(2, limit_val_batches=0).fit(module)
    return log


def test_two_ranks_call_the_hooks_of_one_device_each(tmp_path: Path) -> None:
    log: list[Any] = []
    stock(limit_val_batches=0).fit(recorded(OfBundles, log)())
    prepares = log.index(("prepare_data", [], {}))
    for rank, found in enumerate(spied_fit.launch(folder=str(tmp_path))):
        if rank > 0:  # on the first rank of a node alone, as with stock DDP
            found.insert(prepares, ("prepare_data", [], {}))
        assert list(differences(found, log)) == []


STAGES = [
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "validation_step",
    "on_train_start",
    "training_step",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
]


@pytest.mark.parametrize("place", STAGES)
def test_an_error_in_a_hook_is_the_users_own_and_leaves_as_on_one_device(place: str, tmp_path: Path) -> None:
    def raises(self: Any, *args: Any, **kwargs: Any) -> None:
        raise Planned(place)

    broken = type("Broken", (Damper,), {place: raises})

    def script(make: Any) -> Any:
        log: list[Any] = []
        module = recorded(broken, log)()
        callback = recorded(Counting, log, label="callback ")()
        trainer = make(
            callbacks=[callback, ModelCheckpoint(tmp_path / make.__name__)],
            enable_checkpointing=True,
            limit_train_batches=1,
        )
        with pytest.raises(Planned, match=place):
            trainer.fit(module)
        return log, str(trainer.state.status), trainer.global_step, trainer.interrupted

    log, status, _, _ = under_both(script)
    assert names_of(log)[-1] in ("callback on_exception", "callback teardown", "teardown")
    assert status.endswith(("INTERRUPTED", "interrupted"))


@pytest.mark.parametrize("place", ["training_step", "on_after_backward", "validation_step"])
def test_a_module_trains_again_after_an_error(place: str) -> None:
    class Once(Damper):
        is_broken = True

    def raises(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_broken:
            self.is_broken = False
            raise Planned(place)
        return getattr(Damper, place)(self, *args, **kwargs)

    once = type("Once", (Once,), {place: raises})

    def script(make: Any) -> Any:
        module = once()
        trainer = make()
        with pytest.raises(Planned):
            trainer.fit(module)
        module.train()  # an error in validation leaves it in evaluation
        trainer = make(max_epochs=2)
        trainer.fit(module)
        hooks = [len(p._post_accumulate_grad_hooks or {}) for p in module.parameters()]
        return weights(module), hooks

    assert under_both(script)[1] == [0, 0, 0, 0]
