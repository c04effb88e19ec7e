"""The strategy calls the checks in time: all ranks raise before the first step, and one rank warns, once."""

import copy
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_moeclip.binding import Callback, LightningModule, Trainer, pl
from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.setup_checks import _bits_of
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

DIM = 4
CPU = torch.device("cpu")
DATA = TensorDataset(torch.randn(8, DIM, generator=torch.Generator().manual_seed(0)))


class Net(LightningModule):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rank = rank
        self.stem, self.moe = nn.Linear(DIM, DIM), MoE(DIM, 4, 2)
        self.build()

    def build(self) -> None:
        pass

    def run(self, x: Tensor) -> Tensor:
        return self.moe(self.stem(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0] if isinstance(batch, list) else batch
        return self.run(rows if isinstance(rows, Tensor) else torch.ones(2, DIM)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithScale(Net):
    def build(self) -> None:
        self.logit_scale = nn.Parameter(torch.ones(()))

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) * self.logit_scale


class WithNorm(Net):
    def build(self) -> None:
        self.norm, self.loss = nn.BatchNorm1d(DIM), nn.Identity()
        self.loss.recomputes_micro_batches = True


class WithFrozenNorm(WithNorm):
    def build(self) -> None:
        super().build()
        self.norm.eval()


class MovesExperts(Net):
    def on_fit_start(self) -> None:
        if self.rank == 1:
            self.before = self.moe.w_in
            self.moe.w_in = nn.Parameter(torch.empty_like(self.moe.w_in, device="meta"))


class Reentrant(Net):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint(self.moe, self.stem(x), use_reentrant=True)


class NotReentrant(Net):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint(self.moe, self.stem(x), use_reentrant=False)


class WrappedReentrant(Net):
    def build(self) -> None:
        self.moe = checkpoint_wrapper(self.moe, checkpoint_impl=CheckpointImpl.REENTRANT)


class FailsToTell(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.rank == 1:
            self.trainer.strategy._misplaced_expert = self.fail

    def fail(self) -> None:
        raise KeyError("a parameter")


class Unreadable:
    """It shows no rows."""


def own(rank: int) -> DataLoader:
    return loader(list(DATA.tensors[0].chunk(4)[2 * rank : 2 * rank + 2]))


def same(rank: int) -> DataLoader:
    return own(0)


def plain(rank: int) -> DataLoader:
    return DataLoader(DATA, batch_size=2, shuffle=True)


def in_order_of_an_own_dataset(rank: int) -> DataLoader:
    return DataLoader(TensorDataset(DATA.tensors[0].chunk(2)[rank]), batch_size=2)


def sharded(rank: int) -> DataLoader:
    return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA))


def one_replica(rank: int) -> DataLoader:
    return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, num_replicas=1, rank=0))


def shuffled_of_an_own_dataset(rank: int) -> DataLoader:
    return DataLoader(TensorDataset(DATA.tensors[0][rank::2]), batch_size=2, shuffle=True)


def captions(rank: int) -> DataLoader:
    return loader([{"caption": [f"row {2 * i + rank}"], "label": torch.zeros(1)} for i in range(2)])


def odd_on_one_rank(rank: int) -> DataLoader:
    nested = torch.nested.nested_tensor([torch.ones(2, DIM), torch.ones(3, DIM)])
    return loader([{"rows": nested if rank else torch.ones(2, DIM)}])


def unreadable(rank: int) -> DataLoader:
    return loader([Unreadable()])


def one_row(rank: int) -> DataLoader:
    data = TensorDataset(torch.ones(1, DIM))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data))


def schedule(epochs: dict[int, dict[int, int]]) -> Callable[[int], dict[str, Any]]:
    """Settings by rank: a GradientAccumulationScheduler."""
    return lambda rank: {
        "callbacks": [pl.callbacks.GradientAccumulationScheduler(scheduling=epochs[rank])],
        "max_epochs": 2,
    }


Run = tuple[type[Net], Callable[[int], DataLoader], Callable[[int], dict[str, Any]], int]
NOTHING: Callable[[int], dict[str, Any]] = lambda _: {}  # noqa: E731
ERRORS: dict[str, tuple[Run, str]] = {
    "accumulation": (
        (Net, own, lambda rank: {"accumulate_grad_batches": 1 + rank}, 2),
        r"ValueError: accumulate_grad_batches differs between ranks \(rank 0: 1, rank 1: 2\).*\[MOE401:",
    ),
    "accumulation of the second epoch": (
        (Net, own, schedule({0: {0: 1}, 1: {0: 1, 1: 2}}), 1),
        r"ValueError: accumulate_grad_batches differs between ranks \(rank 0: 1, rank 1: 2\).*\[MOE401:",
    ),
    "batch norm": ((WithNorm, own, NOTHING, 1), r"ValueError: norm is a BatchNorm1d in training, and loss .*\[MOE403:"),
    "what cannot be told": ((FailsToTell, own, NOTHING, 1), r"^(RuntimeError: rank 1: )?KeyError: 'a parameter'$"),
    "device": ((MovesExperts, own, NOTHING, 1), r"ValueError: rank 1: moe\.w_in is an expert on meta, .*\[MOE205:"),
}
SCALED = (WithScale, own, lambda _: {"accumulate_grad_batches": 2, "max_epochs": 2}, 1)
WARNINGS: dict[str, tuple[Run, list[str]]] = {
    "contrast": (SCALED, [r"accumulate_grad_batches=2 with a contrastive loss \(logit_scale\).*\[MOE404:"]),
    "contrast of the second epoch": (
        (WithScale, own, schedule({0: {0: 1, 1: 2}, 1: {0: 1, 1: 2}}), 1),
        [r"accumulate_grad_batches=2 .*\[MOE404:"],
    ),
    "no contrast": ((Net, own, lambda _: {"accumulate_grad_batches": 2}, 1), []),
    "no accumulation": ((WithScale, own, NOTHING, 1), []),
    "frozen norm": ((WithFrozenNorm, own, NOTHING, 1), []),
    "same rows": ((Net, same, lambda _: {"max_epochs": 2}, 1), [r"All 2 ranks got the same first batch .*\[MOE503:"]),
    "plain sampler": ((Net, plain, NOTHING, 1), [r"the training loader has a RandomSampler: .*\[MOE502:"]),
    "injected sampler": ((Net, plain, lambda _: {"use_distributed_sampler": True}, 1), []),
    "two of one replica": ((Net, one_replica, NOTHING, 1), [r"All 2 ranks got the same first batch .*\[MOE503:"]),
    "captions": ((Net, captions, NOTHING, 1), []),
    "odd on one rank": ((Net, odd_on_one_rank, NOTHING, 1), []),
    "unreadable": ((Net, unreadable, NOTHING, 1), []),
    "own dataset, shuffled": ((Net, shuffled_of_an_own_dataset, NOTHING, 1), []),
    "own dataset": ((Net, in_order_of_an_own_dataset, NOTHING, 1), []),
    "sharded": ((Net, sharded, NOTHING, 1), []),
    "fewer rows than ranks": ((Net, one_row, NOTHING, 1), []),
    "reentrant": ((Reentrant, own, NOTHING, 2), [r"A layer ran under reentrant activation checkpointing .*\[MOE402:"]),
    "reentrant, not spread": ((Reentrant, own, NOTHING, 1), []),
    "not reentrant": ((NotReentrant, own, NOTHING, 2), []),
    # said before training, and not again in it
    "wrapped": ((WrappedReentrant, own, NOTHING, 2), [r"moe\S* under reentrant activation checkpointing .*\[MOE402:"]),
}


class NoBatchYet(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.has_trained = True

    has_trained = False

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if hasattr(pl_module, "before"):  # Lightning brings the module to the CPU when it has failed
            pl_module.moe.w_in = pl_module.before


def fit(rank: int, run: Run) -> tuple[str, bool, list[str]]:
    """Error, whether a batch went through, and warnings of ours."""
    kind, feed, settings, ep = run
    look, error = NoBatchYet(), ""
    arguments = settings(rank)
    arguments["callbacks"] = [*arguments.get("callbacks", []), look]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=ep), **arguments).fit(kind(rank), feed(rank))
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    return error, look.has_trained, [str(w.message) for w in caught if "[MOE" in str(w.message)]


@on_ranks(2, timeout_s=120)
def runs(rank: Rank) -> dict[str, list[tuple[str, bool, list[str]]]]:
    return {name: gather_objects(fit(rank.index, run)) for name, (run, _) in {**ERRORS, **WARNINGS}.items()}


@functools.cache
def told() -> dict[str, list[tuple[str, bool, list[str]]]]:
    return runs.launch()[0]


@pytest.mark.parametrize("name", ERRORS)
def test_every_rank_raises_the_reason_before_the_first_step_that_is_wrong(name: str) -> None:
    for error, has_trained, _ in told()[name]:
        assert re.search(ERRORS[name][1], error), error
        assert has_trained == ("second epoch" in name)


@pytest.mark.parametrize("name", WARNINGS)
def test_the_first_rank_warns_once_and_only_of_what_is_so(name: str) -> None:
    first, second = told()[name]
    assert (first[0], second[0]) == ("", "")
    assert second[2] == []
    wanted = WARNINGS[name][1]
    assert len(first[2]) == len(wanted), first[2]
    assert all(re.search(pattern, message) for pattern, message in zip(wanted, first[2], strict=True)), first[2]


ODD = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, DIM), torch.ones(3, DIM)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, DIM), torch.ones(3, DIM)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "objects": lambda: np.array([object()]),
    "unknown": Unreadable,
}


@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes and of what it will drop
@pytest.mark.parametrize("name", ODD)
def test_of_a_batch_with_something_odd_nothing_is_said(name: str) -> None:
    assert _bits_of([torch.ones(2), ODD[name]()], CPU) is None


SAME = {"rows": torch.ones(2, 3), "text": ["a", b"b"], "number": (1, 0.5, None, True), "array": np.ones(2)}


@pytest.mark.parametrize(
    "other",
    [
        {"rows": torch.zeros(2, 3)},
        {"rows": torch.ones(3, 2)},
        {"text": ["a", b"c"]},
        {"text": ["a", "b"]},
        {"number": (2, 0.5, None, True)},
        {"number": (1, 0.6, None, True)},
        {"number": (1, 0.5, None, False)},
        {"array": np.zeros(2)},
        {"array": np.ones(2, np.float32)},
    ],
    ids=str,
)
def test_batches_are_equal_where_all_their_leaves_are(other: dict[str, Any]) -> None:
    bits = _bits_of(SAME, CPU)
    assert bits is not None
    assert bits == _bits_of(copy.deepcopy(SAME), CPU)
    assert bits != _bits_of({**SAME, **other}, CPU)


def test_a_batch_without_rows_is_not_compared() -> None:
    assert _bits_of(None, CPU) is None
    assert _bits_of([torch.ones(()), 3, torch.ones(0, 4)], CPU) is None
    assert _bits_of([np.ones(2)], CPU) is not None
    assert _bits_of([nn.Parameter(torch.ones(2))], CPU) == _bits_of([torch.ones(2)], CPU)
