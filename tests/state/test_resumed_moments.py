"""Case 21: the optimizer of a resumed run holds the moments of its own experts, and of nothing else."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, gradient_errors, loader, own_rows, quiet_trainer, share, train_one_process

ROWS = {1: [8], 2: [5, 3], 4: [4, 3, 0, 1]}
NUM_STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")


class Resumed(TwoTowers):
    """Shows its optimizer as it is before the first step after a resume."""

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        names = {id(p): name for name, p in self.named_parameters()}
        # a state of a parameter that is no longer in the module has no name here
        self.moments = {names[id(p)]: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
        self.shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        self.num_held = sum(len(group["params"]) for group in optimizer.param_groups)


def run(rank: Rank, ep: int, path: str, *, is_resumed: bool) -> dict[str, Any]:
    module = Resumed()
    strategy = MoEClipStrategy(expert_parallel_size=ep)
    trainer = quiet_trainer(rank.world_size, strategy=strategy, max_epochs=2 if is_resumed else 1)
    data = loader(share(batches(NUM_STEPS), ROWS[rank.world_size], rank.index))
    trainer.fit(module, data, ckpt_path=path if is_resumed else None)
    if not is_resumed:
        trainer.save_checkpoint(path)
    return {"moments": module.moments, "shapes": module.shapes, "num_held": module.num_held}


@on_ranks(1)
def run_on_1(rank: Rank, **how: Any) -> dict[str, Any]:
    return run(rank, **how)


@on_ranks(2)
def run_on_2(rank: Rank, **how: Any) -> dict[str, Any]:
    return run(rank, **how)


@on_ranks(4)
def run_on_4(rank: Rank, **how: Any) -> dict[str, Any]:
    return run(rank, **how)


RUNS = {1: run_on_1, 2: run_on_2, 4: run_on_4}


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Tensor]]:
    module = TwoTowers()
    optimizer = module.configure_optimizers()
    train_one_process(module, batches(NUM_STEPS), optimizer=optimizer)
    return {name: optimizer.state[p] for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Paths by the expert_parallel_size that wrote them."""
    folder: Path = tmp_path_factory.mktemp("moments")
    paths = {ep: str(folder / f"{ep}.ckpt") for ep in (2, 4)}
    for ep, path in paths.items():
        for found in RUNS[ep].launch(ep=ep, path=path, is_resumed=False):
            assert found["moments"] == {}
    return paths


@pytest.mark.parametrize(
    ("before", "world_size", "after"), [(2, 1, 1), (2, 2, 1), (2, 4, 4), (2, 4, 2), (4, 2, 2), (4, 4, 1), (2, 2, 2)]
)
def test_case_21_each_rank_resumes_the_moments_of_its_own_experts_alone(
    before: int, world_size: int, after: int, checkpoints: dict[int, str], one_process: dict[str, dict[str, Tensor]]
) -> None:
    for index, found in enumerate(RUNS[world_size].launch(ep=after, path=checkpoints[before], is_resumed=True)):
        moments, place = found["moments"], index % after
        assert moments.keys() == one_process.keys()
        assert found["num_held"] == len(moments)
        assert found["shapes"]["image.moe.w_in"][0] == 4 // after
        for name, state in moments.items():
            assert state.keys() == one_process[name].keys()
            assert state["step"] == NUM_STEPS
            for moment in MOMENTS:
                whole = one_process[name][moment]
                assert state[moment].shape == found["shapes"][name] == own_rows(whole, state[moment], place).shape
        for moment in MOMENTS:
            mine = {name: state[moment] for name, state in moments.items()}
            wanted = {name: state[moment] for name, state in one_process.items()}
            # second moments are squares of gradients within 1e-10
            assert max(gradient_errors(mine, wanted, place).values()) < 2e-10
