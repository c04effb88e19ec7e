"""Two ranks under Lightning's ``ddp`` and under our strategy: the same calls, numbers and bits.

A mean of two float32 gradients is exact in either order of its sum and its division, so nothing is left to tolerate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moeclip.binding import DDPStrategy, Trainer
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import quiet_trainer
from tests.upstream.models import differences, ours
from tests.upstream.scripts import SCRIPTS


def ddp(**arguments: Any) -> Trainer:
    """The Trainer of ``ours`` under Lightning's own strategy for ranks."""
    trainer = quiet_trainer(2, **{"log_every_n_steps": 1, **arguments, "strategy": "ddp"})
    assert type(trainer.strategy) is DDPStrategy
    return trainer


@on_ranks(2)
def compare(rank: Rank, folder: str) -> dict[str, list[str]]:
    """Where the strategies differ, by script."""
    found = {}
    for script in SCRIPTS:
        results = []
        for make in (ddp, lambda **arguments: ours(2, **arguments)):
            place = Path(folder) / f"{script.__name__} {len(results)}"
            place.mkdir(exist_ok=True)
            torch.manual_seed(0)
            results.append(script(make, place))
        found[script.__name__] = list(differences(results[1], results[0]))
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return compare.launch(folder=str(tmp_path_factory.mktemp("two_ranks")))


@pytest.mark.parametrize("name", [script.__name__ for script in SCRIPTS])
def test_two_ranks_do_what_they_do_under_stock_ddp(name: str, compared: list[dict[str, list[str]]]) -> None:
    for of_rank in compared:
        assert of_rank[name] == []
