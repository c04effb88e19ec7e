"""What checkpoints hold, where they go, and runs that are broken off anywhere."""

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_moeclip.binding import Callback, Trainer, fabric, pl
from lightning_moeclip.testing import Rank, on_ranks
from tests.upstream.models import (
    ByHand,
    Damper,
    MakeTrainer,
    Planned,
    ResumableRows,
    differences,
    nudged,
    ours,
    rows,
    stock,
    under_both,
    weights,
)
from tests.upstream.saved import Resumable, Scored, Stops, read

OWN_KEY = "moeclip"


ModelCheckpoint = pl.callbacks.ModelCheckpoint


class Saves(Callback):
    """Saves after every step; has no state and no opinion about its folder, unlike ``ModelCheckpoint``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.last = folder, 0

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step != self.last:
            self.last = trainer.global_step
            trainer.save_checkpoint(self.folder / f"step={self.last}.ckpt")


def without_names(saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without what names this run: our own entry, and the paths of its callbacks."""
    return {key: value for key, value in saved.items() if key not in (OWN_KEY, "callbacks")}


@pytest.mark.parametrize("kind", [Resumable, Damper, Scored])
def test_a_checkpoint_holds_what_that_of_one_device_holds(kind: type, tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        trainer = make(max_epochs=2)
        trainer.fit(kind())
        trainer.save_checkpoint(tmp_path / "m.ckpt")
        return without_names(read(tmp_path / "m.ckpt"))

    found = under_both(script)
    assert set(found) >= {"epoch", "global_step", "loops", "state_dict", "optimizer_states", "lr_schedulers"}
    assert read(tmp_path / "m.ckpt")[OWN_KEY] == {"expert_parallel_size": 1, "optimizer_parameters": {}}


def test_weights_only_leaves_out_optimizers_loops_and_callbacks(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        trainer = make()
        trainer.fit(Resumable())
        trainer.save_checkpoint(tmp_path / "m.ckpt", weights_only=True)
        module = nudged(Resumable())
        make().test(module, ckpt_path=tmp_path / "m.ckpt", verbose=False)
        assert list(differences(weights(module), read(tmp_path / "m.ckpt")["state_dict"])) == []
        with pytest.raises(KeyError, match="checkpoint contains only the model"):
            make(max_epochs=2).fit(module, ckpt_path=tmp_path / "m.ckpt")
        return without_names(read(tmp_path / "m.ckpt"))

    found = under_both(script)
    assert not set(found) & {"optimizer_states", "lr_schedulers", "callbacks"}


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_run_saved_anywhere_ends_as_the_one_without_a_break(step: int, tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        folder = tmp_path / make.__name__
        whole = Resumable()
        make(max_epochs=2, callbacks=[Saves(folder)]).fit(whole)
        broken = nudged(Resumable())
        make(max_epochs=2).fit(broken, ckpt_path=folder / f"step={step}.ckpt")
        assert list(differences(weights(broken), weights(whole))) == []
        return weights(whole), without_names(read(folder / f"step={step}.ckpt"))

    under_both(script)


@pytest.mark.parametrize("first", [stock, ours], ids=["from one device to ours", "from ours to one device"])
def test_a_run_changes_the_strategy_without_changing_its_course(first: MakeTrainer, tmp_path: Path) -> None:
    second = ours if first is stock else stock
    whole = Resumable()
    stock(max_epochs=4).fit(whole)
    trainer = first(max_epochs=2)
    trainer.fit(Resumable())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    module = nudged(Resumable())
    second(max_epochs=4).fit(module, ckpt_path=tmp_path / "m.ckpt")
    assert list(differences(weights(module), weights(whole))) == []


def test_accumulation_may_be_broken_between_two_steps(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        folder = tmp_path / make.__name__
        settings = {"max_epochs": 3, "accumulate_grad_batches": 2}
        whole = Resumable()
        make(callbacks=[Saves(folder)], **settings).fit(whole)
        module = nudged(Resumable())
        trainer = make(**settings)
        trainer.fit(module, ckpt_path=folder / "step=2.ckpt")
        assert list(differences(weights(module), weights(whole))) == []
        return weights(module), trainer.global_step

    assert under_both(script)[1] == 6


class SavesOnError(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, module: Damper, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("stop_at", [1, 2])
def test_progress_of_loops_at_an_error_is_that_of_one_device(accumulate: int, stop_at: int, tmp_path: Path) -> None:
    class InEpochOne(Stops):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.current_epoch == 1 and batch_idx == stop_at:
                raise Planned
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        trainer = make(
            max_epochs=3,
            limit_val_batches=0,
            accumulate_grad_batches=accumulate,
            callbacks=[SavesOnError(path)],
        )
        with pytest.raises(Planned):
            trainer.fit(InEpochOne())
        return without_names(read(path))

    progress = under_both(script)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"]["ready"] == stop_at + 1
    assert progress["current"]["completed"] == stop_at


def test_values_logged_after_a_break_are_those_of_one_device(tmp_path: Path) -> None:
    class Logs(Resumable):
        def __init__(self, *, fails: bool) -> None:
            super().__init__()
            self.fails = fails
            self.mean = MeanMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.fails and batch_idx == 2:
                raise Planned
            number = float(batch_idx)
            self.mean(number)
            self.log("metric", self.mean, on_step=True, on_epoch=True)
            self.log("number", number, on_step=True, on_epoch=True, sync_dist=True)
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        with pytest.raises(Planned):
            make(callbacks=[SavesOnError(path)]).fit(Logs(fails=True))
        trainer, module = make(), Logs(fails=False)
        trainer.fit(module, ckpt_path=path)
        return dict(trainer.callback_metrics), trainer.global_step, weights(module)

    found, steps, _ = under_both(script)
    assert steps == 3
    assert set(found) == {"metric", "metric_step", "metric_epoch", "number", "number_step", "number_epoch"}


@pytest.mark.parametrize("which", ["best", "last"])
def test_best_and_last_are_the_checkpoints_of_this_run(which: str, tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        keeps = ModelCheckpoint(tmp_path / make.__name__, monitor="error", mode="max", save_last=True)
        trainer = make(callbacks=[keeps], enable_checkpointing=True, max_epochs=3)
        trainer.fit(Scored())
        tested = trainer.test(ckpt_path=which, verbose=False)
        return tested, trainer.validate(ckpt_path=which, verbose=False), Path(trainer.ckpt_path).name

    name = under_both(script)[-1]
    assert (name == "last.ckpt") == (which == "last")


def test_checkpoint_after_checkpoint_goes_on_from_the_best(tmp_path: Path) -> None:
    def script(make: MakeTrainer) -> Any:
        folder, module, names, path = tmp_path / make.__name__, Scored(), [], None
        for epochs in (1, 3, 4):
            keeps = ModelCheckpoint(folder, monitor="error", filename="{epoch:02d}", save_top_k=-1)
            trainer = make(callbacks=[keeps], enable_checkpointing=True, max_epochs=epochs)
            with pytest.warns(UserWarning, match="exists and is not empty") if path else nullcontext():
                trainer.fit(module, ckpt_path=path)
            trainer.test(ckpt_path="best", verbose=False)
            path = keeps.best_model_path
            names.append(Path(path).name)
        return names, weights(module)

    assert under_both(script)[0][0] == "epoch=00.ckpt"


def test_storage_options_reach_the_checkpoint_plugin(tmp_path: Path) -> None:
    trainer = ours()
    trainer.fit(Damper())
    place = type(trainer.strategy.checkpoint_io)
    with mock.patch.object(place, "save_checkpoint") as saves:
        trainer.save_checkpoint(tmp_path / "m.ckpt", storage_options="a bucket")
        trainer.save_checkpoint(tmp_path / "m.ckpt")
    assert [call.kwargs for call in saves.call_args_list] == [
        {"storage_options": "a bucket"},
        {"storage_options": None},
    ]
    with pytest.raises(TypeError, match=r"`storage_options` arg is not supported for `TorchCheckpointIO`"):
        trainer.save_checkpoint(tmp_path / "m.ckpt", storage_options="a bucket")


class Memory(fabric.plugins.CheckpointIO):
    """Checkpoints in a dict."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.files[str(path)] = deepcopy(checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return deepcopy(self.files[str(path)])

    def remove_checkpoint(self, path: Any) -> None:
        del self.files[str(path)]


def test_a_checkpoint_plugin_of_the_user_saves_loads_and_removes() -> None:
    def script(make: MakeTrainer) -> Any:
        place = Memory()
        keeps = ModelCheckpoint("folder", every_n_train_steps=1, filename="{step}")
        trainer = make(plugins=[place], callbacks=[keeps], enable_checkpointing=True)
        trainer.fit(Resumable())
        (path,) = place.files
        module = nudged(Resumable())
        keeps = ModelCheckpoint("folder", every_n_train_steps=1, filename="{step}")
        trainer = make(plugins=[place], callbacks=[keeps], enable_checkpointing=True, max_epochs=2)
        trainer.fit(module, ckpt_path=path)
        assert keeps.best_model_path in place.files
        return Path(path).name, weights(module)

    assert under_both(script)[0] == "step=3.ckpt"


def test_checkpoints_go_to_file_systems_of_fsspec() -> None:
    trainer = ours()
    trainer.fit(Damper())
    trainer.save_checkpoint("memory://upstream/m.ckpt")
    module = nudged(Damper())
    ours().validate(module, ckpt_path="memory://upstream/m.ckpt", verbose=False)
    assert list(differences(weights(module), weights(trainer.lightning_module))) == []


def test_the_loaded_checkpoint_is_let_go_when_all_is_restored(tmp_path: Path) -> None:
    trainer = ours()
    trainer.fit(Damper())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    trainer = ours(max_epochs=2)
    trainer.fit(Damper(), ckpt_path=tmp_path / "m.ckpt")
    assert trainer._checkpoint_connector._loaded_checkpoint == {}
    assert trainer.ckpt_path == tmp_path / "m.ckpt"
    assert trainer.strategy._loaded is None


def test_the_checkpoint_of_a_cluster_comes_before_all_others(tmp_path: Path) -> None:
    plugins = fabric.plugins.environments

    def script(make: MakeTrainer) -> Any:
        folder = tmp_path / make.__name__
        folder.mkdir()
        module = Resumable()
        trainer = make(max_epochs=2, callbacks=[Saves(folder)])
        trainer.fit(module)
        for step, number in ((1, ""), (2, "_0"), (4, "_3"), (3, "_33")):
            (folder / f"step={step}.ckpt").rename(folder / f"hpc_ckpt{number}.ckpt")
        again = nudged(Resumable())
        settings = {"default_root_dir": folder, "plugins": [plugins.LightningEnvironment()]}
        with mock.patch.object(plugins.SLURMEnvironment, "detect", return_value=True):
            trainer = make(max_steps=3, max_epochs=2, **settings)
            trainer.fit(again)
        assert list(differences(weights(again), read(folder / "hpc_ckpt_33.ckpt")["state_dict"])) == []
        return weights(again), Path(trainer.ckpt_path).name

    assert under_both(script)[1] == "hpc_ckpt_33.ckpt"


@pytest.mark.parametrize("has_state", [True, False])
def test_the_place_of_a_loader_with_a_state_is_saved(has_state: bool, tmp_path: Path) -> None:
    class Sees(Damper):
        def train_dataloader(self) -> Any:
            return ResumableRows() if has_state else rows()

        def on_train_start(self) -> None:
            self.seen: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.seen.append(batch)
            return self.loss(batch)

    def script(make: MakeTrainer) -> Any:
        path = tmp_path / f"{make.__name__}.ckpt"
        trainer = make(max_steps=3 - has_state, limit_val_batches=0)
        trainer.fit(Sees())
        trainer.save_checkpoint(path)
        module = Sees()
        make(max_steps=4, limit_val_batches=0, max_epochs=2).fit(module, ckpt_path=path)
        return module.seen, "combined_loader" in read(path)["loops"]["fit_loop"]["state_dict"]

    seen, was_saved = under_both(script)
    assert was_saved is has_state
    assert torch.equal(seen[0], list(rows())[2 if has_state else 0])


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    trainer = ours()
    trainer.fit(Damper())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    with pytest.raises(ValueError, match="holds the state of 1 optimizers and configure_optimizers made 2"):
        ours(max_epochs=2).fit(ByHand(), ckpt_path=tmp_path / "m.ckpt")


@pytest.mark.parametrize("at", ["step", "epoch"])
def test_averaged_weights_are_those_of_one_device(at: str, tmp_path: Path) -> None:
    class Averages(pl.callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return (step_idx if at == "step" else epoch_idx) is not None

    def script(make: MakeTrainer) -> Any:
        folder = tmp_path / make.__name__
        module = Resumable()
        make(callbacks=[Averages(), Saves(folder)], max_epochs=3).fit(module)
        saved = read(folder / "step=9.ckpt")
        again = nudged(Resumable())
        make(callbacks=[Averages()], max_epochs=4).fit(again, ckpt_path=folder / "step=9.ckpt")
        return weights(module), saved["state_dict"], saved["current_model_state"], weights(again)

    averaged, saved, last, _ = under_both(script)
    assert list(differences(averaged, last)) != []
    assert list(differences(saved, last)) != []


@on_ranks(2)
def broken_and_whole(rank: Rank, folder: str) -> Any:
    keeps = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = Resumable()
    trainer = ours(2, max_epochs=2, callbacks=[keeps], enable_checkpointing=True)
    trainer.fit(whole)
    best = keeps.best_model_path
    module = nudged(Resumable())
    again = ours(2, max_epochs=2)
    again.fit(module, ckpt_path=f"{folder}/step=2.ckpt")
    loaded = Resumable.load_from_checkpoint(best)
    with mock.patch.object(type(trainer.strategy.checkpoint_io), "save_checkpoint") as saves:
        again.save_checkpoint(f"{folder}/once.ckpt")
    return weights(whole), weights(module), weights(loaded), again.global_step, saves.call_count


def test_two_ranks_go_on_from_one_file_that_the_first_has_written(tmp_path: Path) -> None:
    one = Resumable()
    stock(max_epochs=2).fit(one)
    for rank, (whole, again, loaded, step, writes) in enumerate(broken_and_whole.launch(folder=str(tmp_path))):
        assert list(differences(again, whole)) == []
        assert list(differences(loaded, whole)) == []
        assert list(differences(whole, weights(one))) == []  # both ranks have the rows of one: halves of equal sums
        assert (step, writes) == (6, int(rank == 0))
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == [f"step={n}.ckpt" for n in range(1, 7)]
