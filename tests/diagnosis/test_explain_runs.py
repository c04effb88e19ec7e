"""What a run says of itself is what ``explain`` says of it beforehand, and what its buckets hold."""

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy, explain
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.explanation import Explanation
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.plan_log import TAG, write_plan
from lightning_moeclip.testing import Rank, on_ranks
from tests.diagnosis.odd_modules import DIM, Hiding
from tests.gradients.narrow_clip import Clip, pairs
from tests.models import TwoTowers, batches, loader, quiet_trainer, share


class Telling(TwoTowers):
    """Has one layer frozen, and keeps what the strategy says while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.text.stem.requires_grad_(False)
        self.told: list[Explanation] = []

    def on_fit_start(self) -> None:
        self.told.append(self.trainer.strategy.explain())


def fitted(module: LightningModule, data: list, **arguments: Any) -> Any:
    trainer = quiet_trainer(torch.distributed.get_world_size(), **arguments)
    trainer.fit(module, loader(data))
    return trainer


def gradients_in_buckets(strategy: MoEClipStrategy) -> list[dict[str, int]]:
    """Bytes of each gradient in the buffers of the run, bucket by bucket."""
    return [{slot.planned.name: slot.view.nbytes for slot in b.slots} for b in strategy._corridor.reducer.buckets]


def buckets_told(explanation: Explanation) -> dict[str, tuple[int, ...]]:
    return {name: group.buckets for group in explanation.groups for name in group.names}


@on_ranks(2)
def test_a_run_says_of_itself_what_was_said_before_it(rank: Rank) -> None:
    data = share(batches(1), [4, 4], rank.index)
    for size in (1, 2):
        module = Telling()
        before = explain(Telling(), world_size=2, expert_parallel_size=size, bucket_size_mb=0.001)
        strategy = MoEClipStrategy(expert_parallel_size=size, bucket_size_mb=0.001)
        with pytest.raises(RuntimeError, match=r"strategy\.explain\(\) tells of a run.*lightning_moeclip\.explain\("):
            strategy.explain()
        fitted(module, data, strategy=strategy)
        assert module.told == [before]  # every field of every row
        assert strategy.explain() == before
        assert explain(module, world_size=2, expert_parallel_size=size, bucket_size_mb=0.001) == before
        # and what it says is so
        held = gradients_in_buckets(strategy)
        assert len(held) > 3
        assert sum(sum(bucket.values()) for bucket in held) == before.gradient_bytes
        told = buckets_told(before)
        assert all(number in told.pop(name) for number, bucket in enumerate(held) for name in bucket)
        assert told == {"text.stem.weight": (), "text.stem.bias": ()}
        sent = {"dp": 0, "edp": 0}
        for bucket in strategy._corridor.reducer.buckets:
            if bucket.group is not None:
                sent[bucket.plan.axis] += sum(slot.view.nbytes for slot in bucket.slots)
        # two ranks: 2 n / 2
        assert {ring.axis: ring.bytes_per_rank for ring in before.rings} == {a: n for a, n in sent.items() if n}


@on_ranks(2)
def test_what_hides_has_regions_and_travels_narrow_is_told_alike(rank: Rank, tmp_path: Path) -> None:
    plugin = MoEClipPrecision("16-mixed", device="cpu", loss_scaling="local")
    strategy = MoEClipStrategy(gradient_dtype=torch.float32)
    trainer = fitted(Clip(), pairs(1, seed=rank.index), strategy=strategy, plugins=[plugin])
    found = trainer.strategy.explain()
    assert found == explain(Clip(), world_size=2, gradient_dtype=torch.float32, loss_scaling="local")
    assert {group.region for group in found.groups if group.kind == "expert"} == {"moe"}

    module = Hiding()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*load_from_checkpoint will not see them")
        trainer = fitted(module, [torch.ones(2, DIM)], logger=loggers(tmp_path))
    found = trainer.strategy.explain()
    assert found == explain(Hiding(), world_size=2)
    assert "leaf" in found.unreduced
    assert "optimizer0.group0.3" not in found.unreduced
    written = sorted(path.parent.name for path in tmp_path.rglob("events.out.tfevents.*"))
    assert gather_objects(written)[0] == ["tensorboard"]
    if rank.index == 0:
        assert table_in(tmp_path / "tensorboard") == found.to_markdown()

    for arguments in ({"logger": False}, {"fast_dev_run": True}):
        fitted(Clip(), pairs(1, seed=rank.index), **arguments)

    mesh, imagined = Mesh.build(2), Mesh.imagined(2, 2)
    assert (mesh.replica_sets("edp"), mesh.divisor) == (imagined.replica_sets("edp"), imagined.divisor)
    assert mesh.replicas("edp") == mesh.replica_sets("edp")[rank.index]


def loggers(folder: Path) -> list[Any]:
    return [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tensorboard", version="")]


def table_in(folder: Path) -> str:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors(f"{TAG}/text_summary")
    return event.tensor_proto.string_val[0].decode()


class Trainer:
    """What ``write_plan`` asks of a Trainer."""

    is_global_zero, fast_dev_run, global_step = True, False, 3

    def __init__(self, *experiments: Any) -> None:
        self.loggers = [type("Logger", (), {"experiment": experiment}) for experiment in experiments]


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, str, int]] = []

    def add_text(self, *what: Any) -> None:
        self.written.append(what)


def test_a_table_is_made_only_where_somebody_takes_it_and_a_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def never() -> Explanation:
        raise AssertionError("nobody wants a table")

    write_plan(Trainer(), never)
    write_plan(Trainer(None, object()), never)
    other_rank, quick = Trainer(Writer()), Trainer(Writer())
    other_rank.is_global_zero, quick.fast_dev_run = False, True
    write_plan(other_rank, never)
    write_plan(quick, never)
    assert not caplog.records
    first, second = Writer(), Writer()
    found = explain(nn.Linear(2, 2))
    write_plan(Trainer(first, None, second), lambda: found)
    assert first.written == second.written == [("moeclip/plan", found.to_markdown(), 3)]
    with caplog.at_level(logging.WARNING):
        write_plan(Trainer(first), never)
    assert "The plan could not be written to the loggers: AssertionError: nobody wants a table" in caplog.text


def test_a_table_of_300_parameters_takes_no_time() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(64, 4, 128)
        net = nn.TransformerEncoder(layer, 25, enable_nested_tensor=False)
    start = time.perf_counter()
    explain(net).to_markdown()
    # 11 ms at the start of a fit of 398 parameters, on 2 shared cores; generous, since others share them here too
    assert time.perf_counter() - start < 0.5
