"""The order of what a bucket does on a GPU, with streams and graphs that only take note and kernels on the CPU.

What a device would do at the same time is done one after the other here: this shows what is packed, launched and
replayed, not that streams wait for one another.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning_moeclip.kernels.grad_triton import PackPlan
from torch import Tensor, nn

from lightning_moeclip.gradients import device_passages
from lightning_moeclip.gradients.buckets import Bucket, Passage
from lightning_moeclip.gradients.stash import HostPassage
from lightning_moeclip.parallel.plan import BucketPlan, PlannedParameter
from lightning_moeclip.parallel.roles import ParamRole

SHAPES = {"a": (40, 30), "b": (7,), "c": (33, 5)}


class Stream:
    """Runs everything at once."""

    device = torch.device("cpu")

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...


class Event:
    def record(self, _: Any) -> None: ...


class Graph:
    """Takes note of calls while it is recorded, and makes them when it is replayed."""

    recording: "Graph | None" = None
    num_recorded = 0

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextmanager
def record(graph: Graph, **_: Any) -> Iterator[None]:
    Graph.recording = graph
    Graph.num_recorded += 1
    yield
    Graph.recording = None


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if Graph.recording is not None:
            return Graph.recording.calls.append(lambda: function(*args))
        return function(*args)

    return call


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Stream()

    @contextmanager
    def on(_: Any) -> Iterator[None]:
        yield

    for name, fake in (("Event", Event), ("CUDAGraph", Graph), ("graph", record), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    monkeypatch.setattr(device_passages, "_sum", noted(device_passages._sum))
    monkeypatch.setattr(PackPlan, "launch", noted(PackPlan.launch))
    monkeypatch.setattr(device_passages.StreamPassage, "_hold", lambda *_: None)
    monkeypatch.setattr(Graph, "num_recorded", 0)


def bucket_of(passage: Passage, dtype: torch.dtype) -> Bucket:
    parameters = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    role = ParamRole(None, "dense")
    planned = tuple(PlannedParameter(n, role, p.shape, dtype, "dp", True) for n, p in parameters.items())
    plan = BucketPlan("dp", dtype, torch.device("cpu"), planned)
    flat = torch.zeros(sum(p.numel() for p in parameters.values()) + 64, dtype=dtype)
    return Bucket(plan, parameters, flat, divisor=3, num_replicas=3, group=None, passage=passage)


def steps(dtype: torch.dtype) -> list[dict[str, list[Tensor]]]:
    """What arrives in each step, by parameter: once, not at all, twice."""
    generator = torch.Generator().manual_seed(0)

    def gradients(name: str, number: int) -> list[Tensor]:
        return [torch.randn(SHAPES[name], generator=generator).to(dtype) for _ in range(number)]

    counts = [(1, 1, 1), (1, 1, 1), (1, 0, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1)]
    return [{name: gradients(name, n) for name, n in zip(SHAPES, step, strict=True)} for step in counts]


def run(bucket: Bucket, arrivals: dict[str, list[Tensor]], *, is_watched: bool) -> tuple[Tensor, list[Tensor | None]]:
    bucket.is_watched = is_watched
    for slot in bucket.slots:
        slot.parameter.grad = None
        slot.view.fill_(torch.nan)  # nothing is read that was not written
        for gradient in arrivals[slot.planned.name]:
            slot.parameter.grad = gradient.clone()
            bucket.take(slot)
    bucket.launch()
    bucket.wait()
    bucket.rehearse()
    sums = [slot.sums for slot in bucket.slots]
    bucket.reset()
    return torch.cat([slot.view.flatten() for slot in bucket.slots]), sums


def passages() -> dict[str, Callable[[], Passage]]:
    return {
        "stream": lambda: device_passages.StreamPassage(Stream()),  # type: ignore[arg-type]
        "graph": lambda: device_passages.GraphPassage(Stream()),  # type: ignore[arg-type]
        "sync": device_passages.InlinePassage,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mode", ["stream", "graph", "sync"])
def test_every_way_on_a_device_packs_what_the_host_packs(mode: str, dtype: torch.dtype) -> None:
    host, device = bucket_of(HostPassage(), dtype), bucket_of(passages()[mode](), dtype)
    for index, arrivals in enumerate(steps(dtype)):
        expected, expected_sums = run(host, arrivals, is_watched=index == 3)
        got, sums = run(device, arrivals, is_watched=index == 3)
        # an addition of torch takes its factor in one rounding, one of the kernel in two
        tolerance = torch.finfo(dtype).eps if index == 3 else 0.0
        torch.testing.assert_close(got, expected, rtol=2 * tolerance, atol=2 * tolerance)
        assert [x is None for x in sums] == [x is None for x in expected_sums]
    assert Graph.num_recorded == (1 if mode == "graph" else 0)


def test_a_bucket_that_has_moved_is_recorded_anew() -> None:
    bucket = bucket_of(passages()["graph"](), torch.float32)
    arrivals = steps(torch.float32)[0]
    first = [run(bucket, arrivals, is_watched=False)[0] for _ in range(3)][-1]
    assert Graph.num_recorded == 1
    moved = torch.zeros_like(bucket.flat)
    for slot in bucket.slots:
        slot.view = moved.as_strided(slot.view.size(), slot.view.stride(), slot.view.storage_offset())
    bucket.flat = bucket.wire = moved
    again = [run(bucket, arrivals, is_watched=False)[0] for _ in range(2)][-1]
    assert Graph.num_recorded == 2
    assert torch.equal(again, first)
