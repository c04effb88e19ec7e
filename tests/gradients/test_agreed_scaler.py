"""One loss scale for several losses, optimizers and micro-batches, at one small all-reduce per optimizer step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.gradients.region_scales import NUM_FIELDS
from lightning_moeclip.gradients.scaling import AgreedGradScaler, ScalingSettings
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, logged_collectives, parameters, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(6, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Automatic(LightningModule):
    """Dense layers and experts in float64, which autocast leaves alone; one optimizer."""

    def __init__(self, make: Make = sgd, *, overflow: tuple[int, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.make = make
        self.overflow = overflow  # batch and rank
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = TinyExperts(DIM, 4)
        self.seen: list[tuple[float, int]] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.experts(self.dense(batch)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_after_backward(self) -> None:
        if self.overflow == (self.trainer.fit_loop.batch_idx, self.global_rank):
            self.experts.weight.grad[0, 0, 0] = torch.inf

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.precision_plugin.state_dict()  # decides what is still open
        self.seen.append((state["scale"], state["_growth_tracker"]) if state else (1.0, 0))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Manual(Automatic):
    """An optimizer of the dense layer, which has two losses, and one of the experts, which may rest."""

    def __init__(self, make: Make = sgd, *, resting: tuple[int, ...] = (), **arguments: Any) -> None:
        super().__init__(make, **arguments)
        self.automatic_optimization = False
        self.resting = resting

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.experts.are_resting = self.global_rank in self.resting
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = self.dense(batch)
        self.manual_backward(hidden.square().mean(), retain_graph=True)
        self.manual_backward(self.experts(hidden).square().mean())
        for optimizer in optimizers:
            optimizer.step()

    def on_after_backward(self) -> None:
        if self.experts.weight.grad is not None:
            super().on_after_backward()

    def configure_optimizers(self) -> Any:
        return [self.make(self.dense.parameters()), self.make(self.experts.parameters())]


def in_half(net: LightningModule, rank: Rank, *, ep: int = 2, interval: int = 2000, **arguments: Any) -> None:
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0, growth_interval=interval)
    strategy = MoEClipStrategy(expert_parallel_size=ep)
    trainer(strategy=strategy, plugins=[precision], **arguments).fit(net, share_of(BATCHES, rank))
    assert gather_objects(net.seen) == [net.seen] * rank.world_size


def in_plain_torch(make: Make, *, num_resting: int = 0, skipped: tuple[int, ...] = ()) -> Manual:
    """The two losses and two optimizers in one process; the last experts rest, the experts' steps in ``skipped``."""
    net = Manual(make)
    optimizers = net.configure_optimizers()
    for index, batch in enumerate(BATCHES):
        hidden = net.dense(batch)
        weight = net.experts.weight
        keeps = weight.shape[0] - num_resting
        whole = torch.cat([weight[:keeps], weight[keeps:].detach()])
        y = torch.einsum("td,edf->etf", hidden, whole).tanh().sum(0)
        (hidden.square().mean() + y.square().mean()).backward()
        optimizers[0].step()
        if index not in skipped and keeps:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return net


@on_ranks(2)
def test_case_12_two_losses_and_a_second_optimizer_without_gradients_have_one_scale(rank: Rank) -> None:
    for make in (sgd, fused):
        for resting, num_resting in (((), 0), ((0, 1), 4)):
            for size in (1, 2):
                net = Manual(make, resting=resting)
                in_half(net, rank, ep=size, interval=2)
                # one update per step, whatever the number of losses and optimizers
                assert net.seen == [(256.0, 1), (512.0, 0), (512.0, 1), (1024.0, 0), (1024.0, 1), (2048.0, 0)]
                true = in_plain_torch(make, num_resting=num_resting)
                assert worst_error(parameters(net), parameters(true)) < TOLERANCE


@on_ranks(2)
def test_an_optimizer_without_gradients_on_one_rank_steps_on_the_other_and_skips_with_it(rank: Rank) -> None:
    net = Manual(sgd, resting=(1,))
    in_half(net, rank)
    assert worst_error(parameters(net), parameters(in_plain_torch(sgd, num_resting=2))) < TOLERANCE
    for make in (sgd, fused):
        net = Manual(make, resting=(1,), overflow=(2, 0))
        in_half(net, rank)
        assert [scale for scale, _ in net.seen] == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]
        if make is sgd:
            true = in_plain_torch(make, num_resting=2, skipped=(2,))
            assert worst_error(parameters(net), parameters(true)) < TOLERANCE


class BothOverflow(Manual):
    """Both optimizers find something in the same step, on different ranks; one step, one halving."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 2 and self.experts.weight.grad is not None:
            (self.dense if self.global_rank == 0 else self.experts).weight.grad.fill_(torch.inf)


@on_ranks(2)
def test_two_optimizers_that_overflow_in_one_step_halve_the_scale_once(rank: Rank) -> None:
    for make in (sgd, fused):
        net = BothOverflow(make)
        in_half(net, rank)
        assert [scale for scale, _ in net.seen] == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]


class Alternating(Manual):
    """As in adversarial training: one optimizer steps on even batches, the other on odd ones."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@on_ranks(2)
def test_optimizers_that_take_turns_share_one_scale(rank: Rank) -> None:
    net = Alternating(sgd, overflow=(3, 1))
    in_half(net, rank, interval=3)
    assert net.seen == [(256.0, 1), (256.0, 2), (512.0, 0), (256.0, 0), (256.0, 1), (256.0, 2)]


class Accumulating(Manual):
    """Manual optimization over pairs of batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


@on_ranks(2)
def test_overflow_in_the_first_micro_batch_of_one_rank_skips_that_step_alone(rank: Rank) -> None:
    for kind, arguments in ((Automatic, {"accumulate_grad_batches": 2}), (Accumulating, {})):
        for make in (sgd, fused):
            net = kind(make, overflow=(2, 1))
            in_half(net, rank, interval=2, **arguments)
            # steps after batches 1, 3 and 5; the second one is skipped
            assert net.seen == [(256.0, 0), (256.0, 1), (256.0, 1), (128.0, 0), (128.0, 0), (128.0, 1)]
            true = Automatic(make)
            optimizers = make(true.dense.parameters()), make(true.experts.parameters())
            for number, (first, second) in enumerate(BATCHES.view(3, 2, *BATCHES.shape[1:])):
                ((true.loss(first) + true.loss(second)) / 2).backward()
                for index, optimizer in enumerate(optimizers):
                    # with an optimizer of its own the dense layer is stepped all the same
                    if number != 1 or (kind is Accumulating and index == 0):
                        optimizer.step()
                    optimizer.zero_grad()
            assert worst_error(parameters(net), parameters(true)) < TOLERANCE


def num_all_reduces(kind: type[Automatic], precision: str, rank: Rank, **arguments: Any) -> tuple[int, int]:
    """All-reduces of a run, and how many of them are as small as what the scaler sums."""
    net = kind(fused if kind is Automatic else sgd)
    plugin = MoEClipPrecision(precision, device="cpu")
    strategy = MoEClipStrategy(expert_parallel_size=2)
    with logged_collectives() as log:
        trainer(strategy=strategy, plugins=[plugin], **arguments).fit(net, share_of(BATCHES, rank))
    sizes = [size for name, _, size in log if name == "all_reduce"]
    return len(sizes), sizes.count(NUM_FIELDS)


@on_ranks(2)
def test_loss_scaling_is_one_small_all_reduce_per_optimizer_step(rank: Rank) -> None:
    for kind, arguments, num_steps in (
        (Automatic, {}, 6),
        (Automatic, {"gradient_clip_val": 0.05}, 6),
        (Automatic, {"accumulate_grad_batches": 3}, 2),
        (Manual, {}, 12),
        (Accumulating, {}, 6),
    ):
        plain, plain_small = num_all_reduces(kind, "32-true", rank, **arguments)
        scaled, scaled_small = num_all_reduces(kind, "16-mixed", rank, **arguments)
        assert (scaled - plain, scaled_small - plain_small) == (num_steps, num_steps), kind.__name__


@on_ranks(2)
def test_the_scaler_by_itself_agrees_also_where_nobody_unscales_before_the_step(rank: Rank) -> None:
    for make in (sgd, fused):
        for bad, resting in ((0, None), (1, None), (0, 1), (1, 0)):
            weight = nn.Parameter(torch.ones(3))
            optimizer = make([weight])
            scaler = AgreedGradScaler("cpu", ScalingSettings(init_scale=256.0))
            scaler.join(torch.distributed.group.WORLD, scaler.scales)
            for is_bad in (True, False):
                weight.grad = None
                scaler.scale(weight.sum()).backward()
                if is_bad and rank.index == bad:
                    weight.grad[0] = torch.nan
                if rank.index == resting:
                    weight.grad = None
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == 128.0
                assert torch.equal(weight, torch.ones(3)) is (is_bad or rank.index == resting)
