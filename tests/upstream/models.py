"""What the tests of this folder share: small modules, Trainers of two strategies, and one script run under both."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_moeclip.binding import Callback, LightningModule, Trainer, pl
from lightning_moeclip.strategy import MoEClipStrategy
from tests.models import quiet_trainer

WIDTH, ROWS = 4, 2

MakeTrainer = Callable[..., Trainer]
Misconfigured = pl.utilities.exceptions.MisconfigurationException


def ours(world_size: int = 1, **arguments: Any) -> Trainer:
    """A quiet Trainer, and the assertion of every test of this folder: its strategy is ours."""
    trainer = quiet_trainer(world_size, **{"strategy": MoEClipStrategy(), "log_every_n_steps": 1, **arguments})
    assert isinstance(trainer.strategy, MoEClipStrategy)
    return trainer


def stock(**arguments: Any) -> Trainer:
    """The same Trainer under Lightning's strategy for one device."""
    trainer = quiet_trainer(1, **{"log_every_n_steps": 1, **arguments, "strategy": "auto"})
    assert type(trainer.strategy) is pl.strategies.SingleDeviceStrategy
    return trainer


def under_both(script: Callable[[MakeTrainer], Any]) -> Any:
    """Run ``script`` under Lightning's strategy for one device and under ours; both must give the same to the bit.

    Returns:
        What it gave under ours.
    """
    if dist.is_initialized():  # an earlier run of ours has left one, which the stock strategy would notice
        dist.destroy_process_group()
    wanted = script(stock)
    found = script(ours)
    assert list(differences(found, wanted)) == []
    return found


def differences(found: Any, wanted: Any, where: str = "") -> Iterable[str]:
    """Where two nested values differ, in words; tensors to the bit, and NaN is NaN."""
    if isinstance(wanted, Tensor):
        if not (isinstance(found, Tensor) and found.dtype == wanted.dtype and is_same(found, wanted)):
            yield f"{where}: {found} for {wanted}"
    elif isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key in {**wanted, **found}:
            if key not in found or key not in wanted:
                yield f"{where}/{key}: only {'wanted' if key in wanted else 'found'}"
            else:
                yield from differences(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        for i, (one, other) in enumerate(zip(found, wanted, strict=False)):
            yield from differences(one, other, f"{where}/{i}")
        if len(found) != len(wanted):
            more = (found if len(found) > len(wanted) else wanted)[min(len(found), len(wanted))]
            yield f"{where}: {len(found)} items for {len(wanted)}, the first more is {more}"
    elif found != wanted:
        yield f"{where}: {found} for {wanted}"


def is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def rows(num_batches: int = 3, *, seed: int = 0) -> DataLoader:
    """Batches of [ROWS, WIDTH] float32, always in the same order."""
    data = torch.randn(num_batches * ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DataLoader(data, batch_size=ROWS)


class ResumableRows:
    """The batches of ``rows``, going on after the one at which a checkpoint was saved."""

    def __init__(self, num_batches: int = 3, *, seed: int = 0) -> None:
        self.batches = list(rows(num_batches, seed=seed))
        self.num_given = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        self.num_given %= len(self.batches)  # an epoch ends before the loader is asked for one more
        while self.num_given < len(self.batches):
            self.num_given += 1
            yield self.batches[self.num_given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["num_given"]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def nudged(module: nn.Module) -> nn.Module:
    """The module with other weights, so that a test sees whether they were loaded."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    return module


class Damper(LightningModule):
    """Two layers that learn to answer every row with zeros; brings its own loaders."""

    def __init__(self, *, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lr = lr
        self.inner = nn.Linear(WIDTH, 3)
        self.outer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).tanh())

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.loss(batch)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"error": self.loss(batch)}

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"error": self.loss(batch)}

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return rows()

    def val_dataloader(self) -> Any:
        return rows(2, seed=1)

    def test_dataloader(self) -> Any:
        return rows(2, seed=2)

    def predict_dataloader(self) -> Any:
        return rows(2, seed=3)


class ByHand(Damper):
    """The same with one optimizer for each layer, stepped by the user."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.inner.parameters(), lr=self.lr),
            torch.optim.Adam(self.outer.parameters(), lr=self.lr),
        ]


class Idle(Damper):
    """A layer that no loss comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            batch = self.idle(batch)
        return self.loss(batch)


class Planned(RuntimeError):
    """Raised by a test in the middle of a run."""


def hooks_of(*kinds: type) -> list[str]:
    """Public functions of these classes that Lightning may call on a user's object."""
    asked = {
        "configure_sharded_model",
        "log",
        "log_dict",
        "print",
        "optimizers",
        "lr_schedulers",
        "all_gather",
        "toggled_optimizer",
    }
    torch_calls = {"forward", "train", "zero_grad"}
    found = {n for kind in kinds for n, _ in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}
    of_torch = {n for n, _ in inspect.getmembers(nn.Module, inspect.isfunction)} - torch_calls
    return sorted((found - asked - of_torch) | ({"state_dict", "load_state_dict"} & found - of_torch))


def recorded(base: type, log: list[Any], *, label: str = "", names: Sequence[str] | None = None) -> type:
    """A subclass of ``base`` that writes each call of a hook, as it begins, with what it was given.

    Args:
        base: module, callback or data module.
        log: gets ``(label and name, described arguments)``.
        label: put before each name.
        names: which hooks; None for all.
    """

    def override(name: str) -> Any:
        inherited = getattr(base, name)

        @functools.wraps(inherited)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = args or (True,) if name == "train" else args  # torch's DDP writes out the default
            log.append((label + name, described(given), described(kwargs)))
            return inherited(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(inherited)
        del hook.__wrapped__  # Lightning looks there for whether a hook is overridden, and calls only those
        return hook

    kind = next(k for k in (LightningModule, Callback, pl.LightningDataModule) if issubclass(base, k))
    chosen = hooks_of(kind) if names is None else names
    if names is None and kind is not LightningModule:
        chosen = [n for n, _ in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")]
    return type(f"Recorded{base.__name__}", (base,), {name: override(name) for name in chosen})


def described(value: Any) -> Any:
    """A value by which two runs can be compared: kinds and shapes for objects, themselves for numbers and text."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    if isinstance(value, Trainer):
        return "trainer"
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {key: described(value[key]) for key in value} if len(value) < 4 else sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str | torch.device):
        return value
    return "closure" if callable(value) else type(value).__name__


@contextmanager
def counted_backwards(trainer: Trainer) -> Any:
    """Losses that the strategy of this Trainer sends backward while the body runs."""
    strategy, losses = trainer.strategy, []
    inherited = strategy.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        losses.append(loss.detach().clone())
        return inherited(loss, *args, **kwargs)

    strategy.backward = backward
    try:
        yield losses
    finally:
        del strategy.backward
