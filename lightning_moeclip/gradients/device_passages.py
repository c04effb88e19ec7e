"""How buckets travel on a GPU: on a stream of their own, or replayed from a CUDA graph.

Packing, the collective and the cast back of a bucket follow one another on one side stream, which waits for the stream
that backward runs on and is waited for when backward ends: the host waits for nothing. Collectives of all buckets are
entered in the order of this stream, and the roll call behind them.
"""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip.gradients.buckets import Bucket, Passage
from lightning_moeclip.gradients.collectives import start_sum
from lightning_moeclip.kernels.backend import runs_triton

__all__ = ["device_passage"]


def device_passage(mode: Literal["stream", "graph", "sync"], device: torch.device) -> Passage:
    """How one bucket on ``device`` travels."""
    if mode == "sync":
        return InlinePassage()
    # the watchdog of RCCL queries events while a graph is captured (pytorch#175377)
    if mode == "graph" and torch.version.hip is None and runs_triton(torch.empty(0, device=device)):
        return GraphPassage(_side_stream(device))
    if mode == "graph":
        _say_no_graphs()
    return StreamPassage(_side_stream(device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _say_no_graphs() -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn('stash="graph" is "stream" here: it needs CUDA and Triton.', stacklevel=2)


def _sum(bucket: Bucket) -> None:
    """Cast, sum and cast back on the current stream."""
    bucket.to_wire()
    work = start_sum(bucket.wire, bucket.group)
    if work is not None:
        work.wait()  # the stream, not the host
    bucket.from_wire()


class InlinePassage:
    """Everything on the stream of the caller, when backward has ended."""

    # few enough to be freed soon, enough to be worth a launch
    patience: float = 2**22

    def note(self) -> None:
        """The caller's stream is the only one."""

    def pack(self, bucket: Bucket) -> None:
        """Pack what waits."""
        bucket.pack_pending()

    def catch_up(self) -> None:
        """The caller's stream is the only one."""

    def start(self, bucket: Bucket) -> None:
        """Close the bucket and sum it."""
        bucket.close()
        _sum(bucket)

    def end(self, bucket: Bucket) -> None:
        """Nothing is left to wait for."""

    def rehearse(self, bucket: Bucket) -> None:
        """Nothing to make ready."""

    def release(self) -> None:
        """Nothing to let go of."""


class StreamPassage:
    """Packs and sums on a side stream, beside backward.

    Args:
        stream: the same for all buckets of a device.
    """

    patience: float = 2**22

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._is_there = torch.cuda.Event()
        self._sources: set[torch.cuda.Stream] = set()

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)

    def note(self) -> None:
        """Remember the stream that a gradient was left on: autograd runs each operation on that of its forward."""
        self._sources.add(self._current)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        for source in self._sources | {self._current}:
            if source != self._stream:
                self._stream.wait_stream(source)
        self._sources.clear()
        with torch.cuda.stream(self._stream):
            yield

    def catch_up(self) -> None:
        """Have the caller's stream wait for the side stream."""
        if self._current != self._stream:
            self._current.wait_stream(self._stream)

    def _hold(self, read: list[Tensor]) -> None:
        """Have the allocator keep what the side stream reads until it has."""
        for tensor in read:
            tensor.record_stream(self._stream)

    def pack(self, bucket: Bucket) -> None:
        """Pack what waits."""
        with self._beside():
            self._hold(bucket.pack_pending())

    def start(self, bucket: Bucket) -> None:
        """Close the bucket and start the sum."""
        with self._beside():
            bucket.close()
            _sum(bucket)
            self._is_there.record(self._stream)

    def end(self, bucket: Bucket) -> None:
        """Have the stream that needs the sum wait for it."""
        self._current.wait_event(self._is_there)

    def rehearse(self, bucket: Bucket) -> None:
        """Nothing to make ready."""

    def release(self) -> None:
        """Nothing to let go of."""


class GraphPassage(StreamPassage):
    """Replays packing, sum and cast of a bucket as one CUDA graph.

    The first time runs as it is, which makes the communicator and compiles the kernels. Recording waits for the device
    and has its place behind backward. What a graph reads is behind tables at fixed addresses, so gradients may lie
    anywhere; a bucket that has moved is run and recorded anew. Every rank takes part in every step: a gradient that is
    missing, or packed already, is read from its own place.
    """

    patience = float("inf")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._plan: Any = None  # PackPlan, in a file that needs Triton
        self._addresses: tuple[int, ...] = ()

    def start(self, bucket: Bucket) -> None:
        """Replay, or run what is to be recorded."""
        with self._beside():
            bucket.fill_missing()
            self._load(bucket)
            if self._graph is None:
                self._plan.launch()
                _sum(bucket)
            else:
                self._graph.replay()
            self._plan.release()  # the allocator keeps what the stream still reads
            self._is_there.record(self._stream)

    def _load(self, bucket: Bucket) -> None:
        """Tell the graph where its gradients lie, and their factors; what it cannot read is packed before it."""
        if self._addresses != bucket.addresses():
            from lightning_moeclip.kernels.grad_triton import PackPlan

            self._plan, self._graph = PackPlan([slot.view for slot in bucket.slots]), None
            self._addresses = bucket.addresses()
        if bucket.is_watched or not bucket.waits_plainly:
            self.pack(bucket)
        sources = {slot: (slot.view, bucket.factors.one) for slot in bucket.slots}
        sources |= {waiting.slot: (waiting.gradient, waiting.factor) for waiting in bucket.hand_over()}
        gradients, factors = zip(*(sources[slot] for slot in bucket.slots), strict=True)
        self._plan.load(gradients, factors)
        self._hold(list(gradients))

    def rehearse(self, bucket: Bucket) -> None:
        """Record, without running, what ``start`` has run."""
        if self._graph is not None or self._plan is None:
            return
        self._graph = torch.cuda.CUDAGraph()
        # other threads, such as NCCL's watchdog, may go on meanwhile
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._plan.launch()
            _sum(bucket)

    def release(self) -> None:
        """Let go of the graph, whose collective must not outlive its communicator."""
        self._graph, self._plan, self._addresses = None, None, ()
