"""The monitor of experts under every strategy: whose tokens it counts, each once."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.callbacks.expert_load_monitor import ExpertLoadMonitor
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.watched_fit import EXPERTS, Rows, Shared, Wishes, fit, rows_of
from tests.gradients.one_process import logged_collectives
from tests.models import loader, quiet_trainer

# two towers through one layer, uneven rows, a rank without text tokens, one without any, tokens of no tower, and a
# tower that comes up late
BY_RANK: list[list[Wishes]] = [
    [{"image": [0, 0, 1], "text": []}, {"image": [], "text": []}, {"image": [1], "text": [3], None: [2]}],
    [{"image": [2], "text": [0, 3, 3, 3]}, {"image": [1, 1], "text": [0]}, {"image": [0], "audio": [2, 2], None: []}],
]
BY_HAND: list[Rows] = [
    {
        ("moe", "all"): ([3, 1, 1, 3], [0] * 4),
        ("moe", "image"): ([2, 1, 1, 0], [0] * 4),
        ("moe", "text"): ([1, 0, 0, 3], [0] * 4),
    },
    {
        ("moe", "all"): ([1, 2, 0, 0], [0] * 4),
        ("moe", "image"): ([0, 2, 0, 0], [0] * 4),
        ("moe", "text"): ([1, 0, 0, 0], [0] * 4),
    },
    {
        ("moe", "all"): ([1, 1, 3, 1], [0] * 4),
        ("moe", "audio"): ([0, 0, 2, 0], [0] * 4),
        ("moe", "image"): ([1, 1, 0, 0], [0] * 4),
        ("moe", "text"): ([0, 0, 0, 1], [0] * 4),
    },
]


def added(rows: list[Rows]) -> Rows:
    keys = sorted({key for row in rows for key in row})
    none = ([0] * EXPERTS, [0] * EXPERTS)
    return {
        key: tuple(
            [sum(values) for values in zip(*(row.get(key, none)[kind] for row in rows), strict=True)] for kind in (0, 1)
        )
        for key in keys
    }  # type: ignore[misc]


@on_ranks(2)
def fit_on_ranks(rank: Rank, how: str, every: int, accumulate: int) -> list[tuple[int, Rows]]:
    strategies = {
        "ddp": lambda: "ddp",
        "ep 1": MoEClipStrategy,
        "ep 2": lambda: MoEClipStrategy(expert_parallel_size=2),
    }
    module, _, _ = fit(
        BY_RANK[rank.index],
        world_size=2,
        every=every,
        strategy=strategies[how](),
        accumulate_grad_batches=accumulate,
    )
    return module.history


@pytest.mark.parametrize("how", ["ddp", "ep 1", "ep 2"])
def test_load_of_two_towers_through_one_layer_is_that_of_all_ranks_tokens(how: str) -> None:
    wanted = list(zip((1, 2, 3), BY_HAND, strict=True))
    assert fit_on_ranks.launch(how=how, every=1, accumulate=1) == [wanted, wanted]


def test_what_is_between_publications_adds_up_and_the_rest_comes_at_the_end() -> None:
    wanted = [(2, added(BY_HAND[:2])), (3, BY_HAND[2])]
    assert fit_on_ranks.launch(how="ep 1", every=2, accumulate=1) == [wanted, wanted]


def test_batches_of_one_step_are_published_together() -> None:
    wanted = [(1, added(BY_HAND[:2])), (2, BY_HAND[2])]
    assert fit_on_ranks.launch(how="ddp", every=1, accumulate=2) == [wanted, wanted]


class Overheard(ExpertLoadMonitor):
    """Notes the collectives of each publication."""

    def __init__(self, log: list[tuple[str, str, int]]) -> None:
        super().__init__(every_n_steps=1)
        self.collectives, self.heard = log, []

    def on_train_batch_end(self, *args: Any) -> None:
        start = len(self.collectives)
        super().on_train_batch_end(*args)
        self.heard.append([name for name, _, _ in self.collectives[start:]])


@on_ranks(2)
def overhear(rank: Rank) -> tuple[list[list[str]], Rows]:
    first, last = {"image": [0]}, {"image": [rank.index, 3], None: [2] * 10}
    with logged_collectives() as log:
        stock = dist.barrier

        def barrier(*args: Any, **kwargs: Any) -> Any:
            log.append(("barrier", "", 0))
            return stock(*args, **kwargs)

        with mock.patch.object(dist, "barrier", barrier):
            monitor = Overheard(log)
            quiet_trainer(2, callbacks=[monitor]).fit(Shared(), loader([first, first, last]))
    assert monitor.last is not None
    return monitor.heard, rows_of(monitor.last.loads)


def test_publication_under_our_strategy_is_one_all_reduce_and_never_a_barrier() -> None:
    for heard, rows in overhear.launch():
        assert heard[1:] == [["all_reduce"]] * 2
        # the names of a new tower go to all ranks in between
        assert heard[0][0] == heard[0][-1] == "all_reduce"
        assert "barrier" not in heard[0]
        assert rows == {
            ("moe", "all"): ([1, 1, 20, 2], [0] * EXPERTS),
            ("moe", "image"): ([1, 1, 0, 2], [0] * EXPERTS),
        }


@pytest.mark.parametrize("strategy", ["auto", None])
def test_one_process_counts_the_same(strategy: str | None) -> None:
    options = {} if strategy is None else {"strategy": strategy}
    both = [
        {tower: first.get(tower, []) + second.get(tower, []) for tower in {**first, **second}}
        for first, second in zip(*BY_RANK, strict=True)
    ]
    module, _, _ = fit(both, **options)
    assert module.history == list(zip((1, 2, 3), BY_HAND, strict=True))


@on_ranks(2)
def fit_with_capacity(rank: Rank, ep: int) -> Rows:
    # rank 0: 8 tokens, 2 per expert; rank 1: 4 tokens, 1 per expert
    data = [[{"image": [0, 0, 0, 0, 0, 1, 2, 3]}], [{"image": [1, 1, 3, 3]}]][rank.index]
    module = Shared(capacity_factor=1.0)
    strategy = MoEClipStrategy(expert_parallel_size=ep)
    _, monitor, trainer = fit(data, module=module, world_size=2, strategy=strategy)
    assert trainer.callback_metrics["expert_load_dropped/moe/image"].item() == pytest.approx(5 / 12)
    assert monitor.last is not None
    return rows_of(monitor.last.loads)


@pytest.mark.parametrize("ep", [1, 2])
def test_drops_equal_those_counted_by_hand(ep: int) -> None:
    wanted = ([5, 3, 1, 3], [3, 1, 0, 1])
    assert fit_with_capacity.launch(ep=ep) == [{("moe", "all"): wanted, ("moe", "image"): wanted}] * 2


class Late(Shared):
    """Builds its layer when the Trainer asks for it, not before."""

    def __init__(self) -> None:
        super().__init__()
        self.later = self.moe
        del self.moe

    def configure_model(self) -> None:
        self.moe = self._modules.pop("later")

    def validation_step(self, batch: Wishes, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def test_layer_made_in_configure_model_counts_and_sanity_checking_does_not() -> None:
    module, monitor = Late(), ExpertLoadMonitor(every_n_steps=1)
    trainer = quiet_trainer(1, callbacks=[monitor], num_sanity_val_steps=1)
    trainer.fit(module, loader([{None: [0]}]), loader([{None: [1, 1]}]))
    assert monitor.last is not None
    assert rows_of(monitor.last.loads) == {("moe", "all"): ([1, 0, 0, 0], [0] * 4)}


def test_second_fit_counts_its_own_tokens() -> None:
    module, monitor, _ = fit([{"audio": [0, 0]}])
    module.moe(module.tokens([1]))  # in training mode, between the two
    trainer = quiet_trainer(1, callbacks=[monitor])
    trainer.fit(module, loader([{None: [3]}]))
    assert monitor.last is not None
    assert rows_of(monitor.last.loads) == {("moe", "all"): ([0, 0, 0, 1], [0] * 4)}


class OwnLayer(nn.Module):
    """A user's layer that counts in one tensor, in place, and knows of no drops."""

    num_experts = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.training_load: dict[str | None, Tensor] = {None: torch.zeros(2, dtype=torch.int64)}

    def forward(self, x: Tensor) -> Tensor:
        self.training_load[None] += torch.tensor([1, 2])
        return x * self.weight


class OwnNet(LightningModule):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"own": layer})
        self.again = self.block["own"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.block["own"](batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wrapper(nn.Module):
    """Passes on what it does not have, as wrappers that spread parameters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("wrap", [lambda layer: layer, lambda layer: torch.compile(layer, backend="eager")])
def test_layer_of_the_users_own_takes_part_once_under_its_path(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with torch.compiler.set_stance("force_eager"):
        _, monitor, _ = fit([torch.ones(2)] * 2, module=OwnNet(wrap(OwnLayer())), strategy="auto")  # type: ignore[list-item]
    assert monitor.last is not None
    assert rows_of(monitor.last.loads) == {("block.own", "all"): ([1, 2], [0, 0])}


def test_wrapper_that_passes_attributes_on_counts_nothing_twice() -> None:
    _, monitor, _ = fit([torch.ones(2)], module=OwnNet(Wrapper(OwnLayer())), strategy="auto")  # type: ignore[list-item]
    assert monitor.last is not None
    assert list(monitor.last.loads) == [("block.own.inner", "all")]


class TwoOptimizers(Shared):
    """Takes two optimizer steps in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Wishes, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD([p], lr=0.0) for p in (self.moe.w_in, self.moe.w_out)]


def test_publication_is_not_missed_when_a_batch_takes_several_steps() -> None:
    data: list[Wishes] = [{None: [expert]} for expert in (0, 1, 2, 3)]
    module, _, _ = fit(data, module=TwoOptimizers(), every=3, strategy="auto")
    assert [(step, rows["moe", "all"][0]) for step, rows in module.history] == [
        (4, [1, 1, 0, 0]),
        (6, [0, 0, 1, 0]),
        (8, [0, 0, 0, 1]),
    ]
