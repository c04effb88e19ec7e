"""Whatever the layout: the gradients, losses and parameters of one process that sees the whole batch."""

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import (
    OneProcess,
    TwoTowers,
    batches,
    gradient_errors,
    loader,
    own_rows,
    quiet_trainer,
    share,
    train_one_process,
)

GRADIENT_BOUND, PARAMETER_BOUND = 1e-10, 1e-9
NUM_STEPS = 5
EVEN = {1: [8], 2: [4, 4], 4: [2, 2, 2, 2]}
UNEVEN = {1: [8], 2: [5, 3], 4: [4, 3, 0, 1]}


@dataclass(frozen=True)
class Case:
    accumulate: int
    clip: float | None
    has_own_moe: bool


CASES = [Case(*values) for values in itertools.product((1, 2), (None, 0.05), (True, False))]


@dataclass
class Found:
    gradients: list[dict[str, Tensor | None]]
    losses: list[float]
    parameters: dict[str, Tensor]


def data_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    return batches(NUM_STEPS * case.accumulate)


def fit_all(rank: Rank, expert_parallel_size: int) -> dict[tuple[Case, str], Found]:
    layouts = {"even": EVEN[rank.world_size], "uneven": UNEVEN[rank.world_size]}
    return {
        (case, name): fit(rank, expert_parallel_size, case, rows) for case in CASES for name, rows in layouts.items()
    }


def fit(rank: Rank, expert_parallel_size: int, case: Case, rows: list[int]) -> Found:
    module = TwoTowers(has_own_moe=case.has_own_moe)
    kept: dict[str, Tensor] = {}
    # while the experts are still spread: each rank shows its own
    module.on_train_end = lambda: kept.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer = quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=expert_parallel_size),
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
    )
    trainer.fit(module, loader(share(data_of(case), rows, rank.index)))
    return Found(module.gradients, module.losses, kept)


@on_ranks(1)
def fit_on_1(rank: Rank, expert_parallel_size: int) -> object:
    return fit_all(rank, expert_parallel_size)


@on_ranks(2, timeout_s=120)
def fit_on_2(rank: Rank, expert_parallel_size: int) -> object:
    return fit_all(rank, expert_parallel_size)


@on_ranks(4, timeout_s=180)
def fit_on_4(rank: Rank, expert_parallel_size: int) -> object:
    return fit_all(rank, expert_parallel_size)


FITS = {1: fit_on_1, 2: fit_on_2, 4: fit_on_4}


@functools.cache
def reference(case: Case) -> OneProcess:
    module = TwoTowers(has_own_moe=case.has_own_moe)
    return train_one_process(module, data_of(case), accumulate=case.accumulate, clip=case.clip)


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_gradients_losses_and_parameters_equal_one_process(world_size: int, ep: int) -> None:
    by_rank = FITS[world_size].launch(expert_parallel_size=ep)
    for rank, found_by_case in enumerate(by_rank):
        for (case, rows), found in found_by_case.items():
            one, where = reference(case), f"rank {rank}, {case}, {rows} rows"
            assert len(found.gradients) == NUM_STEPS
            for step, (ours, wanted) in enumerate(zip(found.gradients, one.gradients, strict=True)):
                errors = gradient_errors(ours, wanted, rank % ep)
                worst = max(errors, key=errors.__getitem__)
                assert errors[worst] < GRADIENT_BOUND, f"{where}: step {step}, {worst}: {errors[worst]}"
            for name, parameter in one.module.named_parameters():
                error = (found.parameters[name] - own_rows(parameter, found.parameters[name], rank % ep)).abs().max()
                assert error < PARAMETER_BOUND, f"{where}: {name}: {error}"
            assert found.losses == pytest.approx(one.losses, rel=1e-10), where


def test_an_expert_that_no_token_wants_is_part_of_the_comparison() -> None:
    own, users = reference(CASES[0]), reference(CASES[1])
    assert own.gradients[0]["image.moe.w_in"][3].abs().max() == 0  # a row of a fused weight: zeros
    assert users.gradients[0]["image.moe.experts.3.weight"] is None  # a parameter of its own: none
    assert torch.stack([g.norm() for g in own.gradients[0].values() if g is not None]).norm() > 1e-3
