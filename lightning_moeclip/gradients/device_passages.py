"""How buckets travel on a GPU: on a stream of their own, or replayed from a CUDA graph.

Packing, the collective and the cast back of a bucket follow one another on one side stream, which waits for the stream
that backward runs on and is waited for when backward ends: the host waits for nothing. Collectives of all groups are
entered in the order of this stream.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_moeclip.gradients.buckets import Bucket, Passage
from lightning_moeclip.gradients.collectives import start_sum
from lightning_moeclip.kernels.backend import runs_triton

__all__ = ["device_passage"]

_log = logging.getLogger("lightning_moeclip")


def device_passage(mode: Literal["stream", "graph", "sync"], device: torch.device) -> Callable[[], Passage]:
    """What makes the passage of one bucket on ``device``."""
    if mode == "sync":
        return InlinePassage
    # the watchdog of RCCL queries events while a graph is captured (pytorch#175377)
    if mode == "graph" and (torch.version.hip is not None or not runs_triton(torch.empty(0, device=device))):
        _say_no_graphs()
        mode = "stream"
    kind = GraphPassage if mode == "graph" else StreamPassage
    return functools.partial(kind, _side_stream(device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _say_no_graphs() -> None:
    _log.info('stash="graph" is "stream" here: it needs CUDA and Triton.')


def _sum(bucket: Bucket) -> None:
    """Cast, sum and cast back on the current stream."""
    bucket.to_wire()
    work = start_sum(bucket.wire, bucket.group)
    if work is not None:
        work.wait()  # the stream, not the host
    bucket.from_wire()


class InlinePassage:
    """Everything on the stream that backward runs on."""

    patience: float = 2**22

    def pack(self, bucket: Bucket) -> None:
        """Pack what waits."""
        bucket.pack_pending()

    def start(self, bucket: Bucket) -> None:
        """Close the bucket and sum it."""
        bucket.close()
        _sum(bucket)

    def end(self, bucket: Bucket) -> None:
        """Nothing is left to wait for."""


class StreamPassage:
    """Packs and sums on a side stream, beside backward.

    Args:
        stream: the same for all buckets of a device.
    """

    # few enough to be freed soon, enough to be worth a launch
    patience: float = 2**22

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._is_there = torch.cuda.Event()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield

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
        torch.cuda.current_stream(self._stream.device).wait_event(self._is_there)


class GraphPassage(StreamPassage):
    """Replays packing, sum and cast of a bucket as one CUDA graph.

    The first time runs as it is, which makes the communicator and compiles the kernels; the second records. What a
    graph reads is behind tables at fixed addresses, so gradients may lie anywhere; a bucket that has moved is recorded
    anew. Every rank replays in every step: a gradient that is missing, or packed already, is read from its own place.
    """

    patience = float("inf")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._plan: Any = None  # PackPlan, in a file that needs Triton
        self._addresses: tuple[int, ...] = ()

    def start(self, bucket: Bucket) -> None:
        """Replay, or record first."""
        with self._beside():
            bucket.gather_rest()
            self._load(bucket)
            if not self._addresses:
                self._addresses = _addresses(bucket)
                self._plan.launch()
                _sum(bucket)
            else:
                if self._graph is None or self._addresses != _addresses(bucket):
                    self._record(bucket)
                assert self._graph is not None, "recorded above"
                self._graph.replay()
            self._plan.release()  # the allocator keeps what the stream still reads
            self._is_there.record(self._stream)

    def _load(self, bucket: Bucket) -> None:
        """Tell the graph where its gradients lie, and their factors; what it cannot read is packed before it."""
        if bucket.is_watched or not bucket.waits_plainly:
            self.pack(bucket)
        sources = {slot: (slot.view, bucket.factors.one) for slot in bucket.slots}
        sources |= {waiting.slot: (waiting.gradient, waiting.factor) for waiting in bucket.hand_over()}
        if self._plan is None or self._addresses != _addresses(bucket):
            from lightning_moeclip.kernels.grad_triton import PackPlan

            self._plan = PackPlan([slot.view for slot in bucket.slots])
        gradients, factors = zip(*(sources[slot] for slot in bucket.slots), strict=True)
        self._plan.load(gradients, factors)
        self._hold(list(gradients))

    def _record(self, bucket: Bucket) -> None:
        self._addresses = _addresses(bucket)
        self._graph = torch.cuda.CUDAGraph()
        # other threads, such as NCCL's watchdog, may go on meanwhile
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._plan.launch()
            _sum(bucket)


def _addresses(bucket: Bucket) -> tuple[int, ...]:
    return bucket.flat.data_ptr(), bucket.wire.data_ptr()
