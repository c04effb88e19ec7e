"""Every way for gradients to travel gives the same bits, whatever the window; nothing is read before it is there."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.gradients.buckets import Bucket, Passage
from lightning_moeclip.gradients.slabs import Slabs, places_of
from lightning_moeclip.gradients.stash import (
    BlockingPassage,
    GradStash,
    HostPassage,
    RecordedPassage,
    passage_for,
)
from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.plan import BucketPlan, PlannedParameter, SyncPlan
from lightning_moeclip.parallel.roles import ParamRole
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

WAYS = [("sync", None), *itertools.product(("stream", "graph"), (None, 1, 2, 4))]
ROWS = {2: [5, 3], 4: [4, 3, 0, 1]}
MANY_BUCKETS = 3e-4  # MiB: 13 buckets of the test's model


@dataclasses.dataclass(frozen=True)
class Setting:
    accumulate: int = 1
    clip: float | None = None
    has_own_moe: bool = True
    dtype: str | None = None


FIRST = Setting(2, 0.05)
OTHERS = [Setting(), Setting(has_own_moe=False, clip=0.05), Setting(2, dtype="bfloat16")]


class NoAllocation(TorchDispatchMode):
    """Refuses operations whose result lies in memory of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.numel()]
        assert all(x.untyped_storage().data_ptr() in given for x in made), f"{func} allocated"
        return out


class Checked:
    """A passage that poisons what is released, and allocates nothing between packing and the sum."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._passage, name)

    def pack(self, bucket: Bucket) -> None:
        with NoAllocation():
            self._passage.pack(bucket)

    def start(self, bucket: Bucket) -> None:
        with NoAllocation():
            self._passage.start(bucket)

    def end(self, bucket: Bucket) -> None:
        self._passage.end(bucket)
        if bucket.wire is not bucket.flat:
            bucket.wire.fill_(torch.nan)


class CheckedStrategy(MoEClipStrategy):
    """Poisons each place between two steps, and counts buckets in flight."""

    most_in_flight = 0

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self._corridor is not None
        assert self._corridor.reducer is not None
        self.stash = self._corridor.reducer._stash
        for bucket in self._corridor.reducer.buckets:
            bucket._passage = Checked(bucket._passage)
            bucket.launch = self.counted(bucket.launch)

    def counted(self, launch: Any) -> Any:
        def launch_and_count() -> None:
            launch()
            self.most_in_flight = max(self.most_in_flight, len(self.stash._in_flight))

        return launch_and_count

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        for slot in self._corridor.reducer._slots:
            if slot.parameter.grad is None:
                slot.view.fill_(torch.nan)
        return super().backward(*args, **kwargs)


def fit(rank: Rank, expert_parallel_size: int, setting: Setting, **how: Any) -> tuple[TwoTowers, CheckedStrategy]:
    module = TwoTowers(has_own_moe=setting.has_own_moe).float()
    data = [(x.float(), y.float()) for x, y in share(batches(6), ROWS[rank.world_size], rank.index)]
    strategy = CheckedStrategy(
        expert_parallel_size=expert_parallel_size, bucket_size_mb=MANY_BUCKETS, gradient_dtype=setting.dtype, **how
    )
    trainer = quiet_trainer(
        rank.world_size,
        strategy=strategy,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=setting.clip,
    )
    trainer.fit(module, loader(data))
    return module, strategy


def assert_same_bits(module: TwoTowers, reference: TwoTowers, what: str) -> None:
    assert len(module.gradients) == len(reference.gradients)
    for step, (got, expected) in enumerate(zip(module.gradients, reference.gradients, strict=True)):
        for name, gradient in expected.items():
            where = f"{what}: {name} in step {step}"
            assert (got[name] is None) == (gradient is None), where
            assert gradient is None or bool(gradient.isfinite().all()), where
            assert gradient is None or torch.equal(got[name], gradient), where
    for (name, got), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(got, expected), f"{what}: {name}"


def compare_ways(rank: Rank, setting: Setting, ways: list[tuple[str, int | None]]) -> None:
    reference = None
    for mode, window in ways:
        module, strategy = fit(rank, 2, setting, stash=mode, wait_window=window)
        num_buckets = len(strategy._corridor.reducer.buckets)
        assert num_buckets > 4
        assert strategy.most_in_flight == min(window or num_buckets, num_buckets)
        reference = reference or module
        assert_same_bits(module, reference, f"{mode}, {window}, {setting}")


@on_ranks(2, timeout_s=120)
def test_all_ways_give_the_same_bits_on_two_ranks(rank: Rank) -> None:
    compare_ways(rank, FIRST, WAYS)
    for setting in OTHERS:
        compare_ways(rank, setting, [("sync", None), ("stream", None), ("graph", 2)])


@on_ranks(4, timeout_s=120)
def test_all_ways_give_the_same_bits_on_four_ranks(rank: Rank) -> None:
    compare_ways(rank, FIRST, WAYS)


@on_ranks(2, timeout_s=60)
def test_a_slab_keeps_its_place_and_its_size(rank: Rank) -> None:
    """One slab per group and dtype, and every bucket of it, at the same addresses from the first step to the last."""
    module = TwoTowers().float()
    addresses = []

    def look(*_: object) -> None:
        buckets = module.trainer.strategy._corridor.reducer.buckets
        addresses.append([bucket.flat.data_ptr() for bucket in buckets])
        slabs = {bucket.flat.untyped_storage().data_ptr(): bucket.plan for bucket in buckets}
        assert len(slabs) == len({(plan.axis, plan.dtype) for plan in slabs.values()}) == 2
        gradients = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
        assert gradients <= slabs.keys()

    module.on_before_optimizer_step = look
    data = [(x.float(), y.float()) for x, y in share(batches(5), [4, 4], rank.index)]
    strategy = MoEClipStrategy(expert_parallel_size=2, bucket_size_mb=MANY_BUCKETS)
    quiet_trainer(2, strategy=strategy).fit(module, loader(data))
    assert addresses == [addresses[0]] * 5


class Guarded(LightningModule):
    """Spread experts with a head behind them, and one rank that gives up a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.moe = nn.Linear(8, 8), MoE(8, 8, 4, top_k=2)
        self.head = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = self.head(self.moe(self.stem(batch))).square().mean()
        return None if index == 3 and self.global_rank == 1 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(2, timeout_s=60)
def test_no_backward_waits_for_a_bucket_that_another_rank_launches_behind_its_own(rank: Rank) -> None:
    """The rank without a loss launches its buckets last; before, it needs the other's part of an exchange of tokens."""
    data = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(rank.index))
    reference = None
    for mode, window in (("stream", None), ("stream", 1), ("sync", None), ("graph", 2)):
        module = Guarded()
        strategy = MoEClipStrategy(expert_parallel_size=2, bucket_size_mb=MANY_BUCKETS, stash=mode, wait_window=window)
        quiet_trainer(2, strategy=strategy).fit(module, loader(list(data)))
        reference = reference or module
        for got, expected in zip(module.parameters(), reference.parameters(), strict=True):
            assert torch.equal(got, expected), (mode, window)


@on_ranks(2, timeout_s=60)
def test_a_gradient_that_a_frozen_parameter_keeps_does_not_keep_the_slab(rank: Rank) -> None:
    class Freezing(Guarded):
        def training_step(self, batch: Tensor, index: int) -> Tensor | None:
            return self.head(self.moe(self.stem(batch))).square().mean()

        def on_train_epoch_start(self) -> None:
            self.stem.weight.requires_grad_(self.current_epoch == 0)

    module = Freezing()
    kept: list[Tensor] = []
    module.on_before_optimizer_step = lambda _: kept.append(module.stem.weight.grad)
    module.on_before_zero_grad = lambda _: None
    module.optimizer_zero_grad = lambda *_: [  # type: ignore[method-assign]
        setattr(p, "grad", None) for p in module.parameters() if p is not module.stem.weight
    ]
    strategy = MoEClipStrategy(expert_parallel_size=2)
    quiet_trainer(2, strategy=strategy, max_epochs=2).fit(module, loader(list(torch.randn(1, 4, 8))))
    size = module.stem.weight.numel() * 4
    assert kept[0].untyped_storage().nbytes() > size  # a part of the slab
    assert kept[1].untyped_storage().nbytes() == size
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize(
    ("mode", "kind"), [("stream", HostPassage), ("graph", RecordedPassage), ("sync", BlockingPassage)]
)
def test_each_way_has_its_passage(mode: Any, kind: type) -> None:
    assert type(passage_for(mode, torch.device("cpu"))) is kind


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "2"])
def test_a_window_without_a_bucket_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match=r"wait_window=.* must be a number of buckets from 1, or None"):
        MoEClipStrategy(wait_window=window)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r'stash=\'async\' must be "stream" \(the default\), "graph" or "sync"'):
        MoEClipStrategy(stash="async")  # type: ignore[arg-type]


def test_flushing_waits_in_the_order_of_the_launches() -> None:
    done: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(self) -> None:
            done.append(f"launch {self.name}")

        def wait(self) -> None:
            done.append(f"wait {self.name}")

    stash = GradStash(wait_window=2)
    for name in "abc":
        stash.launch(Fake(name))  # type: ignore[arg-type]
    stash.flush()
    stash.flush()
    assert done == ["launch a", "launch b", "wait a", "launch c", "wait b", "wait c"]


def test_backward_launches_while_the_window_has_room() -> None:
    class Fake:
        def launch(self) -> None: ...

        def wait(self) -> None: ...

    stash = GradStash(wait_window=1)
    assert stash.has_room
    stash.launch(Fake())  # type: ignore[arg-type]
    assert stash.is_busy
    assert not stash.has_room
    stash.flush()
    assert stash.has_room
    assert not stash.is_busy
    assert not GradStash(is_eager=False).has_room


def bucket_on(passage: Passage, *, divisor: int = 3, num_replicas: int = 3) -> Bucket:
    """Three parameters that three ranks would share: a third is no power of two."""
    parameters = {name: nn.Parameter(torch.zeros(4, 3)) for name in "abc"}
    planned = [PlannedParameter(n, ParamRole(None, "dense"), (4, 3), torch.float32, "dp", True) for n in parameters]
    plan = BucketPlan("dp", torch.float32, torch.device("cpu"), tuple(planned))
    return Bucket(
        plan, parameters, torch.zeros(36), divisor=divisor, num_replicas=num_replicas, group=None, passage=passage
    )


def test_gradients_that_come_several_times_are_divided_and_added_in_their_order_in_every_way() -> None:
    found = []
    for passage in (HostPassage(), BlockingPassage(), RecordedPassage()):
        generator = torch.Generator().manual_seed(0)
        bucket = bucket_on(passage)
        for name in "abaacb":
            slot = bucket.slots["abc".index(name)]
            slot.parameter.grad = torch.randn(4, 3, generator=generator)
            bucket.take(slot)
            assert slot.parameter.grad is None
        assert bucket.is_full
        bucket.launch()
        bucket.wait()
        found.append(bucket.flat.clone())
    assert found[0].abs().min() > 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_waited_in_an_aborted_backward_is_not_packed_in_the_next() -> None:
    bucket = bucket_on(RecordedPassage())
    slot = bucket.slots[0]
    slot.parameter.grad = torch.ones(4, 3)
    bucket.take(slot)
    bucket.reset()
    bucket.launch()
    bucket.wait()
    assert not bucket.flat.any()


def test_a_recorded_bucket_that_has_moved_is_our_own_fault() -> None:
    bucket = bucket_on(RecordedPassage())
    bucket.launch()
    bucket.slots[1].view = torch.zeros(4, 3)
    with pytest.raises(AssertionError, match="a recorded bucket has moved"):
        bucket.launch()


def test_a_sum_of_this_rank_alone_is_divided_and_a_reduced_gradient_is_shared_where_none_comes() -> None:
    """Four ranks, two of which hold the parameter: 1/4 of the one, 1/2 of the other."""
    bucket = bucket_on(HostPassage(), divisor=4, num_replicas=2)
    local, reduced, _ = bucket.slots
    for slot in (local, reduced):
        slot.parameter.grad = torch.full((4, 3), 8.0)
    local.keep()
    bucket.launch()
    bucket.wait()
    assert [slot.view.unique().item() for slot in bucket.slots] == [2.0, 4.0, 0.0]


def test_large_gradients_and_buckets_begin_where_wide_loads_may() -> None:
    shapes = {"a": (3,), "b": (40, 30), "c": (7,), "d": (1024,), "e": (5,)}
    role = ParamRole(None, "dense")
    planned = tuple(PlannedParameter(n, role, s, torch.float32, "dp", True) for n, s in shapes.items())
    bucket = BucketPlan("dp", torch.float32, torch.device("cpu"), planned)
    places = places_of(bucket)
    assert places == [(0, 3), (64, 1264), (1264, 1271), (1280, 2304), (2304, 2309)]
    flats = Slabs(SyncPlan((bucket, bucket), 2, {}), {"dp": None}).flats
    assert [flat.storage_offset() for flat in flats] == [0, 2368]
    assert [len(flat) for flat in flats] == [2309, 2309]
    assert flats[0].untyped_storage().data_ptr() == flats[1].untyped_storage().data_ptr()
