"""Case 23 (vllm#39178): balance is of the tokens of all ranks, per layer; neither a mean over layers nor over ranks."""

import math

import pytest
import torch

from lightning_moeclip.monitor.expert_load import ExpertLoad
from lightning_moeclip.testing import Rank, on_ranks

# choices per expert of two layers, by rank
CHOICES = [
    {"first": [8, 0, 0, 0], "second": [3, 1, 0, 0]},
    {"first": [0, 4, 4, 0], "second": [1, 1, 0, 2]},
]
# summed by hand: [8, 4, 4, 0] of mean 4, squares 16 + 0 + 0 + 16; [4, 2, 0, 2] of mean 2, squares 4 + 0 + 4 + 0
VARIATION = {"first": math.sqrt(32 / 4) / 4, "second": math.sqrt(8 / 4) / 2}
SHARE = {"first": [0.5, 0.25, 0.25, 0.0], "second": [0.5, 0.25, 0.0, 0.25]}
DEAD = {"first": 1, "second": 1}


@on_ranks(2)
def measure(rank: Rank) -> dict[str, tuple[list[float], float, int]]:
    load = ExpertLoad({"first": 4, "second": 4})
    for layer, choices in CHOICES[rank.index].items():
        load.update(layer, {None: torch.tensor(choices)})
    rows = load.loads(load.compute())
    return {key.layer: (row.share.tolist(), row.variation, row.num_dead) for key, row in rows.items()}


def test_case_23_balance_is_of_the_sum_over_ranks_per_layer() -> None:
    def variation(choices: list[int]) -> float:
        counts = torch.tensor(choices, dtype=torch.float64)
        return (counts.std(correction=0) / counts.mean()).item()

    # the wrong numbers first: each rank by itself, then the mean; and the layers in one
    by_rank = [sum(variation(rank["first"]) for rank in CHOICES) / 2]
    over_layers = variation([12, 6, 4, 2])
    assert by_rank[0] == pytest.approx((math.sqrt(3) + 1) / 2)
    assert all(abs(wrong - VARIATION["first"]) > 0.05 for wrong in (*by_rank, over_layers))
    for found in measure.launch():
        assert {layer: share for layer, (share, _, _) in found.items()} == SHARE
        assert {layer: value for layer, (_, value, _) in found.items()} == pytest.approx(VARIATION, rel=1e-15)
        assert {layer: dead for layer, (_, _, dead) in found.items()} == DEAD
