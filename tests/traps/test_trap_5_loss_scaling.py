"""Trap 5: with its own loss scale a rank skips a step that others take, and fused optimizers step on summed flags."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

NUM_EXPERTS = DIM = 8
ROWS = 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}
HOW = [("sgd", None), ("sgd", 0.1), ("adamw", None), ("fused adamw", None), ("fused adamw", 0.1)]
# largest difference of a shared weight after the one step that only one of two ranks took
APART = {"sgd": 0.0151, "adamw": 0.00846, "fused adamw": 0.00846}
Seen = list[tuple[float, int, bytes, bytes]]


class Experts(LightningModule):
    """A row goes to the expert that it names; the first expert of each rank has hidden units of some 10,000.

    Its outputs and the cotangents inside are as small as the others', but the gradient of its second layer is the
    product of both, beyond float16 at a loss scale of 128 and more. No other gradient on any rank is.
    """

    def __init__(self, world_size: int, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.optimizer = optimizer
        self.moe = MoE(DIM, 8, NUM_EXPERTS, top_k=1, normalize_topk=False, activation="relu")
        self.head = nn.Linear(DIM, 2)
        hot = list(range(0, NUM_EXPERTS, NUM_EXPERTS // world_size))
        with torch.no_grad():
            self.moe.router.weight.copy_(10 * torch.eye(NUM_EXPERTS))
            self.moe.w_in[hot], self.moe.w_out[hot] = 5e3, 1e-5
            self.head.weight.copy_(torch.linspace(0.5, 1.0, 2 * DIM).view(2, DIM))
        self.seen: Seen = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.head(self.moe(batch)).float() - 1).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.look(self.trainer.precision_plugin.scaler)

    def look(self, scaler: torch.amp.GradScaler) -> None:
        """Scale, growth tracker, weights that every rank has, and this rank's experts."""
        own = torch.cat([p.detach().flatten() for p in (self.moe.w_in, self.moe.w_out)])
        state = scaler.state_dict()
        self.seen.append((state["scale"], state["_growth_tracker"], self.shared(), own.numpy().tobytes()))

    def shared(self) -> bytes:
        weights = (self.moe.router.weight, *self.head.parameters())
        return torch.cat([p.detach().flatten() for p in weights]).numpy().tobytes()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def rows(rank: Rank, *hot: int | None) -> list[Tensor]:
    """Batches of a rank, in each of which rank 0 sends a row to the hot expert of one rank, or of none."""
    generator = torch.Generator().manual_seed(rank.index)
    share = NUM_EXPERTS // rank.world_size
    batches = []
    for owner in hot:
        experts = [1] * ROWS
        if owner is not None and rank.index == 0:
            experts[0] = owner * share
        # positive features: relu lets them through
        noise = 0.1 * torch.rand(ROWS, DIM, generator=generator)
        batches.append(3 * torch.eye(NUM_EXPERTS)[experts] + noise)
    return batches


def floats(weights: bytes) -> list[float]:
    return torch.frombuffer(bytearray(weights), dtype=torch.float32).tolist()


def by_hand(rank: Rank, optimizer: str, *, hot: int) -> Seen:
    """Spread experts, gradients that are all reduced rightly, and one stock scaler per rank."""
    module = Experts(rank.world_size, optimizer)
    axis = Mesh.build(rank.world_size).experts
    assert axis is not None
    module.moe.shard_experts(axis)
    stepper, scaler = module.configure_optimizers(), torch.amp.GradScaler("cpu", init_scale=256.0)
    for index, batch in enumerate(rows(rank, None, hot)):
        stepper.zero_grad()
        with axis.opened(), torch.autocast("cpu", torch.float16):
            scaler.scale(module.training_step(batch, index)).backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            if parameter is not module.moe.w_in and parameter is not module.moe.w_out:
                dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size
        scaler.step(stepper)
        scaler.update()
        module.look(scaler)
    return module.seen


def ours(rank: Rank, optimizer: str, clip: float | None) -> Seen:
    """Overflow on each rank in turn, and two clean steps after each, after which the scale doubles."""
    module = Experts(rank.world_size, optimizer)
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0, growth_interval=2)
    strategy = MoEClipStrategy(expert_parallel_size=rank.world_size)
    turns = [step for owner in range(rank.world_size) for step in (owner, None, None)]
    quiet_trainer(rank.world_size, strategy=strategy, plugins=[precision], gradient_clip_val=clip).fit(
        module, loader(rows(rank, *turns))
    )
    return module.seen


@on_ranks(2)
def by_hand_on_2(rank: Rank) -> dict[tuple[str, int], Seen]:
    return {(name, hot): by_hand(rank, name, hot=hot) for name in OPTIMIZERS for hot in (0, 1)}


@on_ranks(2)
def ours_on_2(rank: Rank) -> dict[tuple[str, float | None], Seen]:
    return {how: ours(rank, *how) for how in HOW}


@on_ranks(4)
def ours_on_4(rank: Rank) -> dict[tuple[str, float | None], Seen]:
    return {how: ours(rank, *how) for how in HOW}


def test_stock_scalers_end_at_256_and_128_and_shared_weights_differ() -> None:
    runs = by_hand_on_2.launch()
    for optimizer, hot in runs[0]:
        calm, other = [run[optimizer, hot] for run in runs], 1 - hot
        assert [seen[0][:2] for seen in calm] == [(256.0, 1), (256.0, 1)]
        assert calm[0][0][2] == calm[1][0][2], "no overflow, no difference"
        assert (calm[hot][1][:2], calm[other][1][:2]) == ((128.0, 0), (256.0, 2))
        assert calm[hot][1][2] == calm[hot][0][2], "skipped"
        apart = max(abs(x - y) for x, y in zip(*(floats(seen[1][2]) for seen in calm), strict=True))
        assert apart == pytest.approx(APART[optimizer], rel=0.01), (optimizer, hot)


@pytest.mark.parametrize(("run", "world_size"), [(ours_on_2, 2), (ours_on_4, 4)])
def test_ours_has_one_scale_one_tracker_one_decision_and_the_same_bits_on_all_ranks(run: Any, world_size: int) -> None:
    runs = run.launch()
    for optimizer, clip in HOW:
        ranks = [found[optimizer, clip] for found in runs]
        for seen in ranks:
            assert [shared[:3] for shared in seen] == [shared[:3] for shared in ranks[0]]
            assert [step[:2] for step in seen] == [(128.0, 0), (128.0, 1), (256.0, 0)] * world_size
            # neither shared weights nor anybody's experts move in a skipped step, and the shared ones do in the others
            stays = [(after[2] == before[2], after[3] == before[3]) for before, after in pairwise(seen)]
            assert [shared for shared, _ in stays] == ([False, False, True] * world_size)[:-1]
            assert all(own for _, own in stays[2::3])
        assert ranks[0][0][2] == Experts(world_size, optimizer).shared(), "the first step is skipped too"


@pytest.mark.parametrize(("flag", "is_skipped"), [(1.0, True), (2.0, False)])
def test_fused_optimizer_steps_on_a_sum_of_two_flags(flag: float, *, is_skipped: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), torch.nan)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(weight.sum())  # makes the scale
    scaler.unscale_(optimizer)
    # what an all-reduce of the flags of two ranks leaves, one flag each
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][torch.device("cpu")].fill_(flag)
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.ones(3)) is is_skipped
    assert bool(weight.isnan().all()) is not is_skipped


class Dense(LightningModule):
    """A NaN in the gradient on each rank of as many as are asked for."""

    def __init__(self, num_bad: int) -> None:
        super().__init__()
        self.weight, self.num_bad = nn.Parameter(torch.ones(3)), num_bad

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return (self.weight * batch).sum()

    def on_after_backward(self) -> None:
        if self.global_rank < self.num_bad:
            self.weight.grad.fill_(torch.nan)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


@on_ranks(4)
def test_fused_optimizer_skips_under_ours_when_one_two_or_all_ranks_find_nan(rank: Rank) -> None:
    for num_bad in (1, 2, 4):
        module = Dense(num_bad)
        precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
        quiet_trainer(4, plugins=[precision]).fit(module, loader([torch.ones(3)]))
        assert torch.equal(module.weight.detach(), torch.ones(3))
        assert precision.scaler.get_scale() == 128.0
    module = Dense(0)
    quiet_trainer(4, plugins=[MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)]).fit(
        module, loader([torch.ones(3)])
    )
    assert not torch.equal(module.weight.detach(), torch.ones(3))
