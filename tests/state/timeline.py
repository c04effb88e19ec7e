"""A small training loop whose whole state can be compared bit by bit, without the code that is tested."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Schedule = Callable[[torch.optim.Optimizer], Any]


class Net(nn.Module):
    """Tied weights, dropout, a batch norm, buffers of several dtypes, a Python state, and noise of every generator."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.to(dtype)
        self.register_buffer("num_calls", torch.tensor(0), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("is_even", torch.tensor(True))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.is_even.logical_not_()
        self.calls.append(len(self.calls))
        noise = random.random() + float(np.random.rand())
        y = self.norm(self.first(x)).tanh()
        return self.last(nn.functional.dropout(y, 0.3)) * self.scale + noise

    def get_extra_state(self) -> list[int]:
        return self.calls

    def set_extra_state(self, state: list[int]) -> None:
        self.calls = state


class Timeline:
    """Training of a module, step by step on data that depends on the step alone."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        schedule: Schedule | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self.module = Net() if module is None else module
        self.optimizer = make(list(self.module.parameters()))
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        self.losses: list[bytes] = []
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)

    @property
    def schedulers(self) -> list[Any]:
        return [] if self.scheduler is None else [self.scheduler]

    def loss(self, index: int) -> Tensor:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(index)).to(self.module.first.weight.dtype)
        return self.module(x).float().square().mean()

    def step(self, index: int) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(index)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        self.losses.append(bits(loss))
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        elif self.scheduler is not None:
            self.scheduler.step()

    def bits(self) -> Any:
        """All state but gradients, to be compared with ==."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return bits(
            {
                "parameters": dict(self.module.named_parameters()),
                "buffers": dict(self.module.named_buffers()),
                "calls": getattr(self.module, "calls", None),
                "held": parameters,
                "optimizer": self.optimizer.state_dict(),
                "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
                "random": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
            }
        )

    def storages(self) -> dict[str, int]:
        """Where parameters and optimizer state lie."""
        found = {name: p.data_ptr() for name, p in self.module.named_parameters()}
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number}.{k}": v.data_ptr() for k, v in state.items() if isinstance(v, Tensor)}
        return found


def bits(value: Any) -> Any:
    """A comparable copy in which tensors are their bytes."""
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value).detach()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (tuple(tensor.shape), str(tensor.dtype), raw)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value if value is None or isinstance(value, (int, float, str, bool)) else type(value).__name__
