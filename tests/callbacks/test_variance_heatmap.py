"""What VarianceHeatmap logs, draws and writes, under our strategy and under others, whatever loggers there are."""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_moeclip.binding import Callback, pl
from lightning_moeclip.callbacks import VarianceHeatmap
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.heatmap_runs import NoteTaker, fit, variance_of
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

CSVLogger, Logger, TensorBoardLogger = pl.loggers.CSVLogger, pl.loggers.Logger, pl.loggers.TensorBoardLogger


def events_in(folder: str) -> EventAccumulator:
    (file,) = Path(folder).glob("events*")  # one run, one file
    return EventAccumulator(str(file), size_guidance={"images": 0, "tensors": 0, "scalars": 0}).Reload()


def pngs_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))


@on_ranks(2)
def log_on_two_ranks(rank: Rank, folder: str, accumulate: int) -> dict[str, Any]:
    logger = TensorBoardLogger(folder, name="", version="")
    callback = VarianceHeatmap(every_n_steps=1, figure_every_n_steps=2)
    trainer = quiet_trainer(
        2,
        strategy=MoEClipStrategy(expert_parallel_size=2),
        logger=logger if rank.index == 0 else False,
        callbacks=[callback],
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(TwoTowers(), loader(share(batches(4), [5, 3], rank.index)))
    metrics = {tag: value.item() for tag, value in trainer.callback_metrics.items() if "grad_var" in tag}
    shape = callback.picture.render().shape if rank.index == 0 else None
    return {"metrics": metrics, "shape": shape, "steps": [sample.step for sample in callback.history.samples]}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_scalars_are_log10_of_one_process_and_the_picture_is_in_the_event_file(tmp_path: Path, accumulate: int) -> None:
    truth = train_one_process(TwoTowers(), batches(4), accumulate=accumulate).gradients
    told = log_on_two_ranks.launch(folder=str(tmp_path), accumulate=accumulate)
    events = events_in(str(tmp_path))
    for tower in ("image", "text"):
        logs = [math.log10(variance_of(gradients, tower)) for gradients in truth]
        scalars = events.Scalars(f"grad_var/{tower}")
        assert [event.step for event in scalars] == list(range(4 // accumulate))
        assert [event.value for event in scalars] == pytest.approx(logs, rel=1e-6)  # float32 in the file
        for rank in told:
            assert rank["metrics"][f"grad_var/{tower}"] == pytest.approx(logs[-1], rel=1e-10)
            assert rank["steps"] == list(range(4 // accumulate))
    images = events.Images("grad_var/heatmap")
    assert [image.step for image in images] == ([2, 3] if accumulate == 1 else [1])
    assert (images[-1].height, images[-1].width, 3) == told[0]["shape"]
    (text, *_) = events.Tensors("grad_var/worst_layers/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == "| tower | layer | variance | its median | decades apart |"
    assert len(lines) == 7


def test_without_logger_pictures_are_files(tmp_path: Path) -> None:
    callback = VarianceHeatmap(every_n_steps=2, figure_every_n_steps=3)
    fit(tmp_path, callback, num_batches=9)
    assert [sample.step for sample in callback.history.samples] == [0, 2, 4, 6, 8]
    # the first samples at or behind 3 and 6, and the last one when training ends
    assert pngs_in(tmp_path) == [f"grad_variance/step_00000{step}.png" for step in (4, 6, 8)]
    found = matplotlib.image.imread(tmp_path / "grad_variance/step_000008.png")
    picture = callback.picture.render()
    assert (found[..., :3] * 255).round().astype("uint8").tolist() == picture.tolist()


def test_interval_of_samples_is_the_trainers(tmp_path: Path) -> None:
    callback = VarianceHeatmap()
    fit(tmp_path, callback, num_batches=7, log_every_n_steps=3)
    assert [sample.step for sample in callback.history.samples] == [0, 3, 6]
    never = VarianceHeatmap()
    fit(tmp_path / "never", never, log_every_n_steps=0)
    assert never.history.samples == []


def test_every_logger_gets_scalars_and_pictures_go_to_those_that_take_them(tmp_path: Path) -> None:
    notes, board, table = NoteTaker(), TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "csv")
    callback = VarianceHeatmap(every_n_steps=1, prefix="run/")
    trainer = fit(tmp_path, callback, num_batches=2, logger=[notes, board, table])
    told = [(step, set(metrics)) for step, metrics in notes.metrics if "run/grad_var/image" in metrics]
    assert told == [(step, {"run/grad_var/image", "run/grad_var/text"}) for step in (0, 1)]
    assert told[0][1] <= set(trainer.callback_metrics)
    shape = callback.picture.render().shape
    assert notes.images == [("run/grad_var/heatmap", shape, 1)]
    ((key, columns, rows),) = notes.tables
    assert key == "run/grad_var/worst_layers"
    assert columns == ["tower", "layer", "variance", "its median", "decades apart"]
    assert len(rows) == 5
    events = events_in(board.log_dir)
    assert [image.step for image in events.Images("run/grad_var/heatmap")] == [1]
    assert "run/grad_var/image" in (Path(table.log_dir) / "metrics.csv").read_text()
    assert pngs_in(tmp_path) == []


def test_loggers_without_pictures_have_files_beside_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, VarianceHeatmap(every_n_steps=1), num_batches=2, logger=logger)
    assert pngs_in(Path(logger.log_dir)) == ["grad_variance/step_000001.png"]


class Least(Logger):
    """What Lightning asks of a logger, and no more."""

    name, version = "least", "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...


def test_logger_that_has_nothing_but_metrics_has_files_beside_it(tmp_path: Path) -> None:
    fit(tmp_path, VarianceHeatmap(every_n_steps=1), num_batches=2, logger=Least())
    assert pngs_in(tmp_path) == ["grad_variance/step_000001.png"]


@pytest.mark.parametrize("strategy", ["ours", "auto"])
def test_fast_dev_run_leaves_no_files(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = VarianceHeatmap(every_n_steps=1, figure_every_n_steps=1)
    arguments = {} if strategy == "ours" else {"strategy": strategy}
    trainer = fit(tmp_path, callback, fast_dev_run=3, logger=True, **arguments)
    assert len(callback.history.samples) == 3
    assert list(tmp_path.iterdir()) == []
    assert sum("grad_var" in tag for tag in trainer.callback_metrics) == 2


class TwoOptimizers(TwoTowers):
    """Manual optimization: one optimizer for each tower, the temperature in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        loss = self.compute_loss(batch)
        self.log("of_lightning", loss, batch_size=1)
        self.manual_backward(loss)
        first.step()
        second.step()

    def on_train_batch_end(self, *args: object) -> None: ...

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        rest = [*self.text.parameters(), *self.loss.parameters()]
        return [torch.optim.SGD(self.image.parameters(), 1e-2), torch.optim.SGD(rest, 1e-2)]


@pytest.mark.parametrize("strategy", ["ours", "auto"])
def test_optimizers_of_one_batch_share_a_sample(tmp_path: Path, strategy: str) -> None:
    module, callback = TwoOptimizers(), VarianceHeatmap(every_n_steps=3)
    arguments = {} if strategy == "ours" else {"strategy": strategy}
    fit(tmp_path, callback, num_batches=6, module=module, **arguments)
    samples = callback.history.samples
    # two steps a batch, the first at or behind 3, 6, 9: 0, 4, 6, 10, which are these batches
    assert [sample.step for sample in samples] == [0, 2, 3, 5]
    assert len(samples[0].cells) == 9
    # kept by the module before the first optimizer's step, with both towers' gradients
    for tower in ("image", "text"):
        truth = variance_of(module.gradients[0], tower)
        assert samples[0].towers[tower] == pytest.approx(truth, rel=1e-10)


def test_optimizers_of_one_batch_share_the_step_at_which_lightning_logs(tmp_path: Path) -> None:
    notes, board = NoteTaker(), TensorBoardLogger(tmp_path / "board")
    callback = VarianceHeatmap(every_n_steps=1, figure_every_n_steps=6)
    trainer = fit(tmp_path, callback, num_batches=5, module=TwoOptimizers(), logger=[notes, board])
    assert trainer.global_step == 10
    assert notes.steps_of("of_lightning") == [0, 1, 2, 3, 4]
    assert notes.steps_of("grad_var/image") == [0, 1, 2, 3, 4]
    # the first batch behind six optimizer steps, and the last one
    assert [step for _, _, step in notes.images] == [3, 4]
    assert [image.step for image in events_in(board.log_dir).Images("grad_var/heatmap")] == [3, 4]


class Fails(TwoTowers):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise RuntimeError("a bug of the user")
        return super().training_step(batch, batch_idx)


def test_a_run_that_fails_leaves_its_last_samples(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug of the user"):
        fit(tmp_path, VarianceHeatmap(every_n_steps=1), module=Fails())
    assert pngs_in(tmp_path) == ["grad_variance/step_000001.png"]


class FailsBehindTheStep(TwoTowers):
    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)
        if batch_idx == 2:
            raise RuntimeError("a bug of the user")


class Breaks(NoteTaker):
    """Fails at the third step's metrics, and with every picture."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step == 2:
            raise OSError("no space for metrics")

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        raise OSError("no space for pictures")


def test_what_fails_while_a_failed_run_is_drawn_is_logged_beside_the_users_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="a bug of the user"):
        fit(tmp_path, VarianceHeatmap(every_n_steps=1), module=FailsBehindTheStep(), logger=Breaks())
    told = [r for r in caplog.records if "could not show the last samples of a run that failed" in r.getMessage()]
    assert [str(record.exc_info[1]) for record in told] == ["no space for metrics", "no space for pictures"]


def test_a_resumed_run_goes_on_with_samples_and_scale(tmp_path: Path) -> None:
    first = VarianceHeatmap(every_n_steps=1)
    trainer = fit(tmp_path, first, num_batches=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = VarianceHeatmap(every_n_steps=1)
    trainer = quiet_trainer(1, callbacks=[resumed], default_root_dir=tmp_path, max_epochs=2)
    trainer.fit(TwoTowers(), loader(batches(2)), ckpt_path=tmp_path / "last.ckpt")
    assert [sample.step for sample in resumed.history.samples] == [0, 1, 2, 3]
    assert resumed.history.freeze_range() == first.history.freeze_range()


def test_another_run_has_a_scale_of_its_own_and_a_second_fit_of_one_trainer_goes_on(tmp_path: Path) -> None:
    callback = VarianceHeatmap(every_n_steps=1)
    trainer = fit(tmp_path, callback, num_batches=2)
    first = callback.history.freeze_range()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(TwoTowers(), loader(batches(2)))
    assert [sample.step for sample in callback.history.samples] == [0, 1, 2, 3]
    assert callback.history.freeze_range() == first
    module = TwoTowers()
    module.loss.register_forward_hook(lambda loss, inputs, value: 1e6 * value)
    fit(tmp_path, callback, num_batches=2, module=module)
    assert [sample.step for sample in callback.history.samples] == [0, 1]
    # gradients are 1e6 times, variances 1e12 times those of before
    assert callback.history.freeze_range() == pytest.approx([1e12 * bound for bound in first])


@on_ranks(2)
def test_what_draws_is_loaded_before_training_and_on_rank_0_alone(rank: Rank) -> None:
    class Looks(Callback):
        def on_train_start(self, *args: Any) -> None:
            self.is_loaded = "matplotlib.backends.backend_agg" in sys.modules

    for module in [name for name in sys.modules if name.startswith("matplotlib.backends.")]:
        del sys.modules[module]
    looks = Looks()
    quiet_trainer(2, callbacks=[VarianceHeatmap(), looks], fast_dev_run=True).fit(TwoTowers(), loader(batches(1)))
    assert looks.is_loaded == (rank.index == 0)


class NotesOpenFiles(Callback):
    """The names of the files that this process holds open behind each step, without sockets and pipes."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def on_train_batch_end(self, *args: object) -> None:
        paths = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
        self.names.append(sorted(str(path) for path in paths if path.is_file()))


def test_many_pictures_of_two_towers_are_one_run_and_open_no_more_files(tmp_path: Path) -> None:
    logger, notes = TensorBoardLogger(tmp_path), NotesOpenFiles()
    fit(tmp_path, VarianceHeatmap(every_n_steps=1, figure_every_n_steps=2), notes, num_batches=12, logger=logger)
    (event_file,) = map(str, tmp_path.rglob("events*"))
    # a thread of each logger, those of earlier tests too, opens its event file for the moment in which it writes
    assert max(names.count(event_file) for names in notes.names) <= 1
    early, late = ([name for name in notes.names[at] if "tfevents" not in name] for at in (3, -1))
    assert not Counter(late) - Counter(early)
    events = events_in(logger.log_dir)
    assert len(events.Images("grad_var/heatmap")) == 6
    assert len(events.Scalars("grad_var/image")) == len(events.Scalars("grad_var/text")) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, r"every_n_steps=0\) must be an integer from 1. Use every_n_steps=50, or None"),
        ({"every_n_steps": "5"}, r"VarianceHeatmap\(every_n_steps='5'\) must be an integer from 1"),
        ({"every_n_steps": 2.5}, r"every_n_steps=2.5\) must be an integer from 1"),
        ({"figure_every_n_steps": -5}, r"figure_every_n_steps=-5\) must be an integer from 1. Use figure_every.*=500"),
        ({"figure_every_n_steps": None}, r"figure_every_n_steps=None\) must be an integer from 1"),
        ({"figure_every_n_steps": True}, r"figure_every_n_steps=True\) must be an integer from 1"),
        ({"prefix": None}, r"VarianceHeatmap\(prefix=None\) must be a string. Use prefix='fine/', or leave it out"),
    ],
)
def test_intervals_that_are_no_integers_from_one_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VarianceHeatmap(**arguments)


def test_two_with_one_prefix_are_refused_and_two_prefixes_are_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 2 of VarianceHeatmap\(prefix=''\).*prefix='fine/'"):
        fit(tmp_path, VarianceHeatmap(), VarianceHeatmap())
    fit(tmp_path, VarianceHeatmap(every_n_steps=1), VarianceHeatmap(every_n_steps=1, prefix="fine/"), num_batches=1)
    assert pngs_in(tmp_path) == ["fine/grad_variance/step_000000.png", "grad_variance/step_000000.png"]


def test_missing_matplotlib_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-moeclip\[plots\]'"):
        fit(tmp_path, VarianceHeatmap())
