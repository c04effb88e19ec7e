"""Sums over a gradient hold what variance and noise take from them, also where they cancel."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.callbacks import VarianceHeatmap
from lightning_moeclip.gradients.report import LayerKey
from lightning_moeclip.gradients.statistics import sums_of
from lightning_moeclip.monitor.variance_history import VarianceHistory
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.test_statistics import Watch
from tests.models import loader, quiet_trainer

KEY = LayerKey("image", "embedding", "dense")
SIZE = 2**17
EPSILON = torch.finfo(torch.float64).eps


def noisy(size: int, mean: float, deviation: float, *, seed: int = 0) -> Tensor:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (mean + deviation * noise).float()


# sizes of several blocks, one block and a part of one; (mean / deviation)^2 up to 1e10
@pytest.mark.parametrize(("size", "mean", "deviation"), [(300_000, 1e4, 1.0), (70_000, 1.0, 1e-4), (1000, -10.0, 1e-4)])
def test_variance_of_nearly_equal_elements_is_that_of_float64(size: int, mean: float, deviation: float) -> None:
    gradient = noisy(size, mean, deviation)
    wanted = gradient.double().var().item()
    # squares and their sum round by a few epsilons of mean^2, which is (mean / deviation)^2 times the variance
    bound = 32 * EPSILON * (mean / deviation) ** 2
    halves = [(KEY, half) for half in gradient.chunk(2)]
    for gradients in ([(KEY, gradient)], halves):
        keys, sums = sums_of(gradients)
        assert abs(sums.variance.item() - wanted) <= bound * wanted
        history = VarianceHistory()
        sample = history.add(0, [(keys, sums)])
        assert abs(sample.cells[KEY] - wanted) <= bound * wanted
        assert abs(sample.towers["image"] - wanted) <= bound * wanted


def test_counts_and_sums_of_a_gradient_in_blocks_are_exact() -> None:
    gradient = torch.zeros(200_003)
    gradient[::7] = 0.5
    gradient[[1, 70_000, 200_002]] = torch.tensor([math.nan, math.inf, -math.inf])
    gradient[150_000] = -3e38
    sums = sums_of([(KEY, gradient)])[1]
    finite = gradient[gradient.isfinite()].double()
    found = {name: getattr(sums, name).item() for name in vars(sums)}
    assert found == {
        "size": 200_003.0,
        "total": pytest.approx(finite.sum().item(), rel=4 * EPSILON),
        "square": pytest.approx(finite.square().sum().item(), rel=4 * EPSILON),
        "absolute": pytest.approx(finite.abs().sum().item(), rel=4 * EPSILON),
        "maximum": torch.tensor(3e38).item(),
        "num_nonfinite": 3.0,
        "num_zeros": float((gradient == 0).sum()),
    }


class Weighed(LightningModule):
    """One parameter, whose gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight @ batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", [MoEClipStrategy, lambda: "auto"])
def test_logged_variance_of_a_nearly_equal_gradient_is_that_of_float64(strategy: Callable[[], Any]) -> None:
    batch = noisy(SIZE, 1.0, 1e-4)
    trainer = quiet_trainer(1, strategy=strategy(), callbacks=[VarianceHeatmap(every_n_steps=1)], fast_dev_run=1)
    trainer.fit(Weighed(), loader([batch]))
    (logged,) = [v.item() for tag, v in trainer.callback_metrics.items() if tag.endswith("/shared")]
    assert logged == pytest.approx(math.log10(batch.double().var().item()), abs=1e-7)


@on_ranks(2)
def watch_noise(rank: Rank) -> float:
    watch = Watch()
    quiet_trainer(2, callbacks=[watch]).fit(Weighed(), loader([noisy(SIZE, 1.0, 1e-3, seed=rank.index)]))
    (found,) = watch.statistics
    assert found is not None
    return found.noise.item()


def test_noise_of_ranks_that_nearly_agree_is_that_of_float64() -> None:
    first, second = (noisy(SIZE, 1.0, 1e-3, seed=seed).double() for seed in range(2))
    wanted = (first - second).square().sum().item() / 2
    # the reduced gradient g is rounded to float32: 2 |R| g * rounding, a random walk of at most half an epsilon a step
    bound = 4 * 4 * SIZE**0.5 * torch.finfo(torch.float32).eps / 2
    for found in watch_noise.launch():
        assert abs(found - wanted) <= bound
        assert bound < 1e-2 * wanted
