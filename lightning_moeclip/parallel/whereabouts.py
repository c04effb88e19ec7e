"""Where each rank is in its batches and reductions, left in a store for ranks that can no longer meet.

Ranks that have run apart wait in different collectives, and no collective can tell them so. Each then writes down where
it waits, and who sees that another rank waits for something that it has passed itself knows that they will never meet.
What is compared is exact: a rank that is only slow is behind, and never beyond.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from lightning_moeclip.parallel.loader_checks import unequal_batch_counts
from lightning_moeclip.parallel.step_checks import lone_pause

__all__ = ["Place", "Whereabouts"]

STILL_S = 1.0  # so long a rank stands at one place before it tells or asks: a step that takes less costs nothing


@dataclass(frozen=True)
class Place:
    """Where a rank is on the way of its gradients. Written as a whole, since another thread reads it.

    Attributes:
        step: training steps that it has begun.
        num_reductions: reductions that it has entered.
        num_paused: backwards since the last reduction whose gradients it has kept to itself, by the strategy alone.
        is_reducing: it is inside of a reduction, or of the backward that ends in it.
    """

    step: int = 0
    num_reductions: int = 0
    num_paused: int = 0
    is_reducing: bool = False

    def has_passed(self, step: int, num_paused: int) -> bool:
        """Whether a rank here, outside of a reduction, will not come to the next one, which another rank has entered.

        Args:
            step: in which the other rank has entered it.
            num_paused: of that rank since the reduction before.
        """
        return self.step > step or (self.step == step and self.num_paused > 0 and num_paused == 0)


class Whereabouts:
    """What one rank tells of itself, and sees of the others.

    Args:
        rank: this rank.
        key: prefix in the store, the same on all ranks.
        connect: the store, or None while there is none.
    """

    def __init__(self, rank: int, key: str, connect: Callable[[], Store | None]) -> None:
        self._rank = rank
        self._key = key
        self._connect = connect
        self._batch: tuple[str, str, int] | None = None
        self._seen_batch: tuple[str, str, int] | None = None
        self._in_batch_since = 0.0
        self._read_place: Callable[[], Place] | None = None
        self._num_followed = self._num_told = 0
        self._seen: Place | None = None
        self._still_since = 0.0

    def follow(self, read_place: Callable[[], Place]) -> None:
        """Look at the reductions of a run, in place of an earlier one; all ranks call this equally often."""
        self._num_followed += 1
        self._num_told, self._seen, self._read_place = 0, None, read_place

    def note_batch(self, stage: str, run: str, number: int, *, is_last: bool) -> None:
        """Say that this rank has begun a batch of a loader whose length nobody knows.

        A rank whose loader ends while those of others go on waits where they never come to, and they perhaps in a
        layer. So it leaves the number of its batches in the store: a rank that has begun more knows.

        Args:
            stage: "training", "validation" or "test".
            run: which pass over which loader, the same on all ranks.
            number: of the batch in it, from 1; 0 for a loader that was empty.
            is_last: this rank's loader ends with it.
        """
        self._batch = (stage, run, number)
        if not is_last:
            return
        with suppress(RuntimeError):  # the store is gone: everybody sees that
            store = self._connect()
            if store is not None:
                store.compare_set(self._last(stage, run), "", json.dumps([self._rank, number]))

    def find_apart(self, store: Store) -> str | None:
        """What tells that this rank and another one have run apart for good; None while nothing does."""
        return self._compare_batches(store) or self._compare_places(store)

    def _last(self, stage: str, run: str) -> str:
        return f"{self._key}/last/{stage}/{run}"

    def _compare_batches(self, store: Store) -> str | None:
        batch = self._batch
        now = time.monotonic()
        if batch != self._seen_batch:
            self._seen_batch, self._in_batch_since = batch, now
        if batch is None or now - self._in_batch_since < STILL_S:
            return None
        stage, run, number = batch
        if not store.check([self._last(stage, run)]):
            return None
        rank, last = json.loads(store.get(self._last(stage, run)))
        if number <= last:
            return None
        return unequal_batch_counts(stage, f"rank {rank}: {last}, rank {self._rank}: more than {last}")

    def _compare_places(self, store: Store) -> str | None:
        if self._read_place is None:
            return None
        place, now = self._read_place(), time.monotonic()
        if place != self._seen:
            self._seen, self._still_since = place, now
        if now - self._still_since < STILL_S:
            return None
        if place.is_reducing and self._num_told < place.num_reductions:
            self._num_told = place.num_reductions
            told = json.dumps([self._rank, place.step, place.num_paused])
            store.compare_set(self._reduction(place.num_reductions), "", told)
        if place.is_reducing or not store.check([self._reduction(place.num_reductions + 1)]):
            return None
        rank, step, num_paused = json.loads(store.get(self._reduction(place.num_reductions + 1)))
        if not place.has_passed(step, num_paused):
            return None
        return lone_pause(
            f"rank {rank} waits for the others in a reduction of step {step}, rank {self._rank} has gone on without "
            f"one and is in step {place.step}"
        )

    def _reduction(self, number: int) -> str:
        return f"{self._key}/reducing/{self._num_followed}/{number}"
