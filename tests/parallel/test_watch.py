import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from lightning_moeclip.parallel.watch import Failure, FailureWatch, client_at, client_of
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed

GRACE_S = 0.5


def watch_of(rank: Rank, *, startup_timeout_s: float = 60.0) -> FailureWatch:
    connect = partial(client_of, dist.distributed_c10d._get_default_store())
    return FailureWatch(rank.index, rank.world_size, connect, grace_s=GRACE_S, startup_timeout_s=startup_timeout_s)


def started(watch: FailureWatch) -> FailureWatch:
    watch.start()
    watch.arrived()
    return watch


def write_stderr_to(folder: str, rank: Rank) -> None:
    os.dup2(os.open(f"{folder}/{rank.index}.err", os.O_WRONLY | os.O_CREAT), 2)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def planted() -> KeyError:
    try:
        raise KeyError("planted")
    except KeyError as error:
        return error


@on_ranks(2)
def rank_1_fails_and_stays(rank: Rank, folder: str) -> None:
    write_stderr_to(folder, rank)
    watch = started(watch_of(rank))
    if rank.index == 1:
        watch.publish(planted())
        time.sleep(30.0)
    dist.barrier()


@on_ranks(2)
def test_caught_error_leaves_the_process_alone(rank: Rank) -> None:
    watch = started(watch_of(rank))
    if rank.index == 1:
        watch.publish(planted())
    wait_for(lambda: watch.failure)
    watch.leave()
    time.sleep(4 * GRACE_S)
    dist.barrier()


@on_ranks(2)
def rank_1_fails_and_rank_0_is_slow(rank: Rank, seconds: float) -> None:
    watch = started(watch_of(rank))
    wait_for(lambda: watch._store)
    dist.barrier()
    if rank.index == 1:
        watch.publish(planted())
        watch.leave()
    else:
        wait_for(lambda: watch.failure)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass
        watch.leave()
    dist.barrier()


@on_ranks(2)
def rank_1_writes_for_a_while(rank: Rank, folder: str) -> None:
    watch = started(watch_of(rank))
    wait_for(lambda: watch._store)
    if rank.index == 1:
        with watch.saving():
            watch.publish(planted())
            time.sleep(6 * GRACE_S)
            Path(folder, "shard").write_text("whole")
        time.sleep(30.0)
    dist.barrier()


@on_ranks(2)
def test_lost_peer_is_replaced_by_the_first_failure_and_an_own_error_is_not(rank: Rank) -> None:
    watch = started(watch_of(rank))
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
            time.sleep(0.6)  # the others look every quarter of a second
        watch._quit.set()
        watch._thread.join()
        watch._store = store = None
        time.sleep(3.0 + GRACE_S)
        return ""
    watch._thread.join(timeout=3.0 + GRACE_S)
    return "alive"


def text_of(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.err").read_text()


def test_rank_in_a_collective_is_ended_with_the_traceback_of_the_other(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        rank_1_fails_and_stays.launch(folder=str(tmp_path))
    assert caught.value.failures == {0: "ended with exit code 1", 1: "ended with exit code 1"}
    assert time.monotonic() - began < 10.0
    assert "[rank 0] ended because rank 1 failed with KeyError: 'planted'\nTraceback" in text_of(tmp_path, 0)
    assert 'raise KeyError("planted")' in text_of(tmp_path, 0)


def test_a_slow_rank_that_computes_has_twice_as_long_as_one_that_is_stuck() -> None:
    rank_1_fails_and_rank_0_is_slow.launch(seconds=1.3 * GRACE_S)
    with pytest.raises(RanksFailed) as caught:
        rank_1_fails_and_rank_0_is_slow.launch(seconds=30.0)
    assert caught.value.failures[0] == "ended with exit code 1"


def test_the_others_wait_for_a_rank_that_writes_its_shard(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_1_writes_for_a_while.launch(folder=str(tmp_path))
    # both are ended at once: rank 0's barrier may fail before its watch ends it
    assert caught.value.failures.keys() == {0, 1}
    assert caught.value.failures[1] == "ended with exit code 1"
    assert (tmp_path / "shard").read_text() == "whole"


def test_start_up_deadline_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_1_never_arrives.launch(folder=str(tmp_path))
    assert caught.value.failures == {0: "ended with exit code 1"}
    assert "after 1 s at start-up ranks [1] of 2 have not arrived" in text_of(tmp_path, 0)
    assert "MOECLIP_STARTUP_TIMEOUT_S" in text_of(tmp_path, 0)


def test_start_up_deadline_names_rank_0_when_nothing_answers(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_0_never_arrives.launch(folder=str(tmp_path))
    assert caught.value.failures == {1: "ended with exit code 1"}
    assert "rank 0 has not arrived: nothing answers" in text_of(tmp_path, 1)


def test_store_that_goes_ends_the_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        store_goes.launch(folder=str(tmp_path), is_clean=False)
    assert caught.value.failures[1] == "ended with exit code 1"
    assert "the store of the process group is gone" in text_of(tmp_path, 1)


def test_store_that_goes_after_rank_0_left_cleanly_ends_nobody(tmp_path: Path) -> None:
    assert store_goes.launch(folder=str(tmp_path), is_clean=True) == ["", "alive"]


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
