"""Time of a snapshot of N bytes against one memory copy of N bytes, and that of going back to it.

Run ``python -m tests.benchmarks.snapshot``. A transformer's parameters with AdamW's moments, 0.5 GB in float32, are
kept in a ring of two whose buffers are there; the copy is one call between two flat tensors of as many bytes. All arms
take turns in one run, with one thread and with as many as torch takes.

The floor of ``take``, in bytes read and written: the copy reads N and writes N; the checksum reads N and the look for
values that are not finite reads the parameters, N / 3. So it is (1 + 1 + 1 + 1/3) N / 2 N = 1.67 copies when every pass
goes to memory, and towards 1 when the later passes find a part in the cache, which is how it is done. Beside bytes,
each of 672 tensors costs some microseconds. ``restore`` reads N for the checksum of the buffer, copies, and reads N
for that of the live tensors: 2 copies. Both share the tensors out to as many threads as the copy has.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import nn

from lightning_moeclip.state.snapshot import SnapshotRing, live_state
from tests.benchmarks import measure
from tests.state.timeline import bits

BAR = 2.0
_DIM, _NUM_LAYERS = 512, 14


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has taken one step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(_DIM, 8, 4 * _DIM, batch_first=True, norm_first=True)
    module = nn.TransformerEncoder(layer, _NUM_LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.randn(2, 4, _DIM)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def check_goes_back(module: nn.Module, optimizer: torch.optim.Optimizer, ring: SnapshotRing) -> None:
    """A snapshot is bit-equal to what it was taken of."""
    live = live_state(module, [optimizer])
    ring.take(live, step=0)
    kept = bits(dict(live.tensors))
    with torch.no_grad():
        for tensor in live.tensors.values():
            tensor.add_(1)
    ring.restore(live_state(module, [optimizer]))
    assert bits(dict(live_state(module, [optimizer]).tensors)) == kept, "not what was kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    module, optimizer = trained()
    ring = SnapshotRing(max_bytes=2**32)
    check_goes_back(module, optimizer, ring)
    source = torch.ones(ring.num_bytes // 8, dtype=torch.int64)
    target = torch.zeros_like(source)
    print(f"bytes of a snapshot: {ring.num_bytes:,}")

    live, steps = live_state(module, [optimizer]), itertools.count(1)
    arms: dict[str, Callable[[], float | None]] = {
        "copy": lambda: void(target.copy_(source)),
        "take": lambda: ring.take(live, step=next(steps)),
        "restore": lambda: void(ring.restore(live)),
    }
    rows, default = [], torch.get_num_threads()
    for label, threads in {"1 thread": 1, "torch's number of threads": default}.items():
        torch.set_num_threads(threads)
        seconds = measure.take_turns(arms, rounds=arguments.rounds)
        for arm in ("take", "restore"):
            figure = measure.paired_ratio(seconds[arm], seconds["copy"])
            rows.append(measure.row(f"snapshot: {arm} / copy, {label}", figure, rounds=arguments.rounds, ranks=1))
    measure.write_rows(measure.RESULTS / "snapshot.csv", rows)
    worst = max(row.median_ratio for row in rows if "take" in row.name)
    print(f"worst take / copy {worst:.3f}, bar {BAR}")


def void(_: object) -> None:
    """An arm that returns nothing is timed from outside."""


if __name__ == "__main__":
    main()
