import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from lightning_moeclip.parallel.watch import (
    ASKING_S,
    BUSY_GRACES,
    BUSY_S,
    POLL_S,
    Failure,
    FailureWatch,
    _computed_by_main_thread_s,
    client_at,
    client_of,
)
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.processes import hold_or_wait, wait_for

GRACE_S = 0.5
MODULE = "lightning_moeclip.parallel.watch"
FAILURE = Failure(1, "KeyError: 'planted'")


def watch_of(rank: Rank, *, startup_timeout_s: float = 60.0, grace_s: float = GRACE_S) -> FailureWatch:
    connect = partial(client_of, dist.distributed_c10d._get_default_store())
    return FailureWatch(rank.index, rank.world_size, connect, grace_s=grace_s, startup_timeout_s=startup_timeout_s)


def started(watch: FailureWatch) -> FailureWatch:
    watch.start()
    watch.arrived()
    return watch


def write_stderr_to(folder: str, rank: Rank) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)


def planted() -> KeyError:
    try:
        raise KeyError("planted")
    except KeyError as error:
        return error


@on_ranks(2)
def rank_1_fails_and_stays(rank: Rank, folder: str) -> None:
    write_stderr_to(folder, rank)
    watch = started(watch_of(rank, grace_s=[GRACE_S, 60.0][rank.index]))
    if rank.index == 0:
        hold_or_wait(folder)
    wait_for(lambda: watch._store)
    dist.barrier()
    if rank.index == 1:
        watch.publish(planted())
        # this rank's end would end the barrier of the other one too, without its watch
        hold_or_wait(folder)
        watch._grace_s = GRACE_S
        time.sleep(30.0)
        Path(folder, "stayed").touch()
    dist.barrier()


@on_ranks(2)
def rank_1_fails_and_rank_0_computes(rank: Rank) -> None:
    watch = started(watch_of(rank))
    wait_for(lambda: watch._store)
    dist.barrier()
    if rank.index == 1:
        watch.publish(planted())
        watch.leave()
    else:
        wait_for(lambda: watch.failure)
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            pass
    dist.barrier()


@on_ranks(2)
def test_lost_peer_is_replaced_by_the_first_failure_and_an_own_error_is_not(rank: Rank) -> None:
    watch = started(watch_of(rank, grace_s=60.0))
    if rank.index == 1:
        assert watch.publish(planted()) is None
        assert watch.failure is watch.own
    dist.barrier()
    if rank.index == 0:
        assert watch.publish(ValueError("my own")) is None
        instead = watch.publish(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
        assert isinstance(instead, RuntimeError)
        assert str(instead).startswith("rank 0 was ended because rank 1 failed with KeyError: 'planted'\nTraceback")
        assert watch.failure == watch.seen
    watch.leave()
    dist.barrier()


@on_ranks(2)
def rank_1_never_arrives(rank: Rank, folder: str) -> None:
    write_stderr_to(folder, rank)
    if rank.index == 0:
        watch_of(rank, startup_timeout_s=1.0).start()
        time.sleep(30.0)


@on_ranks(2)
def rank_0_never_arrives(rank: Rank, folder: str) -> None:
    write_stderr_to(folder, rank)
    if rank.index == 1:
        FailureWatch(1, 2, lambda: None, startup_timeout_s=0.5).start()
        time.sleep(30.0)


@on_ranks(2)
def store_goes(rank: Rank, folder: str, is_clean: bool) -> str:
    write_stderr_to(folder, rank)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank.index == 0 else None
    ports = [store.port if store else 0]
    dist.broadcast_object_list(ports)
    watch = started(FailureWatch(rank.index, 2, partial(client_at, "127.0.0.1", ports[0]), grace_s=GRACE_S))
    wait_for(lambda: watch._store)
    dist.barrier()
    if rank.index == 0:
        if is_clean:
            watch.stop()
            dist.barrier()
        watch._quit.set()
        watch._thread.join()
        watch._store = store = None
    else:
        if is_clean:
            wait_for(lambda: watch._has_rank_0_left)
            dist.barrier()
        watch._thread.join(timeout=20.0)
        assert not watch._thread.is_alive()
    # rank 0 stays until the other one has come here, or has been ended
    dist.barrier()
    return "alive"


def text_of(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.err").read_text()


def test_rank_in_a_collective_is_ended_with_the_traceback_of_the_other(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_1_fails_and_stays.launch(folder=str(tmp_path))
    assert caught.value.failures == {0: "ended with exit code 1", 1: "ended with exit code 1"}
    assert not (tmp_path / "stayed").exists()
    assert "[rank 0] ended because rank 1 failed with KeyError: 'planted'\nTraceback" in text_of(tmp_path, 0)
    assert 'raise KeyError("planted")' in text_of(tmp_path, 0)
    place = text_of(tmp_path, 0).split("[rank 0] was at\n")[1]
    assert re.search(r"in rank_1_fails_and_stays\n +dist\.barrier\(\)", place)


def test_a_rank_that_computes_for_ever_is_ended() -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_1_fails_and_rank_0_computes.launch()
    assert caught.value.failures[0] == "ended with exit code 1"


class Timeline:
    """Asks a watch whether to end its process after a failure, at times and after computing that a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, watch: FailureWatch) -> None:
        self.watch = watch
        self.now, self.computed_s, self.is_main_alive = 100.0, 0.0, True
        self.told: list[str] = []
        main = SimpleNamespace(is_alive=lambda: self.is_main_alive)
        monkeypatch.setattr(f"{MODULE}.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(f"{MODULE}.threading", SimpleNamespace(main_thread=lambda: main))
        monkeypatch.setattr(f"{MODULE}._computed_by_main_thread_s", lambda: self.computed_s)
        monkeypatch.setattr(watch, "_end", self.told.append)

    def ends_after_s(self, *, up_to_s: float, poll_s: float = 0.25, computes_s: float = 0.0) -> float | None:
        """Seconds from the first poll after the failure to the one that ends the process."""
        began = self.now
        while self.now <= began + up_to_s:
            self.watch._end_when_stuck(FAILURE)
            if self.told:
                return self.now - began
            self.now += poll_s
            self.computed_s += computes_s
        return None


@pytest.mark.parametrize(("computes_s", "grace_s"), [(0.0, 0.5), (0.9 * BUSY_S, 0.5), (1.1 * BUSY_S, 1.0)])
@pytest.mark.parametrize(("own", "extra_s"), [(None, 0.0), (FAILURE, 1.0)], ids=["elsewhere", "own"])
def test_a_slow_rank_that_computes_has_twice_as_long_as_one_that_is_stuck(
    computes_s: float, grace_s: float, own: Failure | None, extra_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = FailureWatch(0, 2, lambda: None, grace_s=0.5)
    watch.own = own
    timeline = Timeline(monkeypatch, watch)
    assert timeline.ends_after_s(up_to_s=9.0, computes_s=computes_s) == grace_s + extra_s
    assert timeline.told == ["rank 1 failed with KeyError: 'planted'\n"]


def test_a_rank_that_waits_for_the_store_to_tell_its_error_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, FailureWatch(0, 2, lambda: None, grace_s=0.5))
    timeline.watch._asking_since = timeline.now
    assert timeline.ends_after_s(up_to_s=ASKING_S - 1.0) is None
    timeline.watch.own, timeline.watch._asking_since = FAILURE, None
    assert timeline.ends_after_s(up_to_s=9.0) == 1.5  # as long as a rank that was told at once


def test_a_rank_that_never_gets_its_error_told_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, FailureWatch(0, 2, lambda: None, grace_s=0.5))
    timeline.watch._asking_since = timeline.now
    assert timeline.ends_after_s(up_to_s=30.0) == ASKING_S + 0.5


def test_a_store_that_answers_later_than_the_grace_ends_nobody_who_tells_or_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    watch, other = (FailureWatch(rank, 2, lambda: store, grace_s=0.25) for rank in range(2))
    watch._key = other._key
    ended: list[str] = []
    monkeypatch.setattr(watch, "_end", ended.append)
    other.publish(planted())

    def late(answer: Callable[..., Any]) -> Callable[..., Any]:
        def answer_late(*arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                wait_for(lambda: watch.seen)
                time.sleep(0.25 + 1.0 + 2 * POLL_S)  # the grace of the rank with the cause, and polls to see it
            return answer(*arguments)

        return answer_late

    watch._store = SimpleNamespace(
        check=store.check, get=store.get, set=store.set, compare_set=late(store.compare_set), add=late(store.add)
    )
    watch.start()
    assert watch.publish(ValueError("my own")) is None
    with watch.saving():
        assert not ended
    watch.leave()
    watch.stop()
    assert not ended


def test_caught_error_leaves_the_process_alone_until_its_exit_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, FailureWatch(0, 2, lambda: None, grace_s=0.5))
    assert timeline.ends_after_s(up_to_s=0.25) is None
    timeline.watch.leave()
    assert timeline.ends_after_s(up_to_s=1000.0) is None
    timeline.is_main_alive = False
    assert timeline.ends_after_s(up_to_s=9.0) == 0.5


@pytest.mark.parametrize("writer", [0, 1])
def test_all_ranks_wait_a_minute_for_one_that_writes_its_shard(writer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    watches = [FailureWatch(rank, 2, lambda: None, grace_s=0.5) for rank in range(2)]
    for watch in watches:
        watch._key, watch._store = "same run", store
    timeline = Timeline(monkeypatch, watches[0])
    with watches[writer].saving():
        assert timeline.ends_after_s(up_to_s=59.75) is None
    assert timeline.ends_after_s(up_to_s=9.0) == 0.0
    timeline = Timeline(monkeypatch, watches[1])
    with watches[writer].saving():
        assert timeline.ends_after_s(up_to_s=90.0) == 60.0


def test_a_run_ends_within_ten_seconds_of_a_failure() -> None:
    watch = FailureWatch(0, 2, lambda: None)
    # one poll to see it, and one second for the rank with the cause
    assert POLL_S + BUSY_GRACES * watch._grace_s + 1.0 + POLL_S < 10.0


def test_computing_of_the_main_thread_alone_is_seen_from_another_thread() -> None:
    read = []

    def watch() -> None:
        began_s, own_s = _computed_by_main_thread_s(), time.thread_time()
        while time.thread_time() < own_s + 4 * BUSY_S:
            pass
        read.append(_computed_by_main_thread_s() - began_s)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    began_s = _computed_by_main_thread_s()
    wait_for(lambda: sum(range(100_000)) and _computed_by_main_thread_s() - began_s > 2 * BUSY_S)
    read.append(_computed_by_main_thread_s() - began_s)
    assert read[0] < 2 * BUSY_S < read[1]


def test_start_up_deadline_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_1_never_arrives.launch(folder=str(tmp_path))
    assert caught.value.failures[0] == "ended with exit code 1"
    assert "after 1 s at start-up ranks [1] of 2 have not arrived" in text_of(tmp_path, 0)
    assert "MOECLIP_STARTUP_TIMEOUT_S" in text_of(tmp_path, 0)


def test_start_up_deadline_names_rank_0_when_nothing_answers(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_0_never_arrives.launch(folder=str(tmp_path))
    assert caught.value.failures[1] == "ended with exit code 1"
    assert "rank 0 has not arrived: nothing answers" in text_of(tmp_path, 1)


def test_store_that_goes_ends_the_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        store_goes.launch(folder=str(tmp_path), is_clean=False)
    assert caught.value.failures[1] == "ended with exit code 1"
    assert "the store of the process group is gone" in text_of(tmp_path, 1)


def test_store_that_goes_after_rank_0_left_cleanly_ends_nobody(tmp_path: Path) -> None:
    assert store_goes.launch(folder=str(tmp_path), is_clean=True) == ["alive", "alive"]


@on_ranks(2)
def test_stop_ends_the_thread(rank: Rank) -> None:
    watch = started(watch_of(rank))
    watch.stop()
    assert "failure-watch" not in [thread.name for thread in threading.enumerate()]


def test_nobody_listening_is_no_client() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    assert client_at("127.0.0.1", port) is not None
    del store
    assert client_at("127.0.0.1", port) is None


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_record_passes_through_every_store(kind: str, tmp_path: Path) -> None:
    store: Store = {
        "file": lambda: FileStore(str(tmp_path / "store"), 2),
        "hash": HashStore,
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }[kind]()
    wrapped = PrefixStore("a", PrefixStore("b", store))
    watches = [FailureWatch(rank, 2, partial(client_of, wrapped), grace_s=60.0) for rank in range(2)]
    for watch in watches:
        watch._key = "same run"
        started(watch)
    watches[1].publish(planted())
    wait_for(lambda: watches[0].seen)
    assert watches[0].seen == Failure(1, "KeyError: 'planted'", watches[1].own.traceback)
    for watch in watches:
        watch.stop()
