"""Masters behind optimizers: toggled, raw, skipped, extended, refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.gradients.master_parameter import MasterParameter
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.narrow_clip import DIM, Clip, fit, held_by, masters, pairs


class Script(LightningModule):
    """Two optimizers in turn, on parts that share nothing."""

    def __init__(self, step: Callable[["Script", Tensor], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.step = step
        self.maker, self.critic = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.gradients: list[dict[str, Tensor | None]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.step(self, batch[0].to(self.maker.weight.dtype))

    def note(self) -> None:
        self.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in self.named_parameters()})

    def configure_optimizers(self) -> list[Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (self.maker, self.critic)]


def toggled(module: Script, x: Tensor) -> None:
    for optimizer in module.optimizers():
        with optimizer.toggle_model():
            module.manual_backward(module.critic(module.maker(x)).square().mean())
            module.note()
            optimizer.step()
            optimizer.zero_grad()


def raw(module: Script, x: Tensor) -> None:
    before = module.maker.weight.detach().clone()
    optimizer, _ = module.optimizers(use_pl_optimizer=False)
    module.critic(module.maker(x)).square().mean().mul(64).backward()
    module.trainer.strategy.clip_grad_norm_(1e9)
    held = optimizer.param_groups[0]["params"][0]
    wanted = held.detach().add(held.grad, alpha=-1e-3)
    optimizer.step()
    assert torch.equal(held, wanted)
    assert torch.equal(module.maker.weight, wanted.bfloat16())
    assert not torch.equal(module.maker.weight, before)


@on_ranks(2)
def test_toggled_optimizer_switches_gradients_of_the_others_off(rank: Rank) -> None:
    module = Script(toggled)
    fit(module, pairs(1), world_size=2)
    first, second = ({n for n, g in step.items() if g is not None} for step in module.gradients)
    assert first == {"maker.weight", "maker.bias"}
    assert second == {"critic.weight", "critic.bias"}
    assert all(p.requires_grad for p in module.parameters())


@on_ranks(2)
def test_raw_optimizer_and_raw_backward_step_the_masters(rank: Rank) -> None:
    fit(Script(raw), pairs(2), world_size=2)


class Overflowing(Clip):
    """Rank 1 overflows in the second of three steps; each step notes the masters behind it."""

    is_fused = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if (self.global_rank, batch_idx) == (1, 1) else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps = [*getattr(self, "steps", []), [p.detach().clone() for p in held_by(self.trainer)]]

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.is_fused)


class FusedOverflowing(Overflowing):
    is_fused = True


@on_ranks(2)
def test_step_that_the_scaler_skips_moves_no_master_on_any_rank(rank: Rank) -> None:
    for kind in (Overflowing, FusedOverflowing):
        module = kind()
        fit(module, pairs(3), world_size=2, plugins=[masters("16-true", init_scale=64.0)])
        assert module.trainer.precision_plugin.scaler.get_scale() == 32.0
        first, second, third = module.steps
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(second, third, strict=True))


class Finetuned(Clip):
    """Takes the head into the optimizer in the second epoch, and wrongly the stem once more."""

    is_duplicate = False

    def configure_optimizers(self) -> Optimizer:
        self.head.requires_grad_(False)
        return torch.optim.AdamW([*self.stem.parameters(), *self.moe.parameters()], lr=1e-3)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.requires_grad_(True)
            added = [*self.head.parameters(), *(self.stem.parameters() if self.is_duplicate else ())]
            self.trainer.optimizers[0].add_param_group({"params": added})


class Duplicated(Finetuned):
    is_duplicate = True


def check_finetuned(module: Clip, world_size: int) -> None:
    trainer = fit(module, pairs(1), world_size=world_size, max_epochs=2)
    groups = trainer.optimizers[0].param_groups
    assert [len(group["params"]) for group in groups] == [2 + len(list(module.moe.parameters())), 2]
    assert sum(isinstance(p, MasterParameter) for group in groups for p in group["params"]) == 6
    assert {"head.weight", "stem.weight"} <= module.reduced.keys()
    assert torch.equal(module.head.weight, groups[1]["params"][0].bfloat16())


@on_ranks(2)
def test_parameters_that_a_callback_adds_get_masters(rank: Rank) -> None:
    for kind in (Finetuned, Duplicated):
        check_finetuned(kind(), 2)


@on_ranks(1)
def test_parameters_that_a_callback_adds_get_masters_on_one_process(rank: Rank) -> None:
    for kind in (Finetuned, Duplicated):
        check_finetuned(kind(), 1)


class WithLBFGS(Clip):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters())


@on_ranks(1)
def test_lbfgs_is_refused(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"LBFGS: it moves .* Use another optimizer, or precision='32-true'"):
        fit(WithLBFGS(), pairs(1))


def test_state_and_gradient_of_an_optimizer_move_to_the_master_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    optimizer.step()
    MasterWeights().cover([optimizer])
    (master,) = optimizer.param_groups[0]["params"]
    assert master.grad.dtype is torch.float32
    assert optimizer.state.keys() == {master}
    state = optimizer.state[master]
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32
    assert float(state["step"]) == 1.0
    optimizer.step()
    torch.testing.assert_close(state["exp_avg"], torch.full((3,), 0.5 * (1 - 0.9**2)), rtol=1e-2, atol=0)
