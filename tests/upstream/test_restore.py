"""What a run, or a user, gets back from a checkpoint."""

import pickle
import re
from copy import deepcopy
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from lightning_moeclip.binding import Callback, Trainer, pl
from tests.upstream.models import (
    Damper,
    MakeTrainer,
    Planned,
    differences,
    nudged,
    ours,
    rows,
    under_both,
    weights,
)
from tests.upstream.saved import Resumable, Scored, Stops, read

ModelCheckpoint = pl.callbacks.ModelCheckpoint


class Places(Callback):
    """Epoch and step at each stage, by the Trainer and by the module."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def note(self, trainer: Trainer, module: Damper, *_: object) -> None:
        assert (trainer.current_epoch, trainer.global_step) == (module.current_epoch, module.global_step)
        self.seen.append((trainer.current_epoch, trainer.global_step))

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = on_train_end = note


def test_epoch_and_step_go_on_where_the_checkpoint_ended_for_trainer_and_module(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        first, second = Places(), Places()
        trainer = make(callbacks=[first])
        trainer.fit(Resumable())
        trainer.save_checkpoint(path)
        trainer = make(callbacks=[second], max_epochs=2)
        trainer.fit(Resumable(), ckpt_path=path)
        return first.seen, second.seen

    first, second = under_both(script)
    assert first[-1] == (1, 3)
    assert second[0] == (1, 3)
    assert second[-1] == (2, 6)


class Compares(Resumable):
    """Keeps what it holds when a stage begins."""

    def keep(self) -> None:
        trainer = self.trainer
        self.kept = {
            "state_dict": weights(self),
            "optimizer_states": [deepcopy(o.state_dict()) for o in trainer.optimizers],
            "lr_schedulers": [dict(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
            "place": (trainer.current_epoch, trainer.global_step),
        }

    on_train_start = on_test_start = on_predict_start = keep

    def on_validation_start(self) -> None:
        if self.trainer.state.fn == "validate":
            self.keep()


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_each_stage_gets_from_a_checkpoint_what_it_needs(verb: str, tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        trainer = make()
        trainer.fit(Compares())
        trainer.save_checkpoint(path)
        module = nudged(Compares())
        getattr(make(max_epochs=3), verb)(module, ckpt_path=path)
        saved = read(path)
        wanted = {key: saved[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}
        if verb != "fit":
            wanted |= {"optimizer_states": [], "lr_schedulers": []}
        found = dict(module.kept)
        place = found.pop("place")
        assert list(differences(found, wanted)) == []
        return place, found

    assert under_both(script)[0] == ((1, 3) if verb == "fit" else (0, 0))


def test_a_checkpoint_saved_after_fit_counts_whole_epochs(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        trainer = make(max_epochs=2, limit_train_batches=2)
        trainer.fit(Damper())
        trainer.save_checkpoint(path)
        again = make(max_epochs=4, limit_train_batches=2)
        before = again.current_epoch, again.global_step
        again.fit(Damper(), ckpt_path=path)
        stepped = again.fit_loop.epoch_loop._batches_that_stepped
        return read(path)["epoch"], read(path)["global_step"], before, again.current_epoch, again.global_step, stepped

    assert under_both(script) == (2, 4, (0, 0), 4, 8, 8)


def test_a_trainer_that_fits_twice_goes_on_with_its_epochs() -> None:
    def script(make: MakeTrainer) -> Any:
        places = Places()
        trainer = make(max_epochs=2, limit_train_batches=1, callbacks=[places])
        trainer.fit(Damper())
        trainer.fit_loop.max_epochs = 4
        module = Damper()
        trainer.fit(module)
        return places.seen, weights(module)

    assert {epoch for epoch, _ in under_both(script)[0]} == {0, 1, 2, 3, 4}


def test_a_checkpoint_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: nowhere\.ckpt"):
        ours().fit(Damper(), ckpt_path="nowhere.ckpt")


def test_callbacks_get_their_state_back_and_stay_the_objects_that_were_given(tmp_path: Path) -> None:
    class Looks(Callback):
        def on_fit_start(self, trainer: Trainer, module: Scored) -> None:
            best = trainer.checkpoint_callback
            self.seen = {name: deepcopy(getattr(best, name)) for name in KEPT}

    keeps = ModelCheckpoint(tmp_path, monitor="error", save_last=True)
    ours(callbacks=[keeps, Looks()], enable_checkpointing=True).fit(Scored())
    before = {name: deepcopy(getattr(keeps, name)) for name in KEPT}

    new, looks = ModelCheckpoint(tmp_path, monitor="error", save_last=True), Looks()
    trainer = ours(callbacks=[new, looks], enable_checkpointing=True, max_epochs=2)
    with pytest.warns(UserWarning, match="exists and is not empty"):
        trainer.fit(Scored(), ckpt_path=tmp_path / "last.ckpt")

    assert new is trainer.checkpoint_callback is trainer.callbacks[-1]
    assert list(differences(looks.seen, before)) == []


KEPT = ["best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path"]

T = TypeVar("T")


class Parent(Scored, Generic[T]):
    pass


class Child(Parent[int]):
    pass


@pytest.mark.parametrize("kind", [Scored, Child])
def test_load_from_checkpoint_gives_weights_and_hyperparameters_and_can_be_tested(kind: type, tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        folder = tmp_path / make.__name__
        keeps = ModelCheckpoint(folder, monitor="error", save_top_k=-1)
        module = kind(lr=0.05, tag="b")
        trainer = make(callbacks=[keeps], enable_checkpointing=True, max_epochs=2)
        trainer.fit(module)
        last = sorted(folder.glob("*.ckpt"), key=lambda p: read(p)["epoch"])[-1]
        loaded = kind.load_from_checkpoint(last)
        assert loaded.hparams == module.hparams == {"lr": 0.05, "tag": "b"}
        assert list(differences(weights(loaded), weights(module))) == []
        tested = make().test(loaded, verbose=False)
        assert tested == trainer.test(module, verbose=False)
        return tested, sorted(p.name for p in folder.iterdir()), weights(loaded)

    under_both(script)


def test_a_saved_module_predicts_as_it_did_before(tmp_path: Path) -> None:
    module, batch = Damper(), next(iter(rows(1)))
    trainer = ours()
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    loaded = Damper.load_from_checkpoint(tmp_path / "m.ckpt")
    assert torch.equal(loaded.eval()(batch), module.eval()(batch))
    assert not loaded.inner.weight.grad_fn


class Wider(Damper):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.more = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("saved", "loaded", "told"),
    [(Wider, Damper, "Unexpected key"), (Damper, Wider, "Missing key")],
    ids=["more", "fewer"],
)
def test_strict_loading_names_parameters_that_do_not_fit(saved: type, loaded: type, told: str, tmp_path: Path) -> None:
    trainer = ours()
    trainer.fit(saved())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    keys = re.escape('(s) in state_dict: "more.weight", "more.bias"')
    with pytest.raises(RuntimeError, match=told + keys):
        loaded.load_from_checkpoint(tmp_path / "m.ckpt", strict=True)
    with pytest.warns(UserWarning, match=r"Found keys that are .*'more\.weight', 'more\.bias'"):
        lenient = loaded.load_from_checkpoint(tmp_path / "m.ckpt", strict=False)
    assert torch.equal(lenient.inner.weight, trainer.lightning_module.inner.weight)
    with pytest.raises(RuntimeError, match=told + keys):
        ours().test(loaded(), ckpt_path=tmp_path / "m.ckpt", verbose=False)


def test_a_module_may_ask_to_be_loaded_leniently(tmp_path: Path) -> None:
    trainer = ours()
    trainer.fit(Damper())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    module = nudged(Wider())
    module.strict_loading = False
    ours().validate(module, ckpt_path=tmp_path / "m.ckpt", verbose=False)
    assert torch.equal(module.inner.weight, trainer.lightning_module.inner.weight)


def test_a_trained_module_can_be_pickled_and_copied() -> None:
    module = Damper()
    ours().fit(module)
    for copy in (pickle.loads(pickle.dumps(module)), deepcopy(module)):
        assert list(differences(weights(copy), weights(module))) == []
        ours().fit(copy)


def test_going_on_in_the_middle_of_an_epoch_is_a_warning(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        module = Stops()
        module.stop_at = 1
        trainer = make(limit_val_batches=0)
        with pytest.raises(Planned):
            trainer.fit(module)
        trainer.save_checkpoint(path)
        module.stop_at = None
        again = make(max_epochs=2, limit_val_batches=0)
        with pytest.warns(UserWarning, match="resuming from a checkpoint that ended before the epoch ended"):
            again.fit(module, ckpt_path=path)
        return weights(module), again.global_step

    assert under_both(script)[1] == 6


def test_a_run_that_a_user_stopped_goes_on_with_its_next_epoch(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        module = Stops()
        module.stop_at, module.by_error = 1, False
        trainer = make(limit_val_batches=0)
        trainer.fit(module)
        trainer.save_checkpoint(path)
        module.stop_at = None
        again = make(max_epochs=2, limit_val_batches=0)
        again.fit(module, ckpt_path=path)
        return weights(module), trainer.global_step, again.global_step

    assert under_both(script)[1:] == (2, 5)


def test_going_on_after_a_whole_epoch_warns_of_nothing(tmp_path: Path) -> None:
    trainer = ours(limit_val_batches=0)
    trainer.fit(Stops())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    ours(max_epochs=2, limit_val_batches=0).fit(Stops(), ckpt_path=tmp_path / "m.ckpt")  # a warning is an error here
