"""A watch on every rank, so that one failing rank ends the run everywhere.

A rank that waits in a collective for one that failed does not come back by itself, runs no Python and answers no
SIGTERM. So each rank has a daemon thread with a store client of its own: the failing rank leaves its traceback in
the store, the threads of the others find it and end their process when it does not end by itself.
"""

import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lightning_moeclip.parallel.whereabouts import Whereabouts

__all__ = ["Failure", "FailureWatch", "client_at", "client_of", "is_lost_peer", "place_of_main_thread"]

POLL_S = 0.25
GRACE_S = 3.0  # three of them stay under the 10 s in which the run has to end
BUSY_GRACES = 2.0  # a rank that computes is not stuck, on a busy machine it is slow: it gets so much longer
BUSY_S = 0.005  # of computing between two polls; a wait in a collective of gloo takes nothing
# longest that the main thread may wait for the store: it looks up the name of who connects, and a name server that does
# not answer holds it up for 5 s a time
ASKING_S = 15.0
SAVING_S = 60.0  # longest that the others wait for a failing rank that writes what it holds
PLACE_CALLS = 8  # of the main thread that are shown where a rank is ended
LOST_POLLS = 4  # polls without an answer after which the store counts as gone
_STORE_TIMEOUT = timedelta(seconds=5)
# what a rank sees of another one's end: never the cause, so never what the user should read first
_LOST_PEER = re.compile(r"gloo|NCCL|Connection closed by peer")
_runs = itertools.count()


@dataclass(frozen=True)
class Failure:
    """What ended a run.

    Attributes:
        rank: where it happened.
        error: type and message, one line or more.
        traceback: as Python would print it; empty when there is none.
    """

    rank: int
    error: str
    traceback: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        """Describe an exception that was raised on ``rank``."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(rank, f"{type(error).__name__}: {error}", text)

    def told(self) -> str:
        """The failure as another rank reports it."""
        return f"rank {self.rank} failed with {self.error}\n{self.traceback}"


def client_at(host: str, port: int) -> Store | None:
    """A new client of the TCP store at an address; None while nothing listens there."""
    # asked first in Python: a client that finds nobody writes its C++ stack to stderr
    try:
        socket.create_connection((host, port), timeout=_STORE_TIMEOUT.total_seconds()).close()
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    except (OSError, RuntimeError):
        return None


def client_of(store: Store) -> Store | None:
    """A client of the store that a process group uses, apart from the group's own; None when it is gone.

    A blocking wait holds the lock of a TCP client, so the watch never shares one. File and hash stores are used as
    they are: each of their calls stands alone.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return client_at(store.host, store.port) if isinstance(store, TCPStore) else store


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is what a collective raises when another rank is gone."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_LOST_PEER.search(str(error))))


class FailureWatch:
    """Tells the other ranks of a failure on this one, and ends this process after a failure elsewhere.

    Args:
        rank: this rank.
        world_size: number of ranks, at least 2.
        connect: makes a store client, or returns None while the store is not there.
        startup_timeout_s: seconds that the ranks have to arrive at ``arrived``.
        grace_s: seconds that this process has to end by itself after a failure anywhere, when its main thread waits
            in one call, as in a collective; twice as long when it computes.
        before_end: called before this process is ended, to end what it started.

    Attributes:
        whereabouts: of this rank, compared with those of the others.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Store | None],
        *,
        startup_timeout_s: float = 300.0,
        grace_s: float = GRACE_S,
        before_end: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.own: Failure | None = None  # of this rank
        self.seen: Failure | None = None  # of another rank, of the store, or of ranks that have run apart
        self._connect = connect
        self._store: Store | None = None
        self._startup_timeout_s = startup_timeout_s
        self._grace_s = grace_s
        self._before_end = before_end
        self._key = f"moeclip/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_runs)}"
        self.whereabouts = Whereabouts(rank, self._key, lambda: self._store or self._connect())
        self._began = time.monotonic()
        self._failing_since: float | None = None
        self._stuck_since = 0.0
        self._computed_s = 0.0
        self._is_inside = True
        self._is_starting = True
        self._asking_since: float | None = None
        self._has_rank_0_left = False
        self._lost = 0
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="failure-watch")

    @property
    def failure(self) -> Failure | None:
        """What ended the run, as far as this rank knows."""
        return self.seen or self.own

    def start(self) -> None:
        """Begin to watch; the start-up deadline runs from here."""
        self._thread.start()

    def arrived(self) -> None:
        """Say that the process group is up: the start-up deadline is over."""
        self._is_starting = False

    def publish(self, error: BaseException) -> RuntimeError | None:
        """Tell the other ranks that this one is going down.

        Args:
            error: what was raised here.

        Returns:
            The error to raise instead, when another rank failed first and ``error`` only says that it is gone.
        """
        own = first = Failure.of(self.rank, error)
        with self._asking():
            with suppress(RuntimeError):  # the store is gone: everybody sees that
                store = self._store or self._connect()
                if store is not None:
                    # compare_set returns what is there afterwards: the first failure of the run
                    first = _decode(store.compare_set(f"{self._key}/failure", "", json.dumps(asdict(own))))
            # only now: from here on the watch may end this process
            self.own = own
        if first.rank != self.rank:
            self.seen = self.seen or first
        if self.seen is not None and is_lost_peer(error):
            return RuntimeError(f"rank {self.rank} was ended because {self.seen.told()}")
        return None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Ask all ranks to wait, for a minute at most, while this one writes what it holds."""
        self._count_saving(1)
        try:
            yield
        finally:
            self._count_saving(-1)

    def leave(self) -> None:
        """Say that control is back with the user's code after a failure: only a stuck exit is ended from now on."""
        self._is_inside = False

    def stop(self) -> None:
        """End the watch after a clean run."""
        if self._store is not None and not self._quit.is_set():
            with suppress(RuntimeError):
                self._store.set(f"{self._key}/left/{self.rank}", "1")
        self._quit.set()
        if self._thread.is_alive():
            self._thread.join(timeout=POLL_S + _STORE_TIMEOUT.total_seconds())

    def _watch(self) -> None:
        while not self._quit.wait(POLL_S):
            try:
                # a thread inside the store's C++ code while the interpreter ends aborts the process
                if self._is_inside and threading.main_thread().is_alive():
                    self._look()
                self._lost = 0
            except RuntimeError:
                self._store = None
                self._lost += 1
            # a rank that has a cause to tell must not report that the store went first
            if self._lost >= LOST_POLLS and self.failure is None and self._asking_since is None:
                if self._has_rank_0_left:
                    return
                self.seen = Failure(0, "no answer: the store of the process group is gone")
            if self.failure is not None:
                self._end_when_stuck(self.failure)
            elif self._is_starting and time.monotonic() - self._began > self._startup_timeout_s:
                self._end(self._who_is_missing())

    def _look(self) -> None:
        if self._store is None:
            self._store = self._connect()
            if self._store is None:
                if not self._is_starting:
                    raise RuntimeError("no store")
                return
            self._store.set(f"{self._key}/here/{self.rank}", "1")
        self._has_rank_0_left = self._has_rank_0_left or self._store.check([f"{self._key}/left/0"])
        if self.seen is None and self._store.check([f"{self._key}/failure"]):
            found = _decode(self._store.get(f"{self._key}/failure"))
            if found.rank != self.rank:
                self.seen = found
                _write(f"[rank {self.rank}] rank {found.rank} failed with {found.error}\n")

        told = self.whereabouts.find_apart(self._store) if self.failure is None else None
        if told is not None:
            own = Failure(self.rank, f"RuntimeError: {told}")
            # nobody raises it: the main thread waits, and is to hear of it as of another rank's failure
            self.seen = _decode(self._store.compare_set(f"{self._key}/failure", "", json.dumps(asdict(own))))

    def _end_when_stuck(self, failure: Failure) -> None:
        # a caller who caught the error may go on for as long as he likes
        if not self._is_inside and threading.main_thread().is_alive():
            self._failing_since = None
            return
        now = time.monotonic()
        asking_since = self._asking_since
        if asking_since is not None and now - asking_since < ASKING_S:
            self._failing_since = None  # it waits for the store, not for another rank, and begins anew then
            return
        computed_s = _computed_by_main_thread_s()
        if self._failing_since is None or computed_s - self._computed_s > BUSY_S:
            self._stuck_since = now
        self._computed_s = computed_s
        self._failing_since = self._failing_since or now
        failing_s = now - self._failing_since
        # the rank with the cause gets longer: its hooks and its exit are what the user wants to see
        extra_s = 1.0 if self.own else 0.0
        is_stuck = now - self._stuck_since >= self._grace_s + extra_s
        if not is_stuck and failing_s < BUSY_GRACES * self._grace_s + extra_s:
            return
        if self._is_inside and failing_s < SAVING_S and self._is_anybody_saving():
            return
        self._end(failure.told())

    def _end(self, why: str) -> None:
        _flush()
        _write(f"[rank {self.rank}] ended because {why}\n[rank {self.rank}] was at\n{place_of_main_thread()}")
        if self._before_end is not None:
            with suppress(Exception):
                self._before_end()
        os._exit(1)

    def _who_is_missing(self) -> str:
        waited = f"after {self._startup_timeout_s:g} s at start-up "
        advice = "Look at what those ranks do before they start, or set MOECLIP_STARTUP_TIMEOUT_S to wait longer."
        if self._store is None:
            return f"{waited}rank 0 has not arrived: nothing answers at its address. {advice}"
        missing = [r for r in range(self.world_size) if not self._store.check([f"{self._key}/here/{r}"])]
        if missing:
            return f"{waited}ranks {missing} of {self.world_size} have not arrived. {advice}"
        return f"{waited}all {self.world_size} ranks have arrived, but the process group did not come up."

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """The main thread has something to tell the store, however long that takes to answer."""
        self._asking_since = time.monotonic()
        try:
            yield
        finally:
            self._asking_since = None

    def _count_saving(self, change: int) -> None:
        with self._asking(), suppress(RuntimeError):
            if self._store is not None:
                self._store.add(f"{self._key}/saving", change)

    def _is_anybody_saving(self) -> bool:
        try:
            return self._store is not None and self._store.add(f"{self._key}/saving", 0) > 0
        except RuntimeError:
            return False


def _decode(record: bytes) -> Failure:
    return Failure(**json.loads(record))


def _computed_by_main_thread_s() -> float:
    """CPU time of the main thread; 0.0 where the system does not tell, or the thread has ended."""
    main = threading.main_thread()
    if not hasattr(time, "pthread_getcpuclockid") or main.ident is None or not main.is_alive():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main.ident))


def place_of_main_thread() -> str:
    """The innermost calls of the main thread, as a traceback shows them: mostly the collective that it waits in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame, limit=PLACE_CALLS)) if frame is not None else "  its end\n"


def _write(text: str) -> None:
    # past Python's buffers: their locks may be held by the thread that is stuck
    with suppress(OSError):
        os.write(2, text.encode())


def _flush() -> None:
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()

    helper = threading.Thread(target=flush, daemon=True)
    helper.start()
    helper.join(timeout=0.5)
