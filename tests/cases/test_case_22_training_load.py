"""Case 22: loads are of training tokens, once each, whatever else a Trainer runs between and inside the steps."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.callbacks.expert_load_monitor import ExpertLoadMonitor, PublishedLoad
from lightning_moeclip.modules import MoE
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

NUM_BATCHES, ACCUMULATE, TOP_K = 6, 2, 2


class Loaded(TwoTowers):
    """Runs its towers again in backward, and reads the loads once per optimizer step, beside a monitor."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__(lr=0.0)
        self.use_reentrant = use_reentrant
        self.loads: list[dict[str, Tensor]] = []
        self.published: list[PublishedLoad | None] = []
        self.num_validated = 0

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, text = (
            # reentrant recomputation happens only below an input that needs a gradient
            checkpoint(tower, x.requires_grad_(), use_reentrant=self.use_reentrant)
            for tower, x in zip((self.image, self.text), batch, strict=True)
        )
        return self.loss(image, text)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.compute_loss(batch)
        self.num_validated += 1

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        layers = {path: layer for path, layer in self.named_modules() if isinstance(layer, MoE)}
        self.loads.append({path: layer.training_load[None] for path, layer in layers.items()})

    def on_train_batch_end(self, *args: object) -> None:
        super().on_train_batch_end(*args)
        (monitor,) = (c for c in self.trainer.callbacks if isinstance(c, ExpertLoadMonitor))
        self.published.append(monitor.last)


@on_ranks(2)
def fit(
    rank: Rank, ep: int, rows: list[int], use_reentrant: bool
) -> tuple[list[dict[str, Tensor]], list[PublishedLoad | None], int]:
    module = Loaded(use_reentrant=use_reentrant)
    trainer = quiet_trainer(
        2,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=1,  # also between the two micro-batches of a step
        callbacks=[ExpertLoadMonitor(every_n_steps=1)],
    )
    mine = loader(share(batches(NUM_BATCHES), rows, rank.index))
    trainer.fit(module, mine, loader(share(batches(2, seed=9), rows, rank.index)))
    return module.loads, module.published, module.num_validated


def choices_by_hand(step: int) -> dict[str, Tensor]:
    """Choices per expert over the rows of all ranks; the weights do not move."""
    one = TwoTowers()
    wanted = {}
    for side, name in enumerate(("image", "text")):
        tower = getattr(one, name)
        counts = torch.zeros(4, dtype=torch.int64)
        for x in (batch[side] for batch in batches(NUM_BATCHES)[step * ACCUMULATE : (step + 1) * ACCUMULATE]):
            tokens = torch.cat([torch.ones(len(x), 1, dtype=torch.float64), tower.stem(x).tanh()], dim=1)
            chosen = (tokens @ tower.moe.router.weight.T).topk(TOP_K).indices
            counts += torch.bincount(chosen.flatten(), minlength=4)
        wanted[f"{name}.moe"] = counts
    return wanted


@pytest.mark.parametrize(
    ("ep", "rows", "use_reentrant"),
    [(1, [5, 3], False), (2, [5, 3], False), (2, [5, 3], True), (1, [8, 0], False), (2, [8, 0], False)],
)
def test_case_22_loads_are_of_training_tokens_once_each(ep: int, rows: list[int], use_reentrant: bool) -> None:
    ranks = fit.launch(ep=ep, rows=rows, use_reentrant=use_reentrant)
    before = dict.fromkeys(("image.moe", "text.moe"), torch.zeros(4, dtype=torch.int64))
    for step in range(NUM_BATCHES // ACCUMULATE):
        wanted = choices_by_hand(step)
        for layer, counts in wanted.items():
            assert counts.sum() == ACCUMULATE * sum(rows) * TOP_K
            read = sum(loads[step][layer] for loads, _, _ in ranks)
            assert torch.equal(read - before[layer], counts)
            before[layer] = read
        for _, published, _ in ranks:
            # nothing new between the micro-batches of a step
            assert [None if p is None else p.step for p in published[2 * step : 2 * step + 2]] == [
                step or None,
                step + 1,
            ]
            found = published[2 * step + 1].loads
            assert {key: row.choices.tolist() for key, row in found.items()} == {
                (layer, "all"): counts.tolist() for layer, counts in wanted.items()
            }
    for loads, _, num_validated in ranks:
        assert len(loads) == NUM_BATCHES // ACCUMULATE
        assert num_validated == 2 + 2 * NUM_BATCHES
