"""Run one test body, or any function, on several gloo ranks of this machine.

``@on_ranks(2)`` turns ``def test_x(rank, ...)`` into a test that runs the body in two processes and fails
with the traceback of every rank that failed. The processes are forked from a server that has imported torch and
Lightning once, so a test costs a fraction of a second and not the imports of each rank.
"""

import functools
import importlib
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_moeclip.binding import ROOT

__all__ = ["Rank", "RanksFailed", "launch_on_ranks", "on_ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", ROOT])
_GRACE_S = 5.0  # how long the other ranks may go on after one has failed
_TIMEOUT = timedelta(seconds=30)  # a rank that waits longer in one collective fails by itself, with its name
_WATCH_S = 0.25  # between two looks of somebody who watches


class RanksFailed(AssertionError):
    """Some ranks of a test failed, or never came back.

    Attributes:
        failures: traceback or cause by rank.
    """

    def __init__(self, world_size: int, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {r} of {world_size} ---\n{why}" for r, why in failures.items()))
        self.failures = failures


@dataclass(frozen=True)
class Rank:
    """Which of how many ranks a test body runs on."""

    index: int
    world_size: int


def on_ranks(world_size: int, *, timeout_s: float = 60.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the decorated test once on each of ``world_size`` ranks.

    The body gets its ``Rank`` first, then the test's own arguments by name. The default process group is made
    before it starts, and the environment looks as under torchrun, so that a Trainer inside joins it. The
    decorated function has ``launch(**arguments)``, which returns what the body returned on each rank.

    Args:
        world_size: number of ranks, all on this machine's CPUs.
        timeout_s: seconds until the ranks still running are ended and the test fails.

    Raises:
        RanksFailed: when the test runs, with the cause on each rank that failed.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        def launch(**kwargs: Any) -> list[Any]:
            decorated = _Decorated(body.__module__, body.__qualname__)
            return launch_on_ranks(decorated, world_size, arguments=kwargs, timeout_s=timeout_s)

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            launch(**kwargs)

        test.body = body  # type: ignore[attr-defined]
        test.launch = launch  # type: ignore[attr-defined]
        # else pytest would read the body's signature, and look for a fixture named "rank"
        del test.__wrapped__  # type: ignore[attr-defined]
        signature = inspect.signature(body)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        return test

    return decorate


@dataclass(frozen=True)
class _Decorated:
    """The body behind a decorated name, found again by import in each process."""

    module: str
    name: str

    def __call__(self, rank: Rank, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name).body(rank, **kwargs)


def launch_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    collective_timeout_s: float = _TIMEOUT.total_seconds(),
    environment: Mapping[str, str] | None = None,
    watch: Callable[[frozenset[int]], None] | None = None,
) -> list[Any]:
    """Run a function once on each of ``world_size`` ranks, as ``on_ranks`` runs a test.

    Args:
        function: can be pickled; gets its ``Rank``, then ``arguments`` by name.
        world_size: number of ranks, all on this machine's CPUs.
        arguments: can be pickled.
        timeout_s: seconds until the ranks still running are ended.
        collective_timeout_s: seconds after which a collective of the default group fails by itself.
        environment: variables that the ranks have from their start.
        watch: called a few times a second with the ranks still running; what it raises ends them, and is raised here.

    Returns:
        What the function returned, by rank.

    Raises:
        RanksFailed: with the cause on each rank that failed.
    """
    timeout = timedelta(seconds=collective_timeout_s)
    # here and not on rank 0: it outlives every rank, so none has to wait for the others when it ends
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    ranks = [Rank(index, world_size) for index in range(world_size)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = partial(function, **(arguments or {}))
        settings = (store.port, timeout, dict(environment or {}))
        processes = [
            _CONTEXT.Process(target=_enter, args=(call, rank, settings, folder), daemon=False) for rank in ranks
        ]
        try:
            for process in processes:
                process.start()
            _await(processes, timeout_s, watch)
            failures = _failures(processes, folder)
        finally:
            for process in processes:
                _end(process)
        if failures:
            raise RanksFailed(world_size, failures)
        return [torch.load(folder / f"{rank.index}.pt", weights_only=False) for rank in ranks]


def _await(processes: list[Any], timeout_s: float, watch: Callable[[frozenset[int]], None] | None) -> None:
    """Wait for all to end, for a while after one has failed, or for the time to be over."""
    deadline = time.monotonic() + timeout_s
    while running := [p.sentinel for p in processes if p.is_alive()]:
        left_s = max(0.0, deadline - time.monotonic())
        ended = wait(running, timeout=left_s if watch is None else min(left_s, _WATCH_S))
        if not ended and time.monotonic() >= deadline:
            break
        if any(p.exitcode for p in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if watch is not None:
            watch(frozenset(index for index, p in enumerate(processes) if p.is_alive()))


def _failures(processes: list[Any], folder: Path) -> dict[int, str]:
    failures = {}
    for index, process in enumerate(processes):
        report, returned = (folder / f"{index}.{kind}" for kind in ("txt", "pt"))
        if report.exists():
            failures[index] = report.read_text()
        elif process.is_alive():
            failures[index] = "still running: most likely in a collective that another rank never entered"
        elif process.exitcode or not returned.exists():
            failures[index] = f"ended with exit code {process.exitcode}"
    return failures


def _end(process: Any) -> None:
    if process.pid is None:  # it was never started
        return
    if process.is_alive():
        process.kill()  # a rank inside a collective does not answer SIGTERM
    process.join()


def _enter(
    call: Callable[[Rank], Any], rank: Rank, settings: tuple[int, timedelta, dict[str, str]], folder: Path
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    port, timeout, environment = settings
    os.environ.update(environment)
    try:
        _join_world(rank, port, timeout)
        torch.save(call(rank), folder / f"{rank.index}.pt")
    except BaseException:
        (folder / f"{rank.index}.txt").write_text(traceback.format_exc())
        os._exit(1)  # no atexit hook may wait for the other ranks
    dist.destroy_process_group()


def _join_world(rank: Rank, port: int, timeout: timedelta) -> None:
    os.environ.update(
        RANK=str(rank.index),
        LOCAL_RANK=str(rank.index),
        WORLD_SIZE=str(rank.world_size),
        LOCAL_WORLD_SIZE=str(rank.world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="on_ranks",
        # a group that the body makes by itself joins the store as well, and no rank tries to be its server
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    store = dist.PrefixStore("on_ranks", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size, timeout=timeout)
