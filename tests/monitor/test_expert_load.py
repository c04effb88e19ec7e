"""The load of experts: what is made of counts, and that ranks are summed before anything is made of them."""

import math

import pytest
import torch
from torch import Tensor

from lightning_moeclip.monitor.expert_load import ExpertLoad, LoadKey, TowerLoad
from lightning_moeclip.testing import Rank, on_ranks


def counts(*values: int) -> Tensor:
    return torch.tensor(values)


def test_row_equals_its_definition() -> None:
    row = TowerLoad(choices=counts(6, 0, 3, 3), drops=counts(2, 0, 1, 0))
    assert row.share.tolist() == [0.5, 0.0, 0.25, 0.25]
    # mean 3, squares of the distances 9, 9, 0, 0
    assert row.variation == pytest.approx(math.sqrt(18 / 4) / 3, rel=1e-15)
    assert row.num_dead == 1
    assert row.dropped == 0.25
    assert dict(row.scalars(LoadKey("block.moe", "text"))) == {
        "expert_load/block.moe/text/0": 0.5,
        "expert_load/block.moe/text/1": 0.0,
        "expert_load/block.moe/text/2": 0.25,
        "expert_load/block.moe/text/3": 0.25,
        "expert_load_variation/block.moe/text": row.variation,
        "expert_load_dead/block.moe/text": 1.0,
        "expert_load_dropped/block.moe/text": 0.25,
    }


def test_counts_are_exact_beyond_what_floats_hold() -> None:
    load = ExpertLoad({"moe": 2})
    load.update("moe", {None: counts(2**60 + 1, 1)})
    load.update("moe", {None: counts(1, 0)})
    assert load.loads(load.compute())["moe", "all"].choices.tolist() == [2**60 + 2, 1]


def test_total_holds_all_towers_and_layers_may_differ_in_size() -> None:
    load = ExpertLoad({"a": 2, "b": 3}, towers=["image", "text"])
    load.update("a", {"image": counts(1, 2), "text": counts(4, 0), None: counts(0, 8)}, {"image": counts(0, 1)})
    load.update("b", {"text": counts(1, 1, 7)})
    table = load.compute()
    found = load.loads(table)
    assert {tuple(key): (row.choices.tolist(), row.drops.tolist()) for key, row in found.items()} == {
        ("a", "all"): ([5, 10], [0, 1]),
        ("a", "image"): ([1, 2], [0, 1]),
        ("a", "text"): ([4, 0], [0, 0]),
        ("b", "all"): ([1, 1, 7], [0, 0, 0]),
        ("b", "text"): ([1, 1, 7], [0, 0, 0]),
    }
    assert not load.lacks_a_tower(table)


def test_tower_without_a_row_is_in_the_total_and_makes_itself_known() -> None:
    load = ExpertLoad({"moe": 2}, towers=["image"])
    load.update("moe", {"image": counts(1, 0), "audio": counts(0, 3)})
    table = load.compute()
    assert load.lacks_a_tower(table)
    assert {key.tower: row.choices.tolist() for key, row in load.loads(table).items()} == {
        "all": [1, 3],
        "image": [1, 0],
    }


@pytest.mark.parametrize("num_experts", [1, 3])
def test_shape_follows_from_the_arguments_alone(num_experts: int) -> None:
    shapes = set()
    for seen in ({}, {None: torch.ones(num_experts, dtype=torch.int64)}, {"audio": torch.ones(num_experts).long()}):
        load = ExpertLoad({"moe": num_experts})
        load.update("moe", seen)
        shapes.add(tuple(load.compute().shape))
    assert shapes == {(2, 2, num_experts)}


def test_nothing_counted_has_no_row() -> None:
    load = ExpertLoad({"a": 2, "b": 2})
    load.update("b", {"image": counts(0, 0)})
    assert load.loads(load.compute()) == {}
    load.update("a", {None: counts(0, 1)})
    assert list(load.loads(load.compute())) == [("a", "all")]
    load.reset()
    load.update("a", {})
    assert load.loads(load.compute()) == {}


@on_ranks(2)
def sum_over_ranks(rank: Rank) -> list[list[int]]:
    load = ExpertLoad({"moe": 3}, towers=["image"])
    if rank.index == 0:
        load.update("moe", {"image": counts(1, 2, 3)})
    else:
        load.update("moe", {})
    return [row.choices.tolist() for row in load.loads(load.compute()).values()]


def test_metric_by_itself_sums_over_ranks_also_with_nothing_on_one() -> None:
    assert sum_over_ranks.launch() == [[[1, 2, 3], [1, 2, 3]]] * 2
