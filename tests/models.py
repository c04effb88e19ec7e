"""A small two-tower model in float64, and the one process that every layout is held to.

The reference is a plain loop over whole batches without Lightning and without process group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moeclip.binding import LightningModule, Trainer
from lightning_moeclip.modules import ContrastiveLoss, MoE, auxiliary_loss
from lightning_moeclip.strategy import MoEClipStrategy

NUM_EXPERTS, IDLE_EXPERT, DIM = 4, 3, 6


class ListMoE(nn.Module):
    """A user's layer: experts in a ModuleList, each called only when a token wants it."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, (expert(x[rows]) * weights[rows, None]).to(out.dtype))
        return out


class Tower(nn.Module):
    """Linear, MoE with one expert that no token wants, linear."""

    def __init__(self, width: int, *, has_own_moe: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(width, DIM - 1)
        self.moe = MoE(DIM, 8, NUM_EXPERTS, top_k=2) if has_own_moe else ListMoE(DIM, NUM_EXPERTS)
        self.head = nn.Linear(DIM, 5)
        with torch.no_grad():
            self.moe.router.weight[IDLE_EXPERT, 0] = -100.0  # feature 0 is constant

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), self.stem(x).tanh()], dim=-1)
        return self.head(tokens + self.moe(tokens))


class TwoTowers(LightningModule):
    """Contrastive model that keeps the gradients of every step, before clipping."""

    def __init__(self, *, has_own_moe: bool = True, lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.lr = lr
        self.has_own_moe = has_own_moe
        self.image = Tower(8, has_own_moe=has_own_moe)
        self.text = Tower(7, has_own_moe=has_own_moe)
        self.loss = ContrastiveLoss(chunk_size=3)
        self.double()
        self.gradients: list[dict[str, Tensor | None]] = []
        self.losses: list[float] = []

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(self.image(batch[0]), self.text(batch[1]))
        return loss + auxiliary_loss(self, balance=0.1, z=0.01) if self.has_own_moe else loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.compute_loss(batch)
        self.log("loss", loss, sync_dist=True, batch_size=1)
        return loss

    def on_train_batch_end(self, *args: object) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in module.named_parameters()}


def batches(num_batches: int, *, num_rows: int = 8, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(num_rows, 8, generator=generator, dtype=torch.float64),
            torch.randn(num_rows, 7, generator=generator, dtype=torch.float64),
        )
        for _ in range(num_batches)
    ]


def share(data: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int], rank: int) -> list[tuple[Tensor, Tensor]]:
    """The rows of one rank, of every batch."""
    return [(x.split(list(rows))[rank], y.split(list(rows))[rank]) for x, y in data]


def loader(data: list) -> DataLoader:
    return DataLoader(data, batch_size=None)


def quiet_trainer(world_size: int, **arguments: object) -> Trainer:
    """A Trainer for tests: CPU, our strategy unless another is given, no files, no bars."""
    settings: dict[str, object] = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    settings |= {"strategy": MoEClipStrategy()} if "strategy" not in arguments else {}
    return Trainer(**{**settings, **arguments})


@dataclass
class OneProcess:
    """What one process did: gradients before clipping, losses, and the module afterwards."""

    module: nn.Module
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train_one_process(
    module: TwoTowers,
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    step: Callable[[TwoTowers, tuple[Tensor, Tensor]], Tensor] = lambda module, batch: module.compute_loss(batch),
) -> OneProcess:
    """Train on whole batches in this process alone."""
    done = OneProcess(module)
    optimizer = optimizer or module.configure_optimizers()
    for index, batch in enumerate(data):
        loss = step(module, batch)
        if index % accumulate == 0:
            optimizer.zero_grad()
        (loss / accumulate).backward()
        done.losses.append(loss.item())
        if (index + 1) % accumulate == 0 or index + 1 == len(data):
            done.gradients.append(gradients_of(module))
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return done


def own_rows(whole: Tensor, part: Tensor, expert_rank: int) -> Tensor:
    """The slice of ``whole`` that a rank with ``part`` of it holds."""
    if whole.shape == part.shape:
        return whole
    return whole[expert_rank * part.shape[0] : (expert_rank + 1) * part.shape[0]]


def gradient_errors(
    found: dict[str, Tensor | None], wanted: dict[str, Tensor | None], expert_rank: int
) -> dict[str, float]:
    """Relative error of every gradient: |g - ref| / max(|ref|, 1e-6 |all ref|); infinite where only one is None."""
    floor = 1e-6 * torch.stack([g.norm() for g in wanted.values() if g is not None]).norm()
    errors = {}
    for name, reference in wanted.items():
        gradient = found[name]
        if gradient is None or reference is None:
            errors[name] = 0.0 if gradient is None and reference is None else float("inf")
        else:
            reference = own_rows(reference, gradient, expert_rank)
            errors[name] = ((gradient - reference).norm() / torch.maximum(reference.norm(), floor)).item()
    return errors
