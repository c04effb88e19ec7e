"""Memory of gradients and buckets, counted in storages, against one gradient per parameter.

Run ``python -m tests.benchmarks.gradient_memory``. Two ranks fit the model of ``step_time``. Storages are counted once
each, by address: those that ``.grad`` points into and those of the reducer's buffers. After backward the buckets are
the gradients; during backward one fresh gradient lives beside them until it is packed.
"""

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import Trainer
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure
from tests.benchmarks.two_towers import TwoTowers, batches

BAR = 1.05


class Counted(TwoTowers):
    """Counts storages whenever a gradient arrives, and when the optimizer is about to step."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.after = 0
        for parameter in self.parameters():  # hooked before the strategy's own, so the fresh gradient is still there
            parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: Tensor) -> None:
        self.peak = max(self.peak, self._bytes())

    def _bytes(self) -> int:
        corridor = self.trainer.strategy._corridor
        assert corridor is not None
        buffers = [corridor.reducer.roll_call.vector]
        for bucket in corridor.reducer.buckets:
            buffers += [bucket.flat, bucket.wire]
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in (*grads, *buffers))}
        return sum(storages.values())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.after = max(self.after, self._bytes())


@on_ranks(2, timeout_s=300.0)
def count_bytes(rank: Rank, steps: int) -> dict[str, int]:
    module = Counted()
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MoEClipStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(module, DataLoader(batches(rank.index, steps), batch_size=None))
    assert all(p.grad is not None for p in module.parameters()), "a gradient is missing"
    return {
        "after": module.after,
        "peak": module.peak,
        "one_each": sum(p.numel() * p.element_size() for p in module.parameters()),
        "largest": max(p.numel() * p.element_size() for p in module.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    ranks = count_bytes.launch(steps=arguments.steps)  # type: ignore[attr-defined]
    worst = {key: max(found[key] for found in ranks) for key in ranks[0]}
    print(f"bytes: {worst}")
    rows = [
        measure.row(name, measure.exact(worst[key] / worst["one_each"]), rounds=arguments.steps, ranks=2)
        for name, key in (
            ("memory: gradients and buckets after backward", "after"),
            ("memory: gradients and buckets, peak in backward", "peak"),
        )
    ]
    measure.write_rows(measure.RESULTS / "gradient_memory.csv", rows)


if __name__ == "__main__":
    main()
