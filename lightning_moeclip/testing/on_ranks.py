"""Run one test body on several gloo ranks of this machine.

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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_moeclip.binding import ROOT

__all__ = ["Rank", "RanksFailed", "on_ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", ROOT])
_GRACE_S = 5.0  # how long the other ranks may go on after one has failed
_TIMEOUT = timedelta(seconds=30)  # a rank that waits longer in one collective fails by itself, with its name


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
            with tempfile.TemporaryDirectory() as folder:
                return _run(body, world_size, timeout_s, Path(folder), kwargs)

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


def _run(body: Callable[..., Any], world_size: int, timeout_s: float, folder: Path, kwargs: dict) -> list[Any]:
    address = (body.__module__, body.__qualname__)  # the decorated name, found again by import in each process
    ranks = [Rank(index, world_size) for index in range(world_size)]
    # here and not on rank 0: it outlives every rank, so none has to wait for the others when it ends
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    processes = [
        _CONTEXT.Process(target=_enter, args=(address, rank, store.port, folder, kwargs), daemon=False)
        for rank in ranks
    ]
    for process in processes:
        process.start()

    deadline = time.monotonic() + timeout_s
    while running := [p.sentinel for p in processes if p.is_alive()]:
        if not wait(running, timeout=max(0.0, deadline - time.monotonic())):
            break
        if any(p.exitcode for p in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)

    failures = {}
    for rank, process in zip(ranks, processes, strict=True):
        report, returned = (folder / f"{rank.index}.{kind}" for kind in ("txt", "pt"))
        if report.exists():
            failures[rank.index] = report.read_text()
        elif process.is_alive():
            failures[rank.index] = "still running: most likely in a collective that another rank never entered"
        elif process.exitcode or not returned.exists():
            failures[rank.index] = f"ended with exit code {process.exitcode}"
        if process.is_alive():
            process.kill()  # a rank inside a collective does not answer SIGTERM
        process.join()
    if failures:
        raise RanksFailed(world_size, failures)
    return [torch.load(folder / f"{rank.index}.pt", weights_only=False) for rank in ranks]


def _enter(address: tuple[str, str], rank: Rank, port: int, folder: Path, kwargs: dict) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        _join_world(rank, port)
        module, name = address
        returned = getattr(importlib.import_module(module), name).body(rank, **kwargs)
        torch.save(returned, folder / f"{rank.index}.pt")
    except BaseException:
        (folder / f"{rank.index}.txt").write_text(traceback.format_exc())
        os._exit(1)  # no atexit hook may wait for the other ranks
    dist.destroy_process_group()


def _join_world(rank: Rank, port: int) -> None:
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
    store = dist.PrefixStore("on_ranks", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size, timeout=_TIMEOUT)
