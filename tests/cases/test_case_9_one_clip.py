"""Case 9: one clip with experts spread over ranks leaves every replica with the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.modules import MoE
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

ROWS = {2: [5, 3], 4: [4, 3, 0, 1]}
NUM_STEPS, MAX_NORM, EP = 4, 0.05, 2


class Watched(TwoTowers):
    """Keeps norm, clip factor and parameters after every step, while the experts are spread."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.factors: list[float] = []
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *args: object) -> None:
        report = self.trainer.strategy.report
        self.norms.append(report.total_norm.item())
        self.factors.append(report.clip_factor.item())
        self.after.append({n: p.detach().clone() for n, p in self.named_parameters()})


def fit(rank: Rank, dtype: torch.dtype) -> dict[str, Any]:
    module = Watched().to(dtype)
    data = [tuple(x.to(dtype) for x in batch) for batch in share(batches(NUM_STEPS), ROWS[rank.world_size], rank.index)]
    strategy = MoEClipStrategy(expert_parallel_size=EP)
    quiet_trainer(rank.world_size, strategy=strategy, gradient_clip_val=MAX_NORM).fit(module, loader(data))
    return {"norms": module.norms, "factors": module.factors, "after": module.after}


@on_ranks(2)
def fit_on_2(rank: Rank, dtype: torch.dtype) -> dict[str, Any]:
    return fit(rank, dtype)


@on_ranks(4)
def fit_on_4(rank: Rank, dtype: torch.dtype) -> dict[str, Any]:
    return fit(rank, dtype)


def expert_names(module: TwoTowers) -> set[str]:
    layers = {path: layer for path, layer in module.named_modules() if isinstance(layer, MoE)}
    return {f"{path}.{name}" for path, layer in layers.items() for name in layer.expert_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("launch", [fit_on_2.launch, fit_on_4.launch], ids=["2 ranks", "4 ranks"])
def test_case_9_replicas_are_bit_identical_after_a_clip_by_the_norm_of_one_process(
    launch: Any, dtype: torch.dtype
) -> None:
    ranks = launch(dtype=dtype)
    experts = expert_names(TwoTowers())
    assert len(experts) == 4
    for step in range(NUM_STEPS):
        for index, rank in enumerate(ranks):
            assert (rank["norms"][step], rank["factors"][step]) == (ranks[0]["norms"][step], ranks[0]["factors"][step])
            assert 0 < rank["factors"][step] < 1, "the clip does nothing"
            for name, value in rank["after"][step].items():
                # a slice of experts has its replicas EP ranks apart, everything else on every rank
                replica = ranks[index % EP if name in experts else 0]["after"][step][name]
                assert torch.equal(value, replica), f"rank {index}, step {step}, {name}"
    apart = ranks[0]["after"][-1], ranks[1]["after"][-1]
    assert not any(torch.equal(apart[0][name], apart[1][name]) for name in experts), "experts are not spread"

    if dtype is torch.float64:
        one = train_one_process(TwoTowers(), batches(NUM_STEPS), clip=MAX_NORM)
        for step, gradients in enumerate(one.gradients):
            norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm().item()
            assert ranks[0]["norms"][step] == pytest.approx(norm, rel=1e-10)
