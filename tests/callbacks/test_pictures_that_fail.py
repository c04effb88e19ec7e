"""A picture that cannot be drawn or written is told of, and training goes on."""

import re
import warnings
from pathlib import Path
from typing import Any

import fsspec
import matplotlib.image
import numpy as np
import pytest
import torch

from lightning_moeclip.callbacks import VarianceHeatmap
from lightning_moeclip.callbacks.pictures import write_picture
from tests.callbacks.heatmap_runs import NoteTaker, fit
from tests.models import TwoTowers, quiet_trainer


class NoPictures(NoteTaker):
    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        raise OSError("no space for pictures")


def weights_and_warnings(tmp_path: Path, *callbacks: VarianceHeatmap, **arguments: Any) -> tuple[Any, list[str]]:
    module = TwoTowers()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        trainer = fit(tmp_path, *callbacks, num_batches=6, module=module, **arguments)
    assert trainer.global_step == 6
    return module.state_dict(), [str(w.message) for w in told if "VarianceHeatmap" in str(w.message)]


@pytest.mark.parametrize("way", ["folder", "logger", "drawing"])
def test_a_picture_that_fails_is_told_once_and_the_run_is_as_without_it(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = weights_and_warnings(tmp_path)
    (tmp_path / "file").touch()
    callback = VarianceHeatmap(every_n_steps=1, figure_every_n_steps=2)
    arguments: dict[str, Any] = {"default_root_dir": tmp_path / "file" / "runs"} if way == "folder" else {}
    arguments |= {"logger": NoPictures()} if way == "logger" else {}
    error = {"folder": "NotADirectoryError: ", "logger": "OSError: no space for pictures", "drawing": "ValueError: ink"}

    def fail() -> None:
        raise ValueError("ink")

    if way == "drawing":
        monkeypatch.setattr(callback.picture, "render", fail)
    found, (told,) = weights_and_warnings(tmp_path, callback, **arguments)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert re.match(rf"VarianceHeatmap could not show the samples up to step 2: {error[way]}", told), told
    assert "Training goes on" in told
    assert "Write Trainer(default_root_dir=...)" in told
    assert [sample.step for sample in callback.history.samples] == list(range(6))
    # a new run tells it anew
    assert len(weights_and_warnings(tmp_path, callback, **arguments)[1]) == 1


def test_pictures_go_to_a_remote_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = quiet_trainer(1, default_root_dir="memory://runs")
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    write_picture(trainer, "tag", picture, step=3, folder="run/grad_variance")
    with fsspec.open("memory://runs/run/grad_variance/step_000003.png", "rb") as file:
        found = matplotlib.image.imread(file)
    assert (found[..., :3] * 255).round().astype("uint8").tolist() == picture.tolist()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_have_colons_in_its_name(tmp_path: Path) -> None:
    trainer = quiet_trainer(1, default_root_dir=tmp_path / "a::b")
    write_picture(trainer, "tag", np.zeros((4, 4, 3), dtype=np.uint8), step=3, folder="run")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")] == [Path("a::b/run/step_000003.png")]
