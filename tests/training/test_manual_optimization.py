"""Two losses, two backwards, one step, with experts spread over both ranks."""

import torch
from torch import Tensor, nn

from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import (
    TwoTowers,
    batches,
    gradient_errors,
    gradients_of,
    loader,
    own_rows,
    quiet_trainer,
    share,
)

ROWS = [5, 3]
NUM_STEPS, MAX_NORM = 5, 0.05


class TwoLosses(TwoTowers):
    """The contrastive loss, and the distance of the two features of each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def distance(self, batch: tuple[Tensor, Tensor], num_rows: int, world_size: int) -> Tensor:
        # sum over own rows / global rows * W: its mean over ranks is the mean over the batch
        return (self.image(batch[0]) - self.text(batch[1])).square().sum() * world_size / num_rows

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        self.manual_backward(self.distance(batch, sum(ROWS), self.trainer.world_size))
        self.gradients.append(gradients_of(self))
        self.norms.append(self.trainer.strategy.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()

    def on_train_batch_end(self, *args: object) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@on_ranks(2)
def fit(rank: Rank) -> dict[str, object]:
    module = TwoLosses()
    kept: dict[str, Tensor] = {}
    module.on_train_end = lambda: kept.update({n: p.detach().clone() for n, p in module.named_parameters()})
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=2))
    trainer.fit(module, loader(share(batches(NUM_STEPS), ROWS, rank.index)))
    return {"gradients": module.gradients, "norms": module.norms, "parameters": kept}


def test_two_backwards_of_spread_experts_equal_one_process() -> None:
    module = TwoLosses()
    optimizer = module.configure_optimizers()
    gradients, norms = [], []
    for batch in batches(NUM_STEPS):
        optimizer.zero_grad()
        module.compute_loss(batch).backward()
        module.distance(batch, sum(ROWS), 1).backward()
        gradients.append(gradients_of(module))
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM).item())
        optimizer.step()

    for rank, found in enumerate(fit.launch()):
        for step in range(NUM_STEPS):
            assert max(gradient_errors(found["gradients"][step], gradients[step], rank).values()) < 1e-10
            assert abs(found["norms"][step] / norms[step] - 1) < 1e-10
        for name, parameter in module.named_parameters():
            part = found["parameters"][name]
            assert (part - own_rows(parameter, part, rank)).abs().max() < 1e-9, name
