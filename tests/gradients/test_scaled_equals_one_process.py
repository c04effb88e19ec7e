"""Scaler, clipping and fused optimizers together: exact against one process, where no 16-bit rounding enters.

Autocast leaves float64 alone, and scales are powers of two.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, parameters, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(6, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OVERFLOWS = {1: 1, 4: 0}  # rank by step
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
}


class Net(LightningModule):
    """Dense layers, experts and a layer without a gradient."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.optimizer = optimizer
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = TinyExperts(DIM, 4)
        self.idle = nn.Linear(DIM, DIM).double()
        self.scales: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.experts(self.dense(batch)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_after_backward(self) -> None:
        if OVERFLOWS.get(self.trainer.fit_loop.batch_idx) == self.global_rank:
            self.experts.weight.grad[0, 0, 0] = torch.inf

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def in_plain_torch(optimizer: str, clip: str) -> Net:
    """Without a scaler, and without the batches whose step is skipped."""
    net = Net(optimizer)
    stepper = net.configure_optimizers()
    bound = CLIPS[clip].get("gradient_clip_val")
    for index, batch in enumerate(BATCHES):
        if index in OVERFLOWS:
            continue
        stepper.zero_grad()
        net.loss(batch).backward()
        if clip == "norm":
            assert float(nn.utils.clip_grad_norm_(net.parameters(), bound)) > bound
        if clip == "value":
            assert max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None) > bound
            nn.utils.clip_grad_value_(net.parameters(), bound)
        stepper.step()
    return net


@on_ranks(2)
def test_clip_fused_optimizer_scaler_and_skipped_steps_equal_one_process(rank: Rank) -> None:
    for optimizer in OPTIMIZERS:
        for clip, arguments in CLIPS.items():
            true = in_plain_torch(optimizer, clip)
            for size in (1, 2):
                net = Net(optimizer)
                precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0, growth_interval=2)
                strategy = MoEClipStrategy(expert_parallel_size=size)
                trainer(strategy=strategy, plugins=[precision], **arguments).fit(net, share_of(BATCHES, rank))
                error = worst_error(parameters(net), parameters(true))
                assert error < TOLERANCE, f"{optimizer}, clip {clip}, ep {size}: {error}"
                assert gather_objects(net.scales) == [[256.0, 128.0, 128.0, 256.0, 128.0, 128.0]] * 2
