"""Whatever the layout: the gradients, losses and parameters of one process that sees the whole batch."""

import itertools

import pytest
import torch
from torch import Tensor

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import (
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
EMPTY = {2: [8, 0]}
CASES = list(itertools.product((1, 2), (None, 0.05), ("even", "uneven"), (True, False)))


def compare_all(rank: Rank, expert_parallel_size: int) -> None:
    for accumulate, clip, rows, has_own_moe in CASES:
        sizes = (EVEN if rows == "even" else UNEVEN)[rank.world_size]
        where = f"accumulate={accumulate} clip={clip} rows={sizes} own={has_own_moe}"
        compare(rank, expert_parallel_size, accumulate, clip, sizes, has_own_moe, where)


def compare(
    rank: Rank, ep: int, accumulate: int, clip: float | None, rows: list[int], has_own_moe: bool, where: str
) -> None:
    data = batches(NUM_STEPS * accumulate)
    module = TwoTowers(has_own_moe=has_own_moe)
    trainer = quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )
    kept: dict[str, Tensor] = {}
    module.on_train_end = lambda: kept.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer.fit(module, loader(share(data, rows, rank.index)))

    one = train_one_process_alone(has_own_moe, data, accumulate, clip)
    assert len(module.gradients) == len(one.gradients) == NUM_STEPS
    expert_rank = rank.index % ep
    for step, (found, wanted) in enumerate(zip(module.gradients, one.gradients, strict=True)):
        errors = gradient_errors(found, wanted, expert_rank)
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < GRADIENT_BOUND, f"{where} step {step} {worst}: {errors[worst]}"
    for name, parameter in one.module.named_parameters():
        wanted = own_rows(parameter, kept[name], expert_rank)
        assert (kept[name] - wanted).abs().max() < PARAMETER_BOUND, f"{where} {name}"
    for found, wanted in zip(module.losses, one.losses, strict=True):
        assert found == pytest.approx(wanted, rel=1e-10), where


def train_one_process_alone(has_own_moe: bool, data: list, accumulate: int, clip: float | None):  # noqa: ANN201
    with alone():
        return train_one_process(TwoTowers(has_own_moe=has_own_moe), data, accumulate=accumulate, clip=clip)
