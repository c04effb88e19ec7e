"""Every collective of a step, whoever calls it, comes in one order on all ranks, and buckets overlap with backward.

The log is taken where torch hands a collective to its process group, so no name under which it is called escapes it.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer

NUM_STEPS = 4
# rows of the four ranks by step: even, uneven, with empty ranks in turn
ROWS = [[2, 2, 2, 2], [4, 3, 0, 1], [0, 5, 0, 3], [1, 0, 7, 0]]
BUCKET_MB = 2e-4  # a few parameters each
EXCHANGES = "alltoall_base_"

# (operation, group, ranks of the group, number of elements); a mark has a name alone
Entry = tuple[str, str, tuple[int, ...], int]


class Log(TorchDispatchMode):
    """Keeps an entry of every operation of c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def mark(self, name: str) -> None:
        self.entries.append((name, "", (), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            group = next(group_of(a) for a in args if isinstance(a, torch.ScriptObject))
            first = args[0][0] if isinstance(args[0], list) else args[0]
            numel = first.numel() if isinstance(first, Tensor) else -1
            name = func.name().removeprefix("c10d::")
            self.entries.append((name, group.group_desc, tuple(dist.get_process_group_ranks(group)), numel))
        return func(*args, **(kwargs or {}))


def group_of(script_object: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(script_object)


class Logged(TwoTowers):
    """Marks where a backward begins and ends; no gradients are kept, no loss is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.log_of_collectives = Log()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log_of_collectives.mark("step")
        return self.compute_loss(batch)

    def on_before_backward(self, loss: Tensor) -> None:
        self.log_of_collectives.mark("backward")

    def on_after_backward(self) -> None:
        self.log_of_collectives.mark("end")

    def on_train_batch_end(self, *args: object) -> None:
        pass


@on_ranks(4)
def fit(rank: Rank, ep: int, window: int | None = None) -> list[Entry]:
    module = Logged()
    data = [
        (x.split(rows)[rank.index], y.split(rows)[rank.index])
        for (x, y), rows in zip(batches(NUM_STEPS), ROWS, strict=True)
    ]
    strategy = MoEClipStrategy(expert_parallel_size=ep, bucket_size_mb=BUCKET_MB, wait_window=window)
    with module.log_of_collectives as log:
        quiet_trainer(4, strategy=strategy, gradient_clip_val=0.05).fit(module, loader(data))
    return log.entries


def on_group(log: list[Entry], description: str, ranks: tuple[int, ...]) -> list[tuple[str, int]]:
    """Entries of one group; sizes only where all ranks send as much."""
    return [
        (name, -1 if name == EXCHANGES else numel)
        for name, group, of, numel in log
        if (group, of) == (description, ranks)
    ]


def steps_of(log: list[Entry]) -> list[list[Entry]]:
    starts = [i for i, entry in enumerate(log) if entry[0] == "step"]
    return [log[a:b] for a, b in zip(starts, [*starts[1:], len(log)], strict=True)]


@pytest.mark.parametrize("window", [None, 1])
def test_every_collective_of_spread_experts_losses_and_gradients_has_one_order_on_all_ranks(window: int | None) -> None:
    logs = fit.launch(ep=2, window=window)
    groups = {(description, ranks) for log in logs for _, description, ranks, _ in log if ranks}
    # expert slices have two replicas each, and each pair of ranks shares experts
    assert groups == {
        ("default_pg", (0, 1, 2, 3)),
        ("moeclip_gradients_dp", (0, 1, 2, 3)),
        *(("moeclip_ep", ranks) for ranks in ((0, 1), (2, 3))),
        *(("moeclip_gradients_edp", ranks) for ranks in ((0, 2), (1, 3))),
    }
    for description, ranks in groups:
        first = on_group(logs[ranks[0]], description, ranks)
        assert len(first) >= NUM_STEPS
        for rank in ranks:
            assert on_group(logs[rank], description, ranks) == first, f"{description}: rank {rank} and rank {ranks[0]}"
    # nccl wants one order between groups too: that of the whole log, group members aside
    whole = [[(name, description) for name, description, _, _ in log] for log in logs]
    for rank, log in enumerate(whole):
        assert log == whole[0], f"rank {rank}"


def test_buckets_start_before_the_last_exchange_of_activations_in_backward() -> None:
    for rank, log in enumerate(fit.launch(ep=2)):
        steps = steps_of(log)
        assert len(steps) == NUM_STEPS
        for step, entries in enumerate(steps):
            names = [entry[0] for entry in entries]
            backward = entries[names.index("backward") : names.index("end")]
            buckets = [
                i for i, e in enumerate(backward) if e[0] == "allreduce_" and e[1].startswith("moeclip_gradient")
            ]
            exchanges = [i for i, e in enumerate(backward) if e[0] == EXCHANGES and e[1] == "moeclip_ep"]
            assert len(exchanges) == 4, "two exchanges for each of the two layers"
            early = [i for i in buckets if i < exchanges[-1]]
            # the first backward learns which gradients come
            assert bool(early) == (step > 0), f"rank {rank}, step {step}"


def test_log_sees_collectives_by_whatever_name_they_are_called() -> None:
    for log in fit.launch(ep=2):
        seen = {name for name, *_ in log}
        assert {"allreduce_", "_allgather_base_", "_reduce_scatter_base_", EXCHANGES, "broadcast_"} <= seen
