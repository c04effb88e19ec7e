"""A compiled module trains with spread experts as one process does without a compiler."""

from typing import Any

import torch
from torch import Tensor

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import (
    TwoTowers,
    batches,
    gradient_errors,
    loader,
    own_rows,
    quiet_trainer,
    share,
    train_one_process,
)

ROWS, NUM_STEPS = [5, 3], 3


class Counted(TwoTowers):
    """Counts the steps that the compiler ran as they are written."""

    num_plain = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if not torch.compiler.is_compiling():
            self.num_plain += 1
        return self.compute_loss(batch)

    def on_train_batch_end(self, *args: object) -> None:
        pass


@on_ranks(2, timeout_s=120)
def fit(rank: Rank, backend: str) -> dict[str, Any]:
    module = Counted()
    kept: dict[str, Tensor] = {}
    module.on_train_end = lambda: kept.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2))
    trainer.fit(torch.compile(module, backend=backend), loader(share(batches(NUM_STEPS), ROWS, rank.index)))
    return {"gradients": module.gradients, "parameters": kept, "num_plain": module.num_plain}


def test_compiled_towers_with_spread_experts_equal_one_process() -> None:
    one = train_one_process(TwoTowers(), batches(NUM_STEPS))
    # forward and backward are traced as for inductor, which gives the same numbers and takes a minute
    for rank, found in enumerate(fit.launch(backend="aot_eager")):
        assert found["num_plain"] == 0, "training_step was not compiled"
        for step in range(NUM_STEPS):
            assert max(gradient_errors(found["gradients"][step], one.gradients[step], rank).values()) < 1e-10
        for name, parameter in one.module.named_parameters():
            part = found["parameters"][name]
            assert (part - own_rows(parameter, part, rank)).abs().max() < 1e-9, name
