"""The smallest layer with spread experts: every token visits every expert, y = sum over e of tanh(x W_e)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.parallel import ledger
from lightning_moeclip.parallel.mesh import ExpertAxis


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ExpertAxis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        total = cotangent.clone()
        dist.all_reduce(total, group=ctx.axis.group)
        return total.chunk(ctx.axis.size)[ctx.axis.rank], None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: ExpertAxis) -> Tensor:
        ctx.axis = axis
        total = part.clone()
        dist.all_reduce(total, group=axis.group)
        return total.chunk(axis.size)[axis.rank].clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _gathered(cotangent, ctx.axis), None


def _gathered(x: Tensor, axis: ExpertAxis) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts)


class TinyExperts(nn.Module):
    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.expert_axis: ExpertAxis | None = None
        self.are_resting = False  # they compute, and get no gradient
        self.weight = nn.Parameter(torch.randn(num_experts, dim, dim, dtype=torch.float64) / dim)

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight}

    def shard_experts(self, axis: ExpertAxis) -> None:
        self.expert_axis = axis
        self.weight.data = self.weight.data.chunk(axis.size)[axis.rank].clone()

    def restore_experts(self, whole: dict[str, Tensor]) -> None:
        self.expert_axis = None
        self.weight.data = whole["weight"]

    def forward(self, x: Tensor) -> Tensor:
        axis = self.expert_axis
        tokens = x if axis is None else _Gather.apply(x, axis)
        weight = self.weight.detach() if self.are_resting else self.weight
        y = torch.einsum("td,edf->etf", tokens, weight).tanh().sum(0)
        return y if axis is None else ledger.enter(_Combine.apply(y, axis))
