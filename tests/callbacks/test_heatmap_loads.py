"""Whose tokens the heatmap's panel of experts shows, and since when."""

from pathlib import Path

import torch

from lightning_moeclip.callbacks import ExpertLoadMonitor, VarianceHeatmap
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.heatmap_runs import fit
from tests.callbacks.watched_fit import Shared, Wishes
from tests.models import TwoTowers, loader, quiet_trainer


def counted() -> TwoTowers:
    """A module whose image tower has counted tokens before the fit."""
    module = TwoTowers()
    module.image.moe._load.add(None, torch.tensor([100, 0, 0, 0]), None)
    return module


def load_rows(callback: VarianceHeatmap) -> tuple[dict[str, list[float]], str]:
    return callback.picture.loads.counts, callback.picture.loads.source


def test_load_of_rank_0_since_the_picture_before_is_a_panel(tmp_path: Path) -> None:
    callback = VarianceHeatmap(every_n_steps=1)
    module = counted()
    fit(tmp_path, callback, num_batches=3, module=module)
    wanted = {
        "image.moe": (module.image.moe.training_load[None] - torch.tensor([100, 0, 0, 0])).tolist(),
        "text.moe": module.text.moe.training_load[None].tolist(),
    }
    assert sum(wanted["image.moe"]) == 3 * 8 * 2  # batches, rows, choices
    assert load_rows(callback) == (wanted, "rank 0 since the picture before")


def test_compiled_layer_has_one_row_under_its_own_path(tmp_path: Path) -> None:
    callback, module = VarianceHeatmap(every_n_steps=1), TwoTowers()
    module.image.moe = torch.compile(module.image.moe, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        fit(tmp_path, callback, num_batches=1, module=module, strategy="auto")
    counts, _ = load_rows(callback)
    assert [(name, sum(values)) for name, values in counts.items()] == [("image.moe", 16), ("text.moe", 16)]


@on_ranks(2)
def draw_published_load(rank: Rank, folder: str) -> tuple[dict[str, list[float]], str]:
    # text comes up on rank 0 alone, and in the first step alone
    data: list[list[Wishes]] = [[{"image": [0, 1], "text": [3]}, {"image": [2]}], [{"image": [1]}, {"image": [2, 3]}]]
    callback = VarianceHeatmap(every_n_steps=1, figure_every_n_steps=1)
    trainer = quiet_trainer(2, callbacks=[ExpertLoadMonitor(every_n_steps=1), callback], default_root_dir=folder)
    trainer.fit(Shared(), loader(data[rank.index]))
    return load_rows(callback)


def test_load_that_the_monitor_published_last_is_a_panel_without_towers_that_had_no_token(tmp_path: Path) -> None:
    drawn, _ = draw_published_load.launch(folder=str(tmp_path))
    assert drawn == ({"moe image": [0, 0, 2, 1]}, "all ranks, as published after 2 optimizer steps")


def test_load_is_rank_0s_until_the_monitor_publishes(tmp_path: Path) -> None:
    callback, monitor = VarianceHeatmap(every_n_steps=1), ExpertLoadMonitor(every_n_steps=100)
    # asked first, and the monitor publishes when training ends
    fit(tmp_path, callback, monitor, num_batches=1)
    assert load_rows(callback)[1] == "rank 0 since the picture before"
