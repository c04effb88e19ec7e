"""Trap 2: an expert that gets no token on a rank has no gradient there, and DDP waits for it."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import DDPStrategy, LightningModule
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import gradient_errors, gradients_of, loader, quiet_trainer

Batch = tuple[Tensor, Tensor]
# the expert of each row, by rank
EACH_RANK_MISSES_ONE = ([0, 1, 0, 0], [0, 2, 2, 0])
RANK_1_MISSES_ONE = ([0, 1, 2, 0], [0, 1, 1, 0])
DEADLOCK_S = 3.0


class Routed(LightningModule):
    """Experts in a ModuleList, called only for the rows that the batch sends them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.double()
        self.gradients: list[dict[str, Tensor | None]] = []
        self.on_gradients: Callable[[], None] = lambda: None

    def training_step(self, batch: Batch, _: int) -> Tensor:
        rows, choices = batch
        hidden = self.stem(rows).tanh()
        out = hidden
        for index, expert in enumerate(self.experts):
            chosen = (choices == index).nonzero().squeeze(-1)
            if len(chosen):
                out = out.index_add(0, chosen, expert(hidden[chosen]))
        return out.square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))
        self.on_gradients()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def batches_of(choices_by_step: list[list[int]], rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(len(choices), 4, generator=generator, dtype=torch.float64), torch.tensor(choices))
        for choices in choices_by_step
    ]


def one_process(*choices_by_rank: list[list[int]]) -> Routed:
    """Train on the rows of all ranks in this process alone."""
    module = Routed()
    optimizer = module.configure_optimizers()
    shares = [batches_of(choices, rank) for rank, choices in enumerate(choices_by_rank)]
    for parts in zip(*shares, strict=True):
        optimizer.zero_grad()
        module.training_step((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])), 0).backward()
        module.gradients.append(gradients_of(module))
        optimizer.step()
    return module


def worst_parameter_error(parameters: dict[str, Tensor], module: nn.Module) -> float:
    return max(((parameters[n] - p).norm() / p.norm()).item() for n, p in module.named_parameters())


@on_ranks(2)
def fit(rank: Rank, strategy: Any, choices_by_rank: Any) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    module = Routed()
    quiet_trainer(2, strategy=strategy).fit(module, loader(batches_of(choices_by_rank[rank.index], rank.index)))
    return module.gradients, {n: p.detach() for n, p in module.named_parameters()}


def test_stock_ddp_steps_on_unreduced_gradients_without_a_message() -> None:
    choices = [[own] for own in EACH_RANK_MISSES_ONE]
    truth = one_process(*choices).gradients[0]
    for rank, (gradients, _) in enumerate(fit.launch(strategy=DDPStrategy(), choices_by_rank=choices)):
        alone = Routed()
        alone.training_step(batches_of(choices[rank], rank)[0], 0).backward()
        # each rank has stepped on what its own rows gave, as if there were no other rank
        assert max(gradient_errors(gradients[0], gradients_of(alone), 0).values()) == 0
        errors = gradient_errors(gradients[0], truth, 0)
        assert errors["stem.weight"] == pytest.approx(0.597, abs=1e-3)
        used = 1 + rank  # by this rank alone: its gradient was never divided by the number of ranks
        assert errors[f"experts.{used}.weight"] == pytest.approx(1.0)
        assert errors[f"experts.{3 - used}.weight"] == float("inf")  # missing, where one process has it


@on_ranks(2)
def deadlock(rank: Rank, folder: Path) -> None:
    module = Routed()

    def stepped() -> None:
        torch.save(module.gradients, folder / f"rank{rank.index}.step{len(module.gradients)}")
        # the other rank will never answer what this one calls next
        end = threading.Timer(DEADLOCK_S, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()

    module.on_gradients = stepped
    data = batches_of([RANK_1_MISSES_ONE[rank.index]] * 3, rank.index)
    quiet_trainer(2, strategy=DDPStrategy()).fit(module, loader(data))


def test_stock_ddp_deadlocks_when_one_rank_misses_an_expert(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        deadlock.launch(folder=tmp_path)
    assert caught.value.failures[1] == "ended with exit code -9"  # at the deadline
    # rank 0 was still in its first backward, while rank 1 had stepped on gradients of its own and waited in step 2
    assert {p.name for p in tmp_path.iterdir()} == {"rank1.step1"}
    (gradients,) = torch.load(tmp_path / "rank1.step1")
    truth = one_process(*[[own] for own in RANK_1_MISSES_ONE]).gradients[0]
    assert gradient_errors(gradients, truth, 0)["stem.weight"] == pytest.approx(0.675, abs=1e-3)


@pytest.mark.parametrize("choices", [EACH_RANK_MISSES_ONE, RANK_1_MISSES_ONE], ids=["each misses", "one misses"])
def test_ours_equals_one_process_for_experts_idle_on_some_ranks(choices: Any) -> None:
    by_rank = [[own] * 3 for own in choices]
    one = one_process(*by_rank)
    for gradients, parameters in fit.launch(strategy=MoEClipStrategy(), choices_by_rank=by_rank):
        for found, wanted in zip(gradients, one.gradients, strict=True):
            assert max(gradient_errors(found, wanted, 0).values()) < 1e-10
        assert worst_parameter_error(parameters, one) < 1e-10


def test_zeros_for_a_missing_gradient_move_an_idle_expert_and_ours_leaves_it_alone() -> None:
    idle_later = [[[0, 1, 2, 0]] + [[0, 1, 0, 0]] * 7, [[0, 1, 1, 2]] + [[0, 1, 1, 0]] * 7]
    one = one_process(*idle_later)
    zeros, _ = fit.launch(strategy=MoEClipStrategy(idle_expert="zero"), choices_by_rank=idle_later)
    assert zeros[0][-1]["experts.2.weight"] is not None
    # momentum and weight decay of seven steps in which one process does not touch the expert
    assert worst_parameter_error(zeros[1], one) == pytest.approx(0.1096, abs=1e-4)
    ours, _ = fit.launch(strategy=MoEClipStrategy(), choices_by_rank=idle_later)
    assert ours[0][-1]["experts.2.weight"] is None
    assert worst_parameter_error(ours[1], one) < 1e-10
