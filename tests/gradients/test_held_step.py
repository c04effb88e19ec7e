"""A step that a callback holds on one rank is taken by none, and leaves no trace but its number."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule
from lightning_moeclip.gradients.boundary import Region
from lightning_moeclip.gradients.region_scales import RegionScales
from lightning_moeclip.gradients.scaling import AgreedGradScaler, ScalingSettings
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

HELD = 1


class Hold(Callback):
    """Holds step 1 on one rank, and keeps what it sees of every step."""

    may_hold_step = True

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.verdicts: list[tuple[bool, tuple[str, ...]]] = []
        self.scales: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.strategy.step_loss.item())
        if trainer.global_step == HELD and trainer.global_rank == self.rank:
            trainer.strategy.hold_step("not this one")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        verdict = trainer.strategy.report.verdict
        self.verdicts.append((verdict.holds_step, verdict.reasons))
        state = trainer.precision_plugin.state_dict()
        self.scales.append({name: state.get(name) for name in ("scale", "_growth_tracker")})


def fit(
    rank: Rank, holder: int | None, *, skips: bool, ep: int = 1, precision: str = "32-true", **arguments: Any
) -> Any:
    module = TwoTowers(has_own_moe=precision == "32-true")
    data = batches(4)
    if skips:  # what a held step amounts to: the batch was never there
        del data[HELD]
    hold = Hold(holder)
    plugin = MoEClipPrecision(
        precision, device="cpu", **({} if precision == "32-true" else {"init_scale": 8.0, "growth_interval": 2})
    )
    trainer = quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        callbacks=[hold],
        plugins=[plugin],
        **arguments,
    )
    trainer.fit(module, loader(share(data, [5, 3], rank.index)))
    return {n: p.detach().clone() for n, p in module.named_parameters()}, hold, trainer.global_step


@on_ranks(2)
def held_and_left_out(rank: Rank, holder: int, ep: int, precision: str, clip: float | None) -> Any:
    kind: dict[str, Any] = {"ep": ep, "precision": precision, "gradient_clip_val": clip}
    return fit(rank, holder, skips=False, **kind), fit(rank, None, skips=True, **kind)


@pytest.mark.parametrize(
    ("holder", "ep", "precision", "clip"),
    [(0, 1, "32-true", None), (1, 2, "32-true", 0.05), (1, 1, "16-mixed", None)],
)
def test_a_step_held_on_one_rank_equals_a_batch_that_was_never_there(
    holder: int, ep: int, precision: str, clip: float | None
) -> None:
    for rank, (held, left_out) in enumerate(
        held_and_left_out.launch(holder=holder, ep=ep, precision=precision, clip=clip)
    ):
        assert all(torch.equal(held[0][name], value) for name, value in left_out[0].items())
        assert [is_held for is_held, _ in held[1].verdicts] == [False, True, False, False]
        assert held[1].verdicts[HELD][1] == (("not this one",) if rank == holder else ())
        assert (held[2], left_out[2]) == (4, 3)
        # neither growth nor backoff for a step that was not taken
        assert [s for i, s in enumerate(held[1].scales) if i != HELD] == left_out[1].scales
        assert held[1].scales[HELD] == held[1].scales[HELD - 1]


@on_ranks(2)
def loss_of_a_step(rank: Rank, accumulate: int) -> list[list[float]]:
    hold = Hold(None)
    module = TwoTowers()
    trainer = quiet_trainer(2, callbacks=[hold], accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(share(batches(4), [4, 4], rank.index)))
    return [hold.losses, module.losses]


def test_loss_of_a_step_is_the_mean_over_its_micro_batches() -> None:
    for accumulate in (1, 2):
        told = loss_of_a_step.launch(accumulate=accumulate)
        steps = torch.tensor([losses for losses, _ in told], dtype=torch.float64).mean(0)
        wanted = torch.tensor(told[0][1], dtype=torch.float64).view(-1, accumulate).mean(1)
        torch.testing.assert_close(steps, wanted, rtol=1e-12, atol=0.0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_without_a_loss_on_one_process_has_none() -> None:
    class Now(TwoTowers):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
            return None if batch_idx == 1 else self.compute_loss(batch)

        def on_train_batch_end(self, *args: object) -> None:
            pass

    hold = Hold(None)
    quiet_trainer(1, callbacks=[hold]).fit(Now(), loader(batches(3)))
    assert [loss == 0.0 for loss in hold.losses] == [False, True, False]


class TwoOptimizers(LightningModule):
    """Two layers, an optimizer each, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), self.layers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in self.layers]


class HoldSecond(Callback):
    """Holds the second optimizer of the first batch."""

    may_hold_step = True

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if optimizer is trainer.optimizers[1] and module.global_rank == 1:
            trainer.strategy.hold_step("no")


@on_ranks(2)
def hold_second(rank: Rank) -> list[bool]:
    module = TwoOptimizers()
    before = [layer.weight.detach().clone() for layer in module.layers]
    trainer = quiet_trainer(2, callbacks=[HoldSecond()], limit_train_batches=1)
    trainer.fit(module, loader([torch.ones(2, 3, dtype=torch.float64)]))
    return [torch.equal(a, layer.weight) for a, layer in zip(before, module.layers, strict=True)]


def test_of_two_optimizers_the_one_that_is_held_stays() -> None:
    assert hold_second.launch() == [[False, True]] * 2


class HoldFirstOptimizer(Callback):
    """Holds the first optimizer of a batch, and reads the verdict when the batch is over."""

    may_hold_step = True

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if optimizer is trainer.optimizers[0]:
            trainer.strategy.hold_step("no")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.verdict = trainer.strategy.report.verdict


@on_ranks(2)
def hold_first_optimizer(rank: Rank) -> Any:
    callback = HoldFirstOptimizer()
    trainer = quiet_trainer(2, callbacks=[callback], limit_train_batches=1)
    trainer.fit(TwoOptimizers(), loader([torch.ones(2, 3, dtype=torch.float64)]))
    return callback.verdict.holds_step, callback.verdict.reasons


def test_the_verdict_of_a_batch_tells_of_each_of_its_optimizers() -> None:
    assert hold_first_optimizer.launch() == [(True, ("no",))] * 2


class HoldsOverflow(Callback):
    """Holds every step whose gradients are not finite, as a user's callback might."""

    may_hold_step = True

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if not trainer.strategy.reduce_sums(trainer.strategy.gradient_square()[None]).isfinite():
            trainer.strategy.hold_step("not finite")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append((trainer.precision_plugin.state_dict()["scale"], trainer.strategy.report.verdict.holds_step))


@on_ranks(2)
def hold_overflow(rank: Rank) -> Any:
    class Overflowing(TwoTowers):
        def on_after_backward(self) -> None:
            if self.trainer.precision_plugin.scaler.get_scale() > 4:
                self.image.stem.weight.grad[0, 0] = torch.inf

    callback = HoldsOverflow()
    plugin = MoEClipPrecision("16-mixed", device="cpu", init_scale=16.0)
    trainer = quiet_trainer(2, callbacks=[callback], plugins=[plugin])
    trainer.fit(Overflowing(has_own_moe=False), loader(share(batches(4), [4, 4], rank.index)))
    return callback.seen


def test_an_overflow_in_a_held_step_lowers_the_loss_scale_as_ever() -> None:
    assert hold_overflow.launch() == [[(8.0, True), (4.0, True), (4.0, False), (4.0, False)]] * 2


def test_what_a_boundary_saw_in_a_held_step_blames_nobody_in_the_next() -> None:
    region = Region("head", device=torch.device("cpu"))
    scaler = AgreedGradScaler("cpu", ScalingSettings(loss_scaling="local", init_scale=1024.0))
    inside, outside = (nn.Parameter(torch.ones(2)) for _ in range(2))
    scales = RegionScales([region], growth_interval=2000, device="cpu")
    scaler.join(None, scales, lambda p: int(p is inside))
    optimizer = torch.optim.SGD([inside, outside], lr=0.1)
    scaler.scale(torch.ones(()))
    region.events[1:] = 1.0  # something overflowed inside, and cotangents came in
    inside.grad, outside.grad = torch.ones(2), torch.ones(2)
    scaler.unscale_(optimizer)
    assert not scaler.has_overflowed(optimizer)
    scaler.forget(optimizer)
    inside.grad, outside.grad = torch.ones(2), torch.full((2,), torch.inf)
    region.events[2] = 1.0
    scaler.unscale_(optimizer)
    assert scaler.has_overflowed(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert region.scale == 1.0
    assert scaler.scales.num_overflows.tolist() == [1.0, 0.0]


class Careless(Hold):
    may_hold_step = False


@on_ranks(2)
def hold_without_saying_so(rank: Rank) -> None:
    quiet_trainer(2, callbacks=[Careless(1)]).fit(TwoTowers(), loader(share(batches(2), [4, 4], rank.index)))


@on_ranks(2)
def holder_on_one_rank(rank: Rank) -> None:
    callbacks = [Hold(0)] if rank.index else []
    quiet_trainer(2, callbacks=callbacks).fit(TwoTowers(), loader(share(batches(2), [4, 4], rank.index)))


@on_ranks(2)
def hold_lbfgs(rank: Rank) -> None:
    class Lbfgs(TwoTowers):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    quiet_trainer(2, callbacks=[Hold(0)]).fit(Lbfgs(), loader(share(batches(2), [4, 4], rank.index)))


def test_what_cannot_be_held_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(RanksFailed, match="may_hold_step = True"):
        hold_without_saying_so.launch()
    with pytest.raises(RanksFailed, match="callbacks that may hold a step") as failed:
        holder_on_one_rank.launch()
    assert set(failed.value.failures) == {0, 1}
    with pytest.raises(RanksFailed, match=r"LBFGS with a callback .* Leave out ResidualResync and CosineRollback"):
        hold_lbfgs.launch()


@on_ranks(2)
def first_step_held_with_a_scheduler(rank: Rank) -> float:
    class Scheduled(TwoTowers):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class HoldFirst(Callback):
        may_hold_step = True

        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.hold_step("first")

    module = Scheduled()
    quiet_trainer(2, callbacks=[HoldFirst()], limit_train_batches=1).fit(
        module, loader(share(batches(1), [4, 4], rank.index))
    )
    return module.optimizers().param_groups[0]["lr"]


def test_schedulers_go_on_past_a_held_first_step_without_a_warning() -> None:
    assert first_step_held_with_a_scheduler.launch() == [0.5, 0.5]
