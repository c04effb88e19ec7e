"""Clipping and loss scaling: one norm, one factor and one decision on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.gradients.one_process import TOLERANCE, parameters, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(LightningModule):
    is_fused = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = TinyExperts(DIM, 4)
        self.idle = nn.Linear(DIM, DIM).double()
        self.factors: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.experts(self.dense(batch)).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        report = self.trainer.strategy.report
        self.factors.append(0.0 if report.clip_factor is None else float(report.clip_factor))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.is_fused)


class Fused(Net):
    is_fused = True


class ThroughLightning(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class ThroughTheStrategy(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.trainer.strategy.clip_grad_norm_(0.05)


class PastUs(Net):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        super().configure_gradient_clipping(optimizer, 0.0, "norm")
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def in_plain_torch(*, norm: float | None = None, value: float | None = None) -> Net:
    net = Net()
    optimizer = net.configure_optimizers()
    for batch in BATCHES:
        optimizer.zero_grad()
        net.experts(net.dense(batch)).pow(2).mean().backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), norm)
        if value is not None:
            nn.utils.clip_grad_value_(net.parameters(), value)
        optimizer.step()
    return net


@on_ranks(4)
def test_clipping_equals_one_process_and_its_factor_is_the_same_bits_on_all_ranks(rank: Rank) -> None:
    by_norm, by_value = in_plain_torch(norm=0.05), in_plain_torch(value=0.002)
    for size in (1, 2, 4):
        for kind in (Net, Fused, ThroughLightning, ThroughTheStrategy):
            net = kind()
            clip = {"gradient_clip_val": 0.05} if kind in (Net, Fused) else {}
            trainer(strategy=MoEClipStrategy(expert_parallel_size=size), **clip).fit(net, share_of(BATCHES, rank))
            assert worst_error(parameters(net), parameters(by_norm)) < TOLERANCE, f"{kind.__name__}, ep {size}"
            factors = gather_objects(net.factors)
            assert all(factor == factors[0] for factor in factors)
            assert all(0 < factor < 1 for factor in factors[0])
        net = Fused()
        value = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
        trainer(strategy=MoEClipStrategy(expert_parallel_size=size), **value).fit(net, share_of(BATCHES, rank))
        assert worst_error(parameters(net), parameters(by_value)) < TOLERANCE


@on_ranks(2)
def clips_past_us(rank: Rank) -> None:
    trainer(strategy=MoEClipStrategy(expert_parallel_size=2)).fit(PastUs(), share_of(BATCHES, rank))


def test_clipping_by_hand_with_experts_spread_is_caught_on_every_rank() -> None:
    with pytest.raises(RanksFailed, match="configure_gradient_clipping changed gradients by itself") as caught:
        clips_past_us.launch()
    assert set(caught.value.failures) == {0, 1}
    assert all("clip_grad_norm_" in why for why in caught.value.failures.values())


class Half(LightningModule):
    """Overflows in one layer: in a step on one rank alone, in the next on all."""

    is_fused = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.history: list[tuple] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.b(self.a(batch.float()).tanh()).float().pow(2).mean()

    def on_after_backward(self) -> None:
        batch_idx = self.trainer.fit_loop.batch_idx
        if batch_idx == 2 or (batch_idx == 1 and self.global_rank == 1):
            self.b.bias.grad[0] = float("inf")  # as a user's hook may do

    def on_train_batch_end(self, *_: Any) -> None:
        weights = torch.cat([p.detach().flatten() for p in self.parameters()])
        self.history.append((float(self.trainer.precision_plugin.scaler.get_scale()), weights.numpy().tobytes()))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.is_fused)


class HalfFused(Half):
    is_fused = True


class HalfSGD(Half):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


@on_ranks(2)
def test_infinite_gradient_on_one_rank_skips_the_step_on_all(rank: Rank) -> None:
    for kind in (Half, HalfFused, HalfSGD):
        for clip in (None, 0.05):
            net = kind()
            precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
            trainer(plugins=[precision], gradient_clip_val=clip).fit(net, share_of(BATCHES, rank))
            assert all(other == net.history for other in gather_objects(net.history)), kind.__name__
            scales, weights = zip(*net.history, strict=True)
            assert scales == (256.0, 128.0, 64.0, 64.0)
            assert weights[0] == weights[1] == weights[2] != weights[3]


class Calm(Half):
    """No overflow; SGD, in which an error of a gradient is an error of the step and no more."""

    def on_after_backward(self) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, fused=self.is_fused)


class CalmFused(Calm):
    is_fused = True


@on_ranks(2)
def test_scaled_training_equals_unscaled_within_half_precision(rank: Rank) -> None:
    for kind in (Calm, CalmFused):
        for clip in (None, 0.05):
            net, true = kind(), kind().double()
            precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
            trainer(plugins=[precision], gradient_clip_val=clip).fit(net, share_of(BATCHES, rank))
            optimizer = true.configure_optimizers()
            path = 0.0
            for batch in BATCHES:
                optimizer.zero_grad()
                true.b(true.a(batch).tanh()).pow(2).mean().backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(true.parameters(), clip)
                path += float(flat(true, of_gradients=True).norm())
                optimizer.step()
            # eleven bits of mantissa, and at most eight roundings between an input and a gradient: two products, their
            # operands, tanh, and as many on the way back
            assert float((flat(net) - flat(true)).norm()) < 8 * 2.0**-11 * path


def flat(module: nn.Module, *, of_gradients: bool = False) -> Tensor:
    return torch.cat([(p.grad if of_gradients else p.detach()).flatten().double() for p in module.parameters()])
