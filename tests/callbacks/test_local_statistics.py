"""Sums of a rank's own gradients under strategies that keep none, against autograd."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import Callback, MixedPrecision, Trainer
from lightning_moeclip.callbacks import VarianceHeatmap
from lightning_moeclip.monitor.heatmap import ABSENT, ZERO
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.heatmap_runs import NoteTaker, fit, variance_of
from tests.models import TwoTowers, batches, loader, quiet_trainer, share


def add_into(total: Tensor, gradient: Tensor) -> None:
    """A hook that sees what comes in, before it is accumulated."""
    total += gradient


class KeepsLocal(Callback):
    """Autograd's gradients of this rank in the first step, before the reduction, added up over micro-batches."""

    def on_train_start(self, trainer: Trainer, pl_module: TwoTowers) -> None:
        self.gradients = {name: torch.zeros_like(p) for name, p in pl_module.named_parameters()}
        self.handles = [p.register_hook(partial(add_into, self.gradients[n])) for n, p in pl_module.named_parameters()]

    def on_before_optimizer_step(self, *args: object) -> None:
        for handle in self.handles:
            handle.remove()


@on_ranks(2)
def log_under_stock_ddp(rank: Rank, accumulate: int) -> dict[str, Any]:
    callback, keeper, notes = VarianceHeatmap(every_n_steps=1), KeepsLocal(), NoteTaker()
    trainer = quiet_trainer(
        2,
        strategy="ddp_find_unused_parameters_true",
        logger=notes,
        callbacks=[keeper, callback],
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
    )
    trainer.fit(TwoTowers(), loader(share(batches(2), [5, 3], rank.index)))
    return {
        "truth": [math.log10(variance_of(keeper.gradients, tower)) for tower in ("image", "text")],
        "first": [callback.history.samples[0].towers[tower] for tower in ("image", "text")],
        "metrics": notes.metrics,
        "images": notes.images,
        "title": callback.picture.note,
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_under_stock_ddp_the_numbers_are_those_of_the_rank_and_say_so(accumulate: int) -> None:
    ranks = log_under_stock_ddp.launch(accumulate=accumulate)
    for rank in ranks:
        assert [math.log10(variance) for variance in rank["first"]] == pytest.approx(rank["truth"], rel=1e-10)
        assert rank["title"] == "local to rank 0"
    assert ranks[0]["truth"] != pytest.approx(ranks[1]["truth"], rel=1e-2)  # so they are local
    scalars = next(metrics for _, metrics in ranks[0]["metrics"] if metrics)
    assert scalars == pytest.approx(
        {"grad_var_local/image": ranks[0]["truth"][0], "grad_var_local/text": ranks[0]["truth"][1]}, rel=1e-10
    )
    assert [key for key, _, _ in ranks[0]["images"]] == ["grad_var_local/heatmap"]
    assert not ranks[1]["images"]


class Recomputed(TwoTowers):
    """The same block twice, each time recomputed in backward: hooks of its parameters fire twice."""

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image = batch[0].requires_grad_()
        for _ in range(2):
            image = image + torch.utils.checkpoint.checkpoint(self.image, image, use_reentrant=True).repeat(1, 2)[:, :8]
        return self.loss(image[:, :5], self.text(batch[1]))


def test_recomputed_gradients_count_once(tmp_path: Path) -> None:
    module, callback = Recomputed(has_own_moe=False), VarianceHeatmap(every_n_steps=1)
    fit(tmp_path, callback, num_batches=2, module=module, strategy="auto")
    for sample, gradients in zip(callback.history.samples, module.gradients, strict=True):
        for tower in ("image", "text"):
            assert sample.towers[tower] == pytest.approx(variance_of(gradients, tower), rel=1e-10)


class Single(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().compute_loss((batch[0].float(), batch[1].float()))


def test_loss_scale_is_divided_out_of_local_sums(tmp_path: Path) -> None:
    found = []
    for scale in (1.0, 1024.0):
        callback = VarianceHeatmap(every_n_steps=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        fit(
            tmp_path / str(scale),
            callback,
            num_batches=1,
            module=Single(),
            strategy="auto",
            plugins=[plugin],
        )
        found.append(list(callback.history.samples[0].cells.values()))
    assert found[0] == pytest.approx(found[1], rel=2e-2)  # half precision: 2**-11, and subnormals without the scale


class Validated(TwoTowers):
    """Takes gradients in validation too, and throws them away."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        with torch.enable_grad():
            (1e3 * self.compute_loss(batch)).backward()
        self.zero_grad()


@pytest.mark.parametrize("strategy", ["auto", "ours"])
def test_evaluation_does_not_count(tmp_path: Path, strategy: str) -> None:
    arguments = {} if strategy == "ours" else {"strategy": strategy}
    cells = []
    for is_validated in (False, True):
        module, callback = Validated(), VarianceHeatmap(every_n_steps=1)
        trainer = quiet_trainer(
            1,
            callbacks=[callback],
            default_root_dir=tmp_path,
            inference_mode=False,
            limit_val_batches=1.0 if is_validated else 0,
            val_check_interval=1,
            num_sanity_val_steps=0,
            **arguments,
        )
        trainer.fit(module, loader(batches(3)), loader(batches(1, seed=5)))
        cells.append([sample.cells for sample in callback.history.samples])
    assert len(cells[0]) == 3
    assert cells[0] == cells[1]


class Frozen(TwoTowers):
    """The image tower's head learns from the second step on, of which the callback learns in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.image.head.requires_grad_(requires_grad=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.image.head.requires_grad_(requires_grad=True)


def test_a_layer_is_grey_until_it_is_unfrozen(tmp_path: Path) -> None:
    module, callback = Frozen(), VarianceHeatmap(every_n_steps=1)
    fit(tmp_path, callback, num_batches=3, module=module, strategy="auto")
    keys = callback.history.keys()
    head = next(key for key in keys if key[:2] == ("image", "head"))
    assert all(key.tower == "image" for key in keys[:4])
    assert [head in sample.cells for sample in callback.history.samples] == [False, False, True]
    picture = callback.picture.render()
    axes = callback.picture.figure.axes[0]
    x, y = axes.transData.transform((0, keys.index(head)))
    assert tuple(picture[round(picture.shape[0] - y), round(x)]) == ABSENT != ZERO
