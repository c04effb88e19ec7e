"""A rank that keeps its gradients to itself while the others reduce theirs: the reason on all ranks, no hang."""

import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import Callback, Trainer
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

MAX_SECONDS = 20.0  # 10 are promised; without the watch the process group waits for 30


class Quiet(TwoTowers):
    """Nothing but its forward and its gradients is a collective."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.compute_loss(batch)

    def on_train_batch_end(self, *args: object) -> None:
        pass


class Dense(Quiet):
    def __init__(self) -> None:
        super().__init__(has_own_moe=False)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.image(batch[0]) - self.text(batch[1])).pow(2).mean()


Script = Callable[[Any, tuple[Tensor, Tensor], bool], None]


def scripted(base: type[Quiet], script: Script) -> Quiet:
    """Manual optimization by a script, which is told whether it is to do something of its own."""

    class Scripted(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            script(self, batch, batch_idx == 1 and self.global_rank == 1)
            optimizer.step()

    module = Scripted()
    module.automatic_optimization = False
    return module


def pauses_alone(module: Any, batch: tuple[Tensor, Tensor], is_alone: bool) -> None:
    with module.trainer.strategy.block_backward_sync() if is_alone else nullcontext():
        module.manual_backward(module.compute_loss(batch))


def pauses_first_of_two(module: Any, batch: tuple[Tensor, Tensor], is_alone: bool) -> None:
    pauses_alone(module, batch, is_alone)
    module.manual_backward(module.compute_loss(batch))


def pauses_like_all(module: Any, batch: tuple[Tensor, Tensor], is_alone: bool) -> None:
    pauses_alone(module, batch, is_alone=True)
    module.manual_backward(module.compute_loss(batch))


def is_slow_alone(module: Any, batch: tuple[Tensor, Tensor], is_alone: bool) -> None:
    if is_alone:
        time.sleep(2.0)  # the others say by then where they wait, and this rank comes to them
    pauses_like_all(module, batch, is_alone)


def pauses_more_often(module: Any, batch: tuple[Tensor, Tensor], is_alone: bool) -> None:
    for _ in range(2 if is_alone else 1):
        pauses_alone(module, batch, is_alone=True)
    module.manual_backward(module.compute_loss(batch))


class AccumulatesAlone(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 1:
            trainer.accumulate_grad_batches = 3


def fit(rank: Rank, module: Quiet, **settings: Any) -> str:
    data = loader(share(batches(4), [4, 4], rank.index))
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2), **settings)
    try:
        trainer.fit(module, data)
    except RuntimeError as error:
        return str(error)
    return f"{trainer.global_step} steps"


@on_ranks(2)
def that_meet_in_a_reduction(rank: Rank) -> list[list[str]]:
    told = [
        fit(rank, scripted(Dense, pauses_alone)),
        fit(rank, scripted(Dense, pauses_first_of_two)),
        fit(rank, Dense(), callbacks=[AccumulatesAlone()]),
        fit(rank, scripted(Quiet, pauses_like_all)),
        fit(rank, scripted(Quiet, is_slow_alone)),
        fit(rank, scripted(Dense, pauses_more_often)),
    ]
    return gather_objects(told)


def test_ranks_that_meet_in_a_reduction_raise_with_the_place_of_each() -> None:
    for by_rank in that_meet_in_a_reduction.launch():
        for alone, first_of_two, accumulates, *well in by_rank:
            both = r"rank 0: step 2, 0 kept since the last reduction, rank 1: step 3, 1 kept since the last reduction"
            assert re.search(rf"Some ranks reduce gradients that others keep to themselves \({both}\)", alone)
            assert "[MOE401:" in alone
            assert re.search(r"rank 0: step 2, 0 kept since .*, rank 1: step 2, 1 kept since ", first_of_two)
            assert re.search(both, accumulates)
            assert well == ["4 steps", "4 steps", "4 steps"]


@on_ranks(2)
def that_wait_in_different_collectives(rank: Rank, folder: str, kind: str) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    module: Quiet = {"manual": scripted(Quiet, pauses_alone), "automatic": Quiet()}[kind]
    callbacks = [AccumulatesAlone()] if kind == "automatic" else []
    Path(f"{folder}/began").write_text(str(time.monotonic()))
    raise AssertionError(fit(rank, module, callbacks=callbacks))


@pytest.mark.parametrize("kind", ["manual", "automatic"])
def test_ranks_that_wait_in_different_collectives_are_ended_with_the_reason(kind: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        that_wait_in_different_collectives.launch(folder=str(tmp_path), kind=kind)
    assert time.monotonic() - float((tmp_path / "began").read_text()) < MAX_SECONDS
    for rank in range(2):
        told = caught.value.failures[rank] + (tmp_path / f"{rank}.err").read_text()
        assert "rank 0 waits for the others in a reduction of step 2" in told, told
        assert "rank 1 has gone on without one and is in step 3" in told, told
        assert "[MOE401:" in told
        assert "still running" not in told
