"""Trap 5, the other half: one loss scale for parts of a model whose gradients live orders of magnitude apart.

The scale that the steepest part can bear is the one that all get: where gradients are small they vanish in float16, and
a part that overflows now and then takes the scale of all others down with it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

DIM, ROWS, STEPS = 16, 8, 200


class Lopsided(LightningModule):
    """A steep branch, whose gradients overflow above a scale of 32, and a projection head with small ones inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(DIM, DIM)
        self.steep = nn.Linear(DIM, DIM)
        self.image_projection = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        with torch.no_grad():
            self.image_projection[2].weight.mul_(2.0**-10)
        self.zeros: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.body(batch).tanh()
        steep = self.steep(hidden).float() * 2.0**7
        # at a scale of 32 the cotangent of the head's output is 2^-15, which float16 holds
        return steep.sum() + 2.0**-20 * self.image_projection(hidden).float().sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = torch.cat([p.grad.flatten() for p in self.image_projection.parameters()])
        self.zeros.append(float((gradients == 0).float().mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Expert(nn.Module):
    """A layer whose cotangent is larger by a factor inside than at its output and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        small = self.inner(x) * (1 / factor)
        return self.outer(small * factor)


class Spiky(LightningModule):
    """Every tenth batch of rank 1 has a spike inside the expert that float16 bears up to a scale of 2^6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList([Expert()])
        self.skipped: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        factor = 2.0**9 if batch_idx % 10 == 9 and self.global_rank == 1 else 1.0
        out = self.experts[0](self.body(batch).tanh(), factor)
        return out.float().sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not all(bool(p.grad.isfinite().all()) for p in self.parameters()):
            self.skipped.append(self.trainer.fit_loop.batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(STEPS, ROWS, DIM, generator=generator))


def fit(module: LightningModule, rank: Rank, **settings: Any) -> dict[str, Any]:
    precision = MoEClipPrecision("16-mixed", device="cpu", **settings)
    trainer = quiet_trainer(rank.world_size, plugins=[precision])
    trainer.fit(module, loader(data(rank.index)))
    scales = trainer.strategy.report.loss_scales
    return {
        "scales": {name: float(scale.scale) for name, scale in scales.items()},
        "overflow": {name: float(scale.overflow_rate) for name, scale in scales.items()},
        "underflow": {name: float(scale.underflow_rate) for name, scale in scales.items()},
    }


@on_ranks(2, timeout_s=120)
def with_a_small_head(rank: Rank, loss_scaling: str) -> dict[str, Any]:
    module = Lopsided()
    found = fit(module, rank, loss_scaling=loss_scaling, init_scale=2.0**16)
    return found | {"zeros": module.zeros}


@on_ranks(2, timeout_s=120)
def with_spikes(rank: Rank, loss_scaling: str) -> dict[str, Any]:
    module = Spiky()
    found = fit(module, rank, loss_scaling=loss_scaling, init_scale=2.0**4, growth_interval=20)
    return found | {"skipped": module.skipped}


def test_a_head_whose_gradients_vanish_under_one_scale_keeps_them_under_its_own() -> None:
    (one, _), (own, other) = (with_a_small_head.launch(loss_scaling=which) for which in ("unified", "local"))
    assert own == other
    assert one["scales"] == {"model": 32.0}
    vanished, kept = (sum(found["zeros"][-50:]) / 50 for found in (one, own))
    assert vanished > 0.4  # of the gradients inside the head are exact zeros
    assert kept <= vanished / 10
    assert own["scales"]["model"] == 32.0
    assert own["scales"]["image_projection"] >= 2.0**12
    assert own["overflow"] == {"model": one["overflow"]["model"], "image_projection": 0.0}
    assert own["underflow"]["image_projection"] == pytest.approx(own["zeros"][190])  # the last step that was counted


def test_an_expert_with_spikes_backs_off_alone_and_less_and_less_often() -> None:
    (one, _), (own, other) = (with_spikes.launch(loss_scaling=which) for which in ("unified", "local"))
    assert own == other
    # one scale climbs back in 20 clean steps, and the next spike but one takes it down for all
    assert one["skipped"] == [69, 99, 129, 159, 189]
    assert one["scales"] == {"model": 64.0}
    assert one["overflow"] == {"model": pytest.approx(5 / STEPS)}
    # of its own the expert waits four times as long before it goes back to where it overflowed, then eight times
    assert own["skipped"] == [69, 159]
    assert own["overflow"] == {"model": 0.0, "experts": pytest.approx(2 / STEPS)}
    assert own["scales"] == {"model": 2.0**13, "experts": 64.0}
