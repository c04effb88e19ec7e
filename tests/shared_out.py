"""A layer with layout, tags and exchange of DeepSpeed's ``moe.layer.MoE``: each rank builds other experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import contrastive_loss
from tests.models import gradients_of

NUM_EXPERTS, IDLE_EXPERT, DIM = 4, 3, 6


class _ToAll(torch.autograd.Function):
    """Rows of all ranks of a group; the backward sums cotangents and gives each rank those of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _own_sum(cotangent, ctx.group), None


class _FromAll(torch.autograd.Function):
    """The way back: sums over a group, of which each rank gets its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(rows, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(cotangent) for _ in range(ctx.group.size())]
        dist.all_gather(parts, cotangent.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def _own_sum(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = rows.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].contiguous()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        with torch.no_grad():
            self.wg.weight[IDLE_EXPERT, 0] = -100.0  # feature 0 is constant


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)
        self.register_buffer("offset", torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.offset


class Experts(nn.Module):
    def __init__(self, experts: list[Expert], group_name: str) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(experts)
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = group_name  # type: ignore[attr-defined]


class Exchange(nn.Module):
    def __init__(self, experts: list[Expert], ep_size: int) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = Experts(experts, f"ep_size_{ep_size}")
        self.ep_size, self.ep_group, self.num_local_experts = ep_size, None, len(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate.wg(x).softmax(-1).max(-1)
        rank = 0
        if self.ep_size > 1:
            rank = self.ep_group.rank()
            x, chosen = _ToAll.apply(x, self.ep_group), _ToAll.apply(chosen, self.ep_group)
        out = x * 0.0  # the same graph on every rank, also where no token came
        for index, expert in enumerate(self.experts.deepspeed_experts):
            rows = (chosen == rank * self.num_local_experts + index).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        if self.ep_size > 1:
            out = _FromAll.apply(out, self.ep_group)
        return out * weights[:, None]


class SharedOutMoE(nn.Module):
    """Of the ``NUM_EXPERTS`` experts, drawn alike on every rank, this one keeps its own."""

    def __init__(self, ep_size: int, rank: int) -> None:
        super().__init__()
        experts = [Expert() for _ in range(NUM_EXPERTS)]
        share = NUM_EXPERTS // ep_size
        first = rank % ep_size * share
        self.ep_size = ep_size
        self.deepspeed_moe = Exchange(experts[first : first + share], ep_size)

    def set_deepspeed_parallelism(self) -> None:
        """Ranks [k * ep, (k + 1) * ep) share experts out, as in DeepSpeed."""
        for first in range(0, dist.get_world_size(), self.ep_size):
            ranks = list(range(first, first + self.ep_size))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.deepspeed_moe.ep_group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.deepspeed_moe(x)


class SharedOutTowers(LightningModule):
    """Two layers of such experts in the image tower, one parameter more than that in the text tower.

    Args:
        ep_size: ranks that share the experts out.
        rank: of this process.
        stray_rank: rank whose step gives no loss, or a zero of one; the loss is then each rank's own, so that no
            collective but those of the layers is in its backward.
        gives_none: which of both.
    """

    def __init__(self, ep_size: int, rank: int = 0, *, stray_rank: int | None = None, gives_none: bool = True) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.rank, self.stray_rank, self.gives_none = rank, stray_rank, gives_none
        self.visual = nn.Linear(8, DIM - 1)
        self.visual_moe = SharedOutMoE(ep_size, rank)
        self.visual_second = SharedOutMoE(ep_size, rank)
        self.text = nn.Linear(7, DIM)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.double()
        self.gradients: list[dict[str, Tensor | None]] = []

    def configure_model(self) -> None:
        if self.visual_moe.ep_size > 1:
            self.visual_moe.set_deepspeed_parallelism()
            self.visual_second.set_deepspeed_parallelism()

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.visual(batch[0]).tanh()
        x = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], dim=-1)
        x = x + self.visual_moe(x)
        x = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x[:, 1:]], dim=-1)
        x = x + self.visual_second(x)
        if self.stray_rank is not None:
            return (x * self.text(batch[1])).mean()
        return contrastive_loss(x, self.text(batch[1]), self.logit_scale)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = self.compute_loss(batch)
        if self.rank == self.stray_rank:
            return None if self.gives_none else loss * 0.0
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
