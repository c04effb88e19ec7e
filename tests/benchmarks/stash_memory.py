"""Memory that gradients and communication hold from step to step, counted in storages, against a naive loop.

Run ``python -m tests.benchmarks.stash_memory``. Two ranks fit two towers of MoE blocks for 200 steps. After each step,
while its gradients are still there, all tensors that are alive are found by the garbage collector, and their storages
counted once each, by address, without those of parameters, optimizer states and the batches: what is left is
gradients, buckets, and whatever communication keeps.

What a naive loop holds when its optimizer steps, written down before anything was measured, is G + G + E bytes:

* G, a gradient per parameter that this rank holds;
* G, a flat copy per collective, from which sums are copied back;
* E, a staging copy of the gradients of this rank's experts, as an asynchronous expert reduction keeps one.

The slab is the gradients, the flat copies and the staging at once, so ours is G and the roll call, and the ratio is
near 1 / (2 + E / G). The article that this answers tells of 3.2 GB that became 1.4 GB: 0.4375.
"""

import argparse
import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.modules import ContrastiveLoss, MoE, auxiliary_loss
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure

BAR = 0.45
WIDTH, HIDDEN, NUM_EXPERTS, DEPTH, TOKENS = 64, 192, 8, 2, 8
_SETTLED = 2  # steps after which nothing may change


class Tower(nn.Module):
    """Attention, then a MoE, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.MultiheadAttention(WIDTH, 4, batch_first=True),
                    "moe": MoE(WIDTH, HIDDEN, NUM_EXPERTS, top_k=2),
                }
            )
            for _ in range(DEPTH)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTD = x_BTD + block["attention"](x_BTD, x_BTD, x_BTD, need_weights=False)[0]
            x_BTD = x_BTD + block["moe"](x_BTD)
        return x_BTD.mean(1)


class Counted(LightningModule):
    """Counts what is alive after each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = Tower(), Tower()
        self.loss = ContrastiveLoss()
        self.held: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.loss(self.image(batch[0]), self.text(batch[1])) + auxiliary_loss(self, balance=0.01)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_batch_end(self, *_: Any) -> None:
        assert any(p.grad is not None for p in self.parameters()), "the gradients are gone"
        self.held.append(self._bytes(self.optimizers().optimizer))

    def _bytes(self, optimizer: torch.optim.Optimizer) -> int:
        gc.collect()
        known = [*self.parameters(), *self.buffers()]
        known += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        known += [x for batch in self.trainer.train_dataloader for x in batch]
        excluded = {x.untyped_storage().data_ptr() for x in known}
        storages = {}
        for x in (o for o in gc.get_objects() if issubclass(type(o), Tensor)):
            storage = x.untyped_storage()
            if storage.data_ptr() not in excluded:
                storages[storage.data_ptr()] = storage.nbytes()
        for parameter in self.parameters():  # a gradient that only its parameter knows is no object of Python's
            if parameter.grad is not None:
                storage = parameter.grad.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def naive_bytes(self) -> int:
        """G + G + E, see the top of this file."""
        gradients = sum(p.numel() * p.element_size() for p in self.parameters())
        experts = sum(p.numel() * p.element_size() for n, p in self.named_parameters() if ".w_" in n)
        return 2 * gradients + experts


@on_ranks(2, timeout_s=600.0)
def count_bytes(rank: Rank, steps: int, expert_parallel_size: int) -> dict[str, Any]:
    module = Counted()
    generator = torch.Generator().manual_seed(rank.index)
    data = [tuple(torch.randn(2, 8, TOKENS, WIDTH, generator=generator)) for _ in range(steps)]
    naive: list[int] = []
    module.on_train_end = lambda: naive.append(module.naive_bytes())  # type: ignore[method-assign]
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MoEClipStrategy(expert_parallel_size=expert_parallel_size),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module, DataLoader(data, batch_size=None))
    return {"held": module.held[_SETTLED:], "naive": naive[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    rows = []
    for ep in (1, 2):
        ranks = count_bytes.launch(steps=arguments.steps, expert_parallel_size=ep)  # type: ignore[attr-defined]
        ratio = max(max(found["held"]) / found["naive"] for found in ranks)
        change = max(max(found["held"]) - min(found["held"]) for found in ranks)
        print(f"ep={ep}: {ranks[0]['held'][0]} bytes held, naive {ranks[0]['naive']}, change {change} bytes")
        rows += [
            measure.row(f"memory, ep={ep}: held / naive loop", measure.exact(ratio), rounds=arguments.steps, ranks=2),
            measure.row(
                f"memory, ep={ep}: bytes of change", measure.exact(float(change)), rounds=arguments.steps, ranks=2
            ),
        ]
    measure.write_rows(measure.RESULTS / "stash_memory.csv", rows)


if __name__ == "__main__":
    main()
