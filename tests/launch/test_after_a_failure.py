"""A module whose run failed or was interrupted, in the hands of the next run."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.constants import default_pg_timeout

from lightning_moeclip.binding import Trainer
from lightning_moeclip.launch import STARTUP_S, _startup_timeout_s
from lightning_moeclip.parallel.watch import FailureWatch
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

STEPS, ROWS = 3, [5, 3]


class Stopped(TwoTowers):
    """Raises at the start of a batch on every rank, as long as ``error`` is set."""

    error: BaseException | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.error is not None:
            raise self.error


def own_batches(rank: Rank) -> Any:
    return loader(share(batches(STEPS), ROWS, rank.index))


def stopped_run(rank: Rank, error: BaseException) -> tuple[Stopped, Trainer]:
    module = Stopped()
    module.error = error
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2))
    with pytest.raises((KeyError, SystemExit)):
        trainer.fit(module, own_batches(rank))
    assert module.image.moe.w_in.shape[0] == 2
    module.error = None
    return module, trainer


@pytest.mark.parametrize("error", [KeyError("planted"), KeyboardInterrupt()], ids=["failed", "interrupted"])
@on_ranks(2)
def test_the_same_trainer_fits_again_after_a_run_that_ended_early(rank: Rank, error: BaseException) -> None:
    module, trainer = stopped_run(rank, error)
    trainer.fit(module, own_batches(rank))
    assert trainer.global_step == STEPS
    wanted = train_one_process(TwoTowers(), batches(STEPS)).module.state_dict()
    for name, value in module.state_dict().items():
        assert torch.allclose(value, wanted[name], rtol=0.0, atol=1e-9), name


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("expert_parallel_size", [1, 2])
@on_ranks(2)
def test_another_strategy_refuses_the_slices_that_a_failed_run_left(
    rank: Rank, stage: str, expert_parallel_size: int
) -> None:
    module, _ = stopped_run(rank, KeyError("planted"))
    module.validation_step = lambda *_: None  # type: ignore[method-assign]
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=expert_parallel_size))
    with pytest.raises(RuntimeError, match=r"image\.moe holds 2 of its 4 experts: .*Go on with that Trainer"):
        getattr(trainer, stage)(module, own_batches(rank))


@on_ranks(2)
def startup_timeout(rank: Rank, strategy: dict[str, Any]) -> float:
    os.environ.pop("MOECLIP_STARTUP_TIMEOUT_S", None)
    seen = []
    stock = FailureWatch.__init__

    def spy(self: FailureWatch, *args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["startup_timeout_s"])
        stock(self, *args, **kwargs)

    FailureWatch.__init__ = spy  # type: ignore[method-assign]
    quiet_trainer(2, strategy=MoEClipStrategy(**strategy)).fit(TwoTowers(), own_batches(rank))
    return seen[0]


def test_ranks_have_the_users_own_timeout_to_arrive_and_five_minutes_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOECLIP_STARTUP_TIMEOUT_S", raising=False)
    assert startup_timeout.launch(strategy={"timeout": timedelta(hours=1)}) == [3600.0] * 2
    assert startup_timeout.launch(strategy={"timeout": timedelta(seconds=90)}) == [90.0] * 2
    assert startup_timeout.launch(strategy={}) == [STARTUP_S] * 2
    assert default_pg_timeout.total_seconds() > STARTUP_S == _startup_timeout_s(None)
