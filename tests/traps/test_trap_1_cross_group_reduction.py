"""Trap 1: an expert has fewer replicas than a dense parameter, and still its gradient is divided by the whole world."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.binding import DDPStrategy, LightningModule
from lightning_moeclip.state.canonical import spread_names
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, gradient_errors, loader, own_rows, quiet_trainer, share, train_one_process

EXPERTS = ("w_in", "w_out")


class AveragedOverReplicas(MoEClipStrategy):
    """The usual recipe: each gradient becomes the mean over the ranks that hold the parameter."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self._corridor is not None
        self._corridor.detach()
        self._corridor.reducer = None

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, *args, **kwargs)
        spread = spread_names(self.lightning_module)
        for name, parameter in self.lightning_module.named_parameters():
            axis = "edp" if name in spread else "dp"
            group = self.mesh.gradient_groups[axis]
            if parameter.grad is not None and group is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= len(self.mesh.replicas(axis))
        return loss


@on_ranks(4)
def first_gradients(rank: Rank, expert_parallel_size: int) -> dict[str, dict[str, Tensor | None]]:
    found = {}
    for strategy in (AveragedOverReplicas, MoEClipStrategy):
        module = TwoTowers()
        trainer = quiet_trainer(4, strategy=strategy(expert_parallel_size=expert_parallel_size))
        trainer.fit(module, loader(share(batches(1), [2, 3, 1, 2], rank.index)))
        found[strategy.__name__] = module.gradients[0]
    return found


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_mean_over_replicas_is_ep_times_too_big_and_ours_is_exact(ep: int) -> None:
    one = train_one_process(TwoTowers(), batches(1)).gradients[0]
    for rank, found in enumerate(first_gradients.launch(expert_parallel_size=ep)):
        wrong = found["AveragedOverReplicas"]
        for name, reference in one.items():
            gradient = wrong[name]
            assert gradient is not None
            assert reference is not None
            mine = own_rows(reference, gradient, rank % ep)
            factor = ep if name.endswith(EXPERTS) else 1
            assert (gradient - factor * mine).norm() < 1e-10 * reference.norm(), f"rank {rank}: {name}"
        assert max(gradient_errors(found["MoEClipStrategy"], one, rank % ep).values()) < 1e-10


class OwnExpert(LightningModule):
    """Each rank has made an expert of its own, and sends its rows there."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.expert = nn.Linear(4, 4, dtype=torch.float64)
        self.made = self.expert.weight.detach().clone()

    def on_train_start(self) -> None:
        self.at_start = self.expert.weight.detach().clone()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.expert(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.expert.weight.grad is not None
        self.gradient = self.expert.weight.grad.clone()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows_of(rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 + rank), dtype=torch.float64)


def true_gradient(rank: int) -> Tensor:
    """Of one process that holds both experts: the mean over two ranks, of which one uses this expert."""
    module = OwnExpert(rank)
    (module.training_step(rows_of(rank), 0) / 2).backward()
    assert module.expert.weight.grad is not None
    return module.expert.weight.grad


@on_ranks(2)
def stock_with_an_expert_per_rank(rank: Rank) -> dict[str, Tensor]:
    module = OwnExpert(rank.index)
    quiet_trainer(2, strategy=DDPStrategy(find_unused_parameters=True)).fit(module, loader([rows_of(rank.index)]))
    return {"made": module.made, "at_start": module.at_start, "gradient": module.gradient}


def test_stock_ddp_overwrites_one_expert_by_the_other_and_averages_them() -> None:
    first, second = stock_with_an_expert_per_rank.launch()
    assert not torch.equal(first["made"], second["made"])
    assert torch.equal(second["at_start"], first["made"])  # rank 1's own expert is gone
    assert torch.equal(first["gradient"], second["gradient"])
    error = (second["gradient"] - true_gradient(1)).norm() / true_gradient(1).norm()
    assert error > 0.5


@on_ranks(2)
def ours_with_experts_spread(rank: Rank) -> dict[str, Any]:
    module = TwoTowers()
    kept: dict[str, Tensor] = {}
    module.on_train_start = lambda: kept.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2))
    trainer.fit(module, loader(share(batches(1), [5, 3], rank.index)))
    return {"at_start": kept, "gradients": module.gradients[0]}


def test_ours_keeps_every_expert_and_its_gradient() -> None:
    one = train_one_process(TwoTowers(), batches(1)).gradients[0]
    made = dict(TwoTowers().named_parameters())
    for rank, found in enumerate(ours_with_experts_spread.launch()):
        for name in (n for n in made if n.endswith(EXPERTS)):
            assert torch.equal(found["at_start"][name], own_rows(made[name], found["at_start"][name], rank)), name
        assert max(gradient_errors(found["gradients"], one, rank).values()) < 1e-10
