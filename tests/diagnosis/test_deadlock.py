"""What counts as a deadlock, and what does not."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_moeclip.diagnosis import deadlock
from lightning_moeclip.diagnosis.deadlock import Deadlock, ProgressMonitor, Waiting, watch_for_deadlock
from lightning_moeclip.testing.on_ranks import Rank, launch_on_ranks
from tests.processes import wait_for

BOTH = frozenset([0, 1])
PLACE = """  File "/x/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/x/torch/distributed/distributed_c10d.py", line 3151, in broadcast
    work.wait()
"""


def still(folder: Path, rank: int, *, age_s: float = 0.0) -> None:
    path = folder / f"still.{rank}.json"
    path.write_text(json.dumps({"rank": rank, "operation": f"all_reduce of rank {rank}", "place": PLACE}))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def watch(folder: Path, running: frozenset[int] = BOTH, *, has_failed: bool = False) -> None:
    watch_for_deadlock(folder, 2, has_failed=lambda: has_failed)(running)


def test_a_deadlock_is_when_every_running_rank_waits(tmp_path: Path) -> None:
    still(tmp_path, 0)
    watch(tmp_path)  # rank 1 does something
    still(tmp_path, 1)
    with pytest.raises(Deadlock) as caught:
        watch(tmp_path)
    assert [w.operation for w in caught.value.ranks] == ["all_reduce of rank 0", "all_reduce of rank 1"]
    assert str(caught.value).splitlines()[1] == (
        "rank 1 waits in all_reduce of rank 1, in broadcast (distributed_c10d.py:3151)"
    )


def test_a_rank_waits_for_one_that_has_ended(tmp_path: Path) -> None:
    still(tmp_path, 1)
    with pytest.raises(Deadlock) as caught:
        watch(tmp_path, frozenset([1]))
    assert caught.value.ranks[0] == Waiting(0, "nothing: it has ended its training")


def test_ranks_that_are_ended_for_an_error_are_in_no_deadlock(tmp_path: Path) -> None:
    still(tmp_path, 0)
    still(tmp_path, 1)
    watch(tmp_path, has_failed=True)
    watch(tmp_path, frozenset())


def test_a_rank_that_has_not_told_of_late_is_not_known_to_wait(tmp_path: Path) -> None:
    still(tmp_path, 0)
    still(tmp_path, 1, age_s=60.0)
    watch(tmp_path)


def test_a_main_thread_that_sleeps_or_computes_waits_in_no_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlock, "STILL_S", 0.0)
    looks: list[str] = []

    def no_operation() -> str:
        looks.append("looked")
        return ""

    monkeypatch.setattr(deadlock, "pending_operation", no_operation)
    with ProgressMonitor(tmp_path, 0):
        wait_for(lambda: len(looks) > 1)
        assert not list(tmp_path.iterdir())


def test_a_stack_names_the_collective_only_where_it_ends_in_one() -> None:
    told = deadlock._operation_from
    assert told(PLACE) == "broadcast of torch.distributed"
    backward = '  File "/x/torch/autograd/graph.py", line 979, in _engine_run_backward\n    return run()\n'
    assert told(backward) == "a collective that backward calls, such as DDP's all_reduce of a bucket"
    assert told('  File "/x/mine/data.py", line 3, in load\n    time.sleep(60)\n') == ""
    assert told("") == ""


class DifferentCollectives:
    """On its own groups, so that both wait for ever."""

    def __call__(self, rank: Rank, folder: Path) -> None:
        dist.all_reduce(torch.ones(1))
        group = dist.new_group([0, 1], group_desc="apart")
        with ProgressMonitor(folder, rank.index, lambda: (folder / f"noted.{rank.index}").touch()):
            if rank.index == 0:
                dist.all_reduce(torch.ones(3, 2), group=group)
            else:
                dist.barrier()


def test_ranks_in_different_collectives_are_ended_with_the_name_of_each(tmp_path: Path) -> None:
    found = watch_for_deadlock(tmp_path, 2, has_failed=lambda: False)
    with pytest.raises(Deadlock) as caught:
        launch_on_ranks(
            DifferentCollectives(),
            2,
            arguments={"folder": tmp_path},
            timeout_s=120.0,
            collective_timeout_s=120.0,  # longer than a deadlock takes to be found on a busy machine
            environment=deadlock.ENVIRONMENT,
            watch=found,
        )
    first, second = caught.value.ranks
    assert first.operation == "all_reduce(float[3, 2]), number 1 of group apart"
    assert second.operation.startswith("barrier(), number ")
    assert second.operation.endswith("of group default_pg")
    assert {p.name for p in tmp_path.glob("noted.*")} == {"noted.0", "noted.1"}
