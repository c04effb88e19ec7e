"""How gradients travel while backward goes on: packed, summed and cast back, several buckets at a time.

Every way gives the same bits, since each bucket is summed by the same collective in the same order on all ranks and
nothing is used before its sum is there: all of them are waited for when backward ends, before gradients are unscaled.
Backward itself never waits: another rank may launch a bucket only when its own backward has ended, and for that it may
need this one's to go on, as where experts are spread.

* ``"stream"``: sums start when their bucket is full and run beside backward: in threads of the process group on a CPU,
  on a stream of their own on a GPU.
* ``"graph"``: the same three operations of a bucket are recorded once and replayed in each step: a CUDA graph on a GPU,
  a list of calls on a CPU.
* ``"sync"``: when backward has ended, one sum after the other. Slower, and easier to follow in a debugger or profiler.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.distributed as dist

from lightning_moeclip.gradients.buckets import Bucket, Passage
from lightning_moeclip.gradients.collectives import start_sum

__all__ = ["GradStash", "StashMode", "check_stash", "passage_for"]

StashMode = Literal["stream", "graph", "sync"]


def check_stash(mode: str, wait_window: int | None) -> None:
    """Refuse what is no way to travel.

    Raises:
        ValueError: an unknown mode, or a window that holds no bucket.
    """
    if mode not in get_args(StashMode):
        raise ValueError(f'stash={mode!r} must be "stream" (the default), "graph" or "sync".')
    if wait_window is not None and (type(wait_window) is not int or wait_window < 1):
        raise ValueError(
            f"wait_window={wait_window!r} must be a number of buckets from 1, or None (the default) for all of them."
        )


class GradStash:
    """Sends buckets on their way, at most so many at a time, and waits for them.

    Args:
        wait_window: buckets in flight at a time; None for all of them.
        is_eager: buckets start while backward goes on.
    """

    def __init__(self, wait_window: int | None = None, *, is_eager: bool = True) -> None:
        self._wait_window = wait_window
        self._is_eager = is_eager
        self._in_flight: deque[Bucket] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether a bucket may start within backward.

        Not whether the oldest has arrived: that is a matter of time, and the order of all collectives, also of those
        of layers and losses, has to be the same on all ranks.
        """
        return self._is_eager and not self._is_full

    @property
    def _is_full(self) -> bool:
        return self._wait_window is not None and len(self._in_flight) >= self._wait_window

    def launch(self, bucket: Bucket) -> None:
        """Start the sum of a bucket; waits for the oldest one under way where the window is full."""
        while self._is_full:
            self._in_flight.popleft().wait()
        self._in_flight.append(bucket)
        bucket.launch()

    def flush(self) -> None:
        """Wait for everything under way."""
        while self._in_flight:
            self._in_flight.popleft().wait()


def passage_for(mode: StashMode, device: torch.device) -> Passage:
    """How one bucket travels.

    Args:
        mode: see the top of this file.
        device: of the bucket.
    """
    if device.type == "cuda":
        # CUDA streams and graphs are a file of their own
        from lightning_moeclip.gradients.device_passages import device_passage

        return device_passage(mode, device)
    kinds: dict[str, Callable[[], Passage]] = {
        "stream": HostPassage, "graph": RecordedPassage, "sync": BlockingPassage,
    }  # fmt: skip
    return kinds[mode]()


class HostPassage:
    """Sums in the threads of the process group; gradients are packed one by one, while they are in the cache."""

    patience: float = 0

    def __init__(self) -> None:
        self._work: dist.Work | None = None

    def note(self) -> None:
        """A gradient waits; nothing here runs beside the one that left it."""

    def pack(self, bucket: Bucket) -> None:
        """Pack what waits."""
        bucket.pack_pending()

    def catch_up(self) -> None:
        """Nothing here packs beside the caller."""

    def start(self, bucket: Bucket) -> None:
        """Close the bucket and start the sum."""
        bucket.close()
        bucket.to_wire()
        self._sum(bucket)

    def _sum(self, bucket: Bucket) -> None:
        self._work = start_sum(bucket.wire, bucket.group)

    def end(self, bucket: Bucket) -> None:
        """Wait until the views hold the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        bucket.from_wire()

    def rehearse(self, bucket: Bucket) -> None:
        """Nothing to make ready."""

    def release(self) -> None:
        """Nothing to let go of."""


class BlockingPassage(HostPassage):
    """Waits for each sum where it starts."""

    def start(self, bucket: Bucket) -> None:
        """Close the bucket and sum it."""
        super().start(bucket)
        super().end(bucket)

    def end(self, bucket: Bucket) -> None:
        """Nothing is left to wait for."""


class RecordedPassage(HostPassage):
    """Replays a list of calls that was made once, as a CUDA graph does: the same memory, and nothing allocated.

    Gradients are packed when the bucket is launched, as part of the list.
    """

    patience = math.inf

    def __init__(self) -> None:
        super().__init__()
        self._calls: tuple[Callable[[], None], ...] = ()
        self._addresses: tuple[int, ...] = ()

    def start(self, bucket: Bucket) -> None:
        """Replay the calls up to the start of the sum."""
        if not self._calls:
            self._calls = (bucket.close, bucket.to_wire, lambda: self._sum(bucket))
            self._addresses = bucket.addresses()
        assert self._addresses == bucket.addresses(), "a recorded bucket has moved"
        for call in self._calls:
            call()
