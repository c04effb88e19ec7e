"""Streams of validation and training that end early, or never begin, on one rank: the reason on all ranks, no hang."""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.distributed import HashStore
from torch.utils.data import DataLoader, IterableDataset

from lightning_moeclip import batch_counts
from lightning_moeclip.parallel import whereabouts
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.whereabouts import Whereabouts
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

MAX_SECONDS = 20.0  # 10 are promised; without the watch the process group waits for 30


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, data: list) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def stream(rank: Rank, num_batches: int) -> DataLoader:
    return DataLoader(Stream(share(batches(num_batches), [4, 4], rank.index)), batch_size=None)


def sized(rank: Rank, num_batches: int) -> DataLoader:
    return loader(share(batches(num_batches), [4, 4], rank.index))


class Validated(TwoTowers):
    """Its evaluation is a collective, of spread experts and of the loss, and so is what it logs."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.compute_loss(batch), sync_dist=True, batch_size=1)

    test_step = validation_step


class StoppedOnOneRank(Validated):
    """The first rank alone is told to stop when the second epoch starts."""

    def on_train_epoch_start(self) -> None:
        self.trainer.should_stop = self.current_epoch == 1 and self.global_rank == 0


class Dense(Validated):
    """Nothing but a number logged at the end of an epoch is a collective."""

    def __init__(self) -> None:
        super().__init__(has_own_moe=False)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.image(batch[0]) - self.text(batch[1])).pow(2).mean()


def attempt(kind: type[Validated], call: Callable[[Any, Any], Any], **settings: Any) -> str:
    """What a run ends with on this rank."""
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(trainer, kind())
        except RuntimeError as error:
            return str(error)
    return f"{trainer.global_step} steps"


def count_meetings(rank: Rank) -> str:
    with mock.patch.object(batch_counts, "gather_objects", wraps=gather_objects) as gathered:
        attempt(Dense, lambda t, m: t.validate(m, [stream(rank, 2), stream(rank, 1)], verbose=False))
    return str(gathered.call_count)


@on_ranks(2)
def that_can_still_meet(rank: Rank) -> dict[str, list[str]]:
    def counts(*by_rank: int) -> DataLoader:
        return stream(rank, by_rank[rank.index])

    quiet = {"num_sanity_val_steps": 0}
    told = {
        "longer": attempt(Dense, lambda t, m: t.fit(m, sized(rank, 2), counts(2, 3)), **quiet),
        "empty": attempt(Dense, lambda t, m: t.fit(m, sized(rank, 2), counts(0, 2)), **quiet),
        "empty while sanity checking": attempt(Dense, lambda t, m: t.fit(m, sized(rank, 2), counts(2, 0))),
        "second loader": attempt(Dense, lambda t, m: t.validate(m, [counts(2, 2), counts(1, 2)], verbose=False)),
        "shifted": attempt(Dense, lambda t, m: t.validate(m, [counts(2, 1), counts(1, 2)], verbose=False)),
        "limited": attempt(Dense, lambda t, m: t.test(m, counts(1, 3), verbose=False), limit_test_batches=2),
        # of training: a rank without a batch comes to the meeting of the others
        "no training": attempt(Validated, lambda t, m: t.fit(m, counts(0, 2))),
        "no training of the other": attempt(Validated, lambda t, m: t.fit(m, counts(2, 0))),
        "told to stop": attempt(StoppedOnOneRank, lambda t, m: t.fit(m, sized(rank, 2)), max_epochs=3),
        "equal": attempt(Validated, lambda t, m: t.fit(m, counts(2, 2), [counts(1, 1), counts(2, 2)])),
        "cut": attempt(Validated, lambda t, m: t.fit(m, counts(2, 3), counts(2, 3)), limit_train_batches=2,
                       limit_val_batches=2),
        "meetings": count_meetings(rank),
        "all empty": attempt(Validated, lambda t, m: t.fit(m, counts(0, 0), counts(0, 0))),
    }  # fmt: skip
    return {name: gather_objects(text) for name, text in told.items()}


TOLD = {
    "longer": r"different numbers of validation batches \(rank 0: 2, rank 1: 3\)",
    "empty": r"different numbers of validation batches \(rank 0: 0, rank 1: 2\)",
    "empty while sanity checking": r"different numbers of validation batches \(rank 0: 2, rank 1: 0\)",
    "second loader": r"different numbers of validation batches \(rank 0: 2 \+ 1, rank 1: 2 \+ 2\)",
    "shifted": r"different numbers of validation batches \(rank 0: 2, rank 1: 1\)",
    "limited": r"different numbers of test batches \(rank 0: 1, rank 1: 2\).*Trainer\(limit_test_batches=",
    "no training": r"different numbers of training batches \(rank 0: 0, rank 1: more than 0\)",
    "no training of the other": r"different numbers of training batches \(rank 0: more than 0, rank 1: 0\)",
    "told to stop": r"^rank 0 was told to stop \(trainer\.should_stop\) before an epoch of training, the others not",
    "equal": "^2 steps$",
    "cut": "^2 steps$",
    "meetings": "^3$",  # at the beginning, and at the end of each of two loaders
    "all empty": "^0 steps$",
}


def test_case_30_streams_that_end_apart_are_an_error_on_both_ranks() -> None:
    first, second = that_can_still_meet.launch()
    assert first == second
    assert first.keys() == TOLD.keys()
    for name, texts in first.items():
        for text in texts:
            assert re.search(TOLD[name], text), f"{name}: {text}"


@on_ranks(2)
def that_wait_in_different_collectives(rank: Rank, folder: str, counts: tuple[int, int]) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2), num_sanity_val_steps=0)
    Path(f"{folder}/began").write_text(str(time.monotonic()))
    trainer.fit(Validated(), sized(rank, 1), stream(rank, counts[rank.index]))


@pytest.mark.parametrize("counts", [(1, 2), (1, 0)], ids=["longer", "empty"])
def test_case_30_streams_of_validation_that_communicates_end_with_the_reason(
    counts: tuple[int, int], tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as caught:
        that_wait_in_different_collectives.launch(folder=str(tmp_path), counts=counts)
    assert time.monotonic() - float((tmp_path / "began").read_text()) < MAX_SECONDS
    shorter = counts.index(min(counts))
    by_rank = {shorter: f"{min(counts)}", 1 - shorter: f"more than {min(counts)}"}
    reason = f"rank {shorter}: {by_rank[shorter]}, rank {1 - shorter}: {by_rank[1 - shorter]}"
    for rank in range(2):
        told = caught.value.failures[rank] + (tmp_path / f"{rank}.err").read_text()
        assert f"different numbers of validation batches ({reason})" in told, told
        assert "still running" not in told


def test_case_30_a_rank_that_moves_asks_nobody_for_ended_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    store = mock.Mock(wraps=HashStore())
    ends, goes_on = Whereabouts(0, "run", lambda: store), Whereabouts(1, "run", lambda: store)
    ends.note_batch("validation", "1.0", 2, is_last=True)
    goes_on.note_batch("validation", "1.0", 3, is_last=False)
    assert goes_on.find_apart(store) is None
    store.check.assert_not_called()
    monkeypatch.setattr(whereabouts, "STILL_S", 0.0)
    assert "(rank 0: 2, rank 1: more than 2)" in (goes_on.find_apart(store) or "")
