"""Ranks that wait for each other, and the collective that each of them waits in.

A rank in a collective runs no Python, so a thread of its own tells what it is in: the flight recorder of the process
group knows the operation, also where torch's C++ code called it. A deadlock is when no rank computes and every one of
them waits in a collective. A rank that computes, sleeps or reads a file is none.
"""

import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

from lightning_moeclip.parallel.watch import place_of_main_thread

__all__ = ["ENVIRONMENT", "Deadlock", "ProgressMonitor", "Waiting", "watch_for_deadlock"]

ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "64"}  # operations that the flight recorder keeps; none without it
_POLL_S = 0.5
_BUSY_S = 0.01  # of computing between two polls; a wait in a collective of gloo takes nothing
_CALL = re.compile(r'File "(.+?)", line (\d+), in (.+)')
_WRAPPER = "c10d_logger"  # of torch, around every collective
_NUM_CALLS = 4  # that are printed
STILL_S = 8.0  # without computing on any rank; far above what a busy machine keeps a process waiting
_STALE_S = 5.0  # a rank whose monitor has not told for so long is not known to wait
_COLLECTIVE_FRAMES = ("/torch/distributed/", "/torch/autograd/graph.py")


@dataclass(frozen=True)
class Waiting:
    """Where a rank waits.

    Attributes:
        rank: which one.
        operation: the collective, with shape, dtype and its number in its group.
        place: innermost calls of its main thread, as a traceback shows them.
    """

    rank: int
    operation: str
    place: str = ""

    def told(self) -> str:
        """The operation, and the innermost calls."""
        calls = [f"{name} ({Path(file).name}:{line})" for file, line, name in _CALL.findall(self.place)]
        calls = [call for call in calls if _WRAPPER not in call]
        return f"rank {self.rank} waits in {self.operation}, in {' < '.join(calls[: -_NUM_CALLS - 1 : -1])}"


class Deadlock(RuntimeError):
    """Ranks wait for each other.

    Attributes:
        ranks: where each one waits.
    """

    def __init__(self, ranks: tuple[Waiting, ...]) -> None:
        super().__init__("\n".join(waiting.told() for waiting in ranks))
        self.ranks = ranks


class ProgressMonitor:
    """Thread of a rank that leaves in a file since when it computes nothing, and where it is.

    Args:
        folder: of the file.
        rank: this rank.
        note: called when the rank has been still for long, to leave what else is to be known of it.
    """

    def __init__(self, folder: Path, rank: int, note: Callable[[], None] = lambda: None) -> None:
        self._path = folder / f"still.{rank}.json"
        self._rank, self._note = rank, note
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="verify-progress")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._quit.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        since, computed_s = time.monotonic(), 0.0
        while not self._quit.wait(_POLL_S):
            now_s = time.process_time() - time.thread_time()  # this thread's own work is no progress
            if now_s - computed_s > _BUSY_S:
                since = time.monotonic()
                self._path.unlink(missing_ok=True)
            computed_s = now_s
            still_s = time.monotonic() - since
            if still_s >= STILL_S:
                self._tell()

    def _tell(self) -> None:
        place = place_of_main_thread()
        operation = pending_operation() or _operation_from(place)
        if not operation:
            return
        self._note()
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(asdict(Waiting(self._rank, operation, place))))
        os.replace(part, self._path)


def pending_operation() -> str:
    """The oldest collective of this process that has not ended; empty where none is known."""
    if not hasattr(c10d, "_dump_fr_trace"):
        return ""
    record = pickle.loads(c10d._dump_fr_trace(True, False, False))
    pending = [entry for entry in record.get("entries", ()) if not entry["retired"]]
    return _described(pending[0]) if pending else ""


def _described(entry: dict[str, Any]) -> str:
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    tensors = ", ".join(
        f"{dtype.lower()}{list(size)}" for size, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )
    number, (_, group) = entry["collective_seq_id"], entry["process_group"]
    return f"{operation}({tensors}), number {number} of group {group or 'default'}"


def _operation_from(place: str) -> str:
    """What a stack tells of the collective that it ends in; empty for a stack that ends elsewhere."""
    frames = [line for line in place.splitlines() if line.lstrip().startswith("File ")]
    inner = frames[-1].replace(os.sep, "/") if frames else ""
    if not any(path in inner for path in _COLLECTIVE_FRAMES):
        return ""
    if "/torch/autograd/graph.py" in inner:
        return "a collective that backward calls, such as DDP's all_reduce of a bucket"
    return f"{inner.rpartition(' in ')[2]} of torch.distributed"


def watch_for_deadlock(
    folder: Path, world_size: int, *, has_failed: Callable[[], bool]
) -> Callable[[frozenset[int]], None]:
    """What a launcher calls to have ``Deadlock`` raised.

    Args:
        folder: where the monitors of the ranks write.
        world_size: number of ranks.
        has_failed: whether a rank has left an error: the others are ended for that.
    """

    def watch(running: frozenset[int]) -> None:
        if has_failed() or not running:
            return
        waiting = tuple(_still(folder, running))
        if len(waiting) == len(running):
            ended = tuple(
                Waiting(r, "nothing: it has ended its training") for r in range(world_size) if r not in running
            )
            raise Deadlock(tuple(sorted((*waiting, *ended), key=lambda w: w.rank)))

    return watch


def _still(folder: Path, running: frozenset[int]) -> Iterator[Waiting]:
    for rank in sorted(running):
        path = folder / f"still.{rank}.json"
        try:
            # the age by the clock that wrote the file
            if time.time() - path.stat().st_mtime < _STALE_S:
                yield Waiting(**json.loads(path.read_text()))
        except FileNotFoundError:
            continue
