"""Float32 masters of 16-bit parameters: what small steps leave, what gradients are, and who sees an edit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.gradients.master_parameter import MasterParameter
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.narrow_clip import DIM, Clip, fit, held_by, masters, pairs
from tests.models import loader, quiet_trainer

UNIT = 2.0**-24  # rounding of float32


class Regression(LightningModule):
    """The loss falls by a few percent in 200 small steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0].to(self.net[0].weight.dtype)).float() - batch[1]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def decrease(plugin: MoEClipPrecision) -> float:
    """By how much 200 steps lower the loss of the module that the run leaves, computed in float64."""
    generator = torch.Generator().manual_seed(1)
    inputs, weights = torch.randn(200, 64, 16, generator=generator), torch.randn(16, 1, generator=generator)
    data = [(x, torch.tanh(x @ weights)) for x in inputs]

    def loss_of(module: Regression) -> float:
        x, y = (torch.cat(part).double() for part in zip(*data[:40], strict=True))
        with torch.no_grad():
            return float((module.double().net(x) - y).square().mean())

    module = Regression()
    quiet_trainer(1, plugins=[plugin]).fit(module, loader(data))
    return loss_of(Regression()) - loss_of(module)


@on_ranks(1, timeout_s=180.0)
def test_200_small_steps_in_bfloat16_learn_like_float32_with_masters_and_next_to_nothing_without(rank: Rank) -> None:
    wide = decrease(MoEClipPrecision("32-true"))
    with_masters, plain = decrease(masters()) / wide, decrease(MoEClipPrecision("bf16-true")) / wide
    print(f"decrease of the loss relative to float32: with masters {with_masters:.3f}, plain bf16-true {plain:.3f}")
    assert abs(with_masters - 1) < 0.05
    assert plain < 0.5


def gradients_of_a_step(rank: Rank, precision: str, ep: int, accumulate: int) -> dict[str, Any]:
    module = Clip()
    trainer = quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        plugins=[masters(precision, **({"init_scale": 64.0} if precision == "16-true" else {}))],
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, loader([(x[rank.index :: 4], y[rank.index :: 4]) for x, y in pairs(accumulate)]))
    return {"arrived": module.arrived, "reduced": module.reduced}


@on_ranks(1)
def on_1(rank: Rank, **how: Any) -> dict[str, Any]:
    return gradients_of_a_step(rank, **how)


@on_ranks(2)
def on_2(rank: Rank, **how: Any) -> dict[str, Any]:
    return gradients_of_a_step(rank, **how)


@on_ranks(4)
def on_4(rank: Rank, **how: Any) -> dict[str, Any]:
    return gradients_of_a_step(rank, **how)


@pytest.mark.parametrize(
    ("launch", "precision", "ep", "accumulate"),
    [
        (on_1, "bf16-true", 1, 3),
        (on_1, "16-true", 1, 3),
        (on_2, "bf16-true", 1, 1),
        (on_2, "16-true", 2, 3),
        (on_4, "bf16-true", 2, 3),
        (on_4, "16-true", 4, 2),
    ],
)
def test_gradient_of_a_master_is_the_float32_sum_of_what_autograd_left_on_each_rank(
    launch: Any, precision: str, ep: int, accumulate: int
) -> None:
    ranks = launch.launch(precision=precision, ep=ep, accumulate=accumulate)
    scale = 64.0 if precision == "16-true" else 1.0
    num_coarse = 0
    for index, found in enumerate(ranks):
        assert {"stem.weight", "moe.w_in", "moe.w_out", "head.bias"} <= found["arrived"].keys()
        for name in found["arrived"]:
            is_slice = name in ("moe.w_in", "moe.w_out")
            replicas = [r for r in range(len(ranks)) if not is_slice or r % ep == index % ep]
            parts = torch.stack([g for r in replicas for g in ranks[r]["arrived"][name]])
            assert len(parts) == accumulate * len(replicas)
            true = parts.double().sum(0) / (len(ranks) * scale)
            # dividing by powers of two is exact; a sum of n terms is wrong by (n - 1) u times the sum of their sizes
            bound = (len(parts) - 1) * UNIT * parts.double().abs().sum(0) / (len(ranks) * scale)
            gradient = found["reduced"][name]
            assert gradient.dtype is torch.float32
            assert ((gradient.double() - true).abs() <= bound).all(), name
            dtype = torch.float16 if precision == "16-true" else torch.bfloat16
            coarse = parts[0].to(dtype)
            for part in parts[1:]:
                coarse += part.to(dtype)
            num_coarse += bool(((coarse.double() / (len(ranks) * scale) - true).abs() > bound).any())
        assert found["reduced"].keys() - found["arrived"].keys() == {"loss.logit_scale", "moe.router.weight"}
        assert all(torch.equal(g, ranks[index % ep]["reduced"][n]) for n, g in found["reduced"].items())
    assert num_coarse > 0 or accumulate * len(ranks) == 1, "summing in 16 bits would have passed as well"


class Editing(Clip):
    """Writes into the 16-bit weights of the second step, before it or just before the optimizer does."""

    def __init__(self, *, hook: str) -> None:
        super().__init__(lr=1e-6)
        self.hook = hook

    def edit(self, hook: str, step: int) -> None:
        if (self.hook, 1) == (hook, step):
            self.before = held_by(self.trainer)[0].detach().clone()
            with torch.no_grad():
                self.stem.weight[0].fill_(1.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.edit("on_train_batch_start", batch_idx)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.edit("on_before_optimizer_step", self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.after = held_by(self.trainer)[0].detach().clone()


@on_ranks(1)
def test_edit_of_a_16_bit_parameter_survives_the_next_step_and_the_rest_keeps_its_digits(rank: Rank) -> None:
    for hook in ("on_train_batch_start", "on_before_optimizer_step"):
        module = Editing(hook=hook)
        trainer = fit(module, pairs(2))
        assert held_by(trainer)[0].model_parameter is module.stem.weight
        # AdamW moves by lr at most, and a little by its decay
        assert (module.after[0] - 1.5).abs().max() < 3e-6
        assert (module.after[1:] - module.before[1:]).abs().max() < 3e-6
        assert not torch.equal(module.after, module.after.bfloat16().float())
        assert torch.equal(module.stem.weight[0], torch.full((DIM,), 1.5, dtype=torch.bfloat16))


class ClippedWeights(Clip):
    """Bounds the weights where the optimizer holds them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            held_by(self.trainer)[0].clamp_(-0.01, 0.01)

    def on_before_backward(self, loss: Tensor) -> None:
        self.largest = float(self.stem.weight.abs().max())


@on_ranks(1)
def test_edit_of_a_master_is_what_the_next_forward_computes_with(rank: Rank) -> None:
    module = ClippedWeights(lr=1e-3)
    fit(module, pairs(2))
    assert module.largest <= 0.01 + 2.0**-15


class Watching(Clip):
    """Asks what memory gradients take in the step."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, MasterParameter)]
        assert len(held) == len(list(self.parameters())) - 2  # logit_scale and the router are float32
        narrow = [master.model_parameter for master in held]
        assert {p.dtype for p in narrow} == {torch.bfloat16}
        assert all(p.grad.dtype is torch.float32 and p.grad is m.grad for p, m in zip(narrow, held, strict=True))
        corridor = self.trainer.strategy._corridor
        assert corridor.count_unplanned() == 0  # a master is no parameter that the plan has missed
        assert not corridor.is_outdated()
        reducer = corridor.reducer
        if reducer is not None:
            flat = {bucket.flat.untyped_storage().data_ptr() for bucket in reducer.buckets}
            assert {p.grad.untyped_storage().data_ptr() for p in narrow} <= flat
            assert sum(b.flat.numel() for b in reducer.buckets) == sum(p.numel() for p in self.parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in self.parameters())
        self.is_seen = True


@on_ranks(2)
def test_no_16_bit_gradient_is_kept_and_zero_grad_of_the_optimizer_clears_the_only_one(rank: Rank) -> None:
    module = Watching()
    fit(module, pairs(2), world_size=2, accumulate_grad_batches=2)
    assert module.is_seen


@on_ranks(1)
def test_no_16_bit_gradient_is_kept_on_one_process(rank: Rank) -> None:
    module = Watching()
    fit(module, pairs(2), accumulate_grad_batches=2)
    assert module.is_seen


@on_ranks(1)
def test_logit_scale_stays_float32_and_its_clamp_acts_on_what_the_optimizer_steps(rank: Rank) -> None:
    module = Clip(lr=1e-3)
    with torch.no_grad():
        module.loss.logit_scale.fill_(9.0)
    trainer = fit(module, pairs(1))
    assert module.loss.logit_scale.dtype is torch.float32
    assert any(p is module.loss.logit_scale for p in held_by(trainer))
    assert float(module.loss.logit_scale) == pytest.approx(4.6052, abs=1e-4)


@on_ranks(2)
def test_norm_of_masters_counts_each_parameter_once(rank: Rank) -> None:
    module = Clip()
    strategy = MoEClipStrategy(expert_parallel_size=2)
    fit(module, pairs(1), world_size=2, strategy=strategy, gradient_clip_val=1e-3)
    slices = {"moe.w_in", "moe.w_out"}
    square = sum(float(g.double().square().sum()) for n, g in module.reduced.items() if n not in slices)
    for name in slices:
        both = [torch.empty_like(module.reduced[name]) for _ in range(2)]
        torch.distributed.all_gather(both, module.reduced[name])
        square += sum(float(g.double().square().sum()) for g in both)
    assert float(strategy.report.total_norm) == pytest.approx(square**0.5, rel=1e-6)


@on_ranks(2)
def test_masters_start_as_those_of_the_first_rank_to_the_last_digit(rank: Rank) -> None:
    module, first = Clip(), Clip()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + rank.index * 1e-5)  # the same in 16 bits, nearly everywhere
    state = fit(module, pairs(1), world_size=2).strategy.lightning_module_state_dict()
    assert all(torch.equal(state[name], p) for name, p in first.named_parameters())


@on_ranks(1)
def test_master_weights_without_16_bit_parameters_warn(rank: Rank) -> None:
    with pytest.warns(UserWarning, match="precision='32-true': .* no 16-bit parameter.*Write precision='16-true'"):
        fit(Clip(), pairs(1), plugins=[masters("32-true")])


class WithValidation(Regression):
    def on_train_start(self) -> None:
        self.started = [p.detach().clone() for p in held_by(self.trainer)]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


@on_ranks(1)
def test_masters_start_with_all_digits_also_where_validate_came_first(rank: Rank) -> None:
    module = WithValidation()
    wide = [p.detach().clone() for p in module.parameters()]
    trainer = quiet_trainer(1, plugins=[masters()])
    batch = (torch.ones(2, 16), torch.ones(2, 1))
    trainer.validate(module, loader([batch]), verbose=False)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    trainer.fit(module, loader([batch]))
    assert all(torch.equal(master, value) for master, value in zip(module.started, wide, strict=True))
    assert not trainer.precision_plugin._originals
