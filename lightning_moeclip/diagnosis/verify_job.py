"""What ``verify`` sends to its processes, and how a module, its batches and a strategy become ready for it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_moeclip.binding import ROOT, pl
from lightning_moeclip.diagnosis.factory import Factory, TrainingCase, load_factory, make_case, rows_of, take_rows
from lightning_moeclip.strategy import MoEClipStrategy

__all__ = ["VerifyJob", "batch_norms", "make_strategy", "shares", "silence_dropout", "take_case"]

_LAUNCH = re.compile(r"_(spawn|fork|notebook)(?=_|$)")  # how ranks are started is the launcher's business here
_NEED_GPU = ("fsdp", "deepspeed")


@dataclass(frozen=True)
class VerifyJob:
    """One run of ``verify``.

    Attributes:
        factory: function, or its address.
        strategy: name, address, strategy, or function that makes one.
        world_size: W.
        expert_parallel_size: of our strategy.
        steps: optimizer steps of automatic optimization, batches of manual optimization.
        seed: of random numbers when the factory is called.
        step_seed: of random numbers when training starts.
        gradient_clip_val: of the Trainer.
        accumulate_grad_batches: of the Trainer.
    """

    factory: Factory | str
    strategy: Any
    world_size: int
    expert_parallel_size: int
    steps: int
    seed: int
    step_seed: int
    gradient_clip_val: float | None
    accumulate_grad_batches: int


def take_case(job: VerifyJob) -> TrainingCase:
    """Call the factory under the job's seed, and make module and batches float64.

    Raises:
        ValueError: see ``make_case``; a batch has fewer rows than there are ranks.
        TypeError: see ``make_case``.
    """
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(job.seed, verbose=False)
    case = make_case(load_factory(job.factory) if isinstance(job.factory, str) else job.factory)
    for index, batch in enumerate(case.batches):
        if rows_of(batch) < job.world_size:
            raise ValueError(
                f"batch {index} has {rows_of(batch)} rows for world_size={job.world_size}. Each rank takes its share "
                f"of the rows: make batches of at least {job.world_size} rows."
            )
    return TrainingCase(case.module.double(), tuple(tree_map(_double, batch) for batch in case.batches))


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def shares(job: VerifyJob, batches: tuple[Any, ...], *, rank: int, size: int) -> list[Any]:
    """The batches of one of ``size`` processes, as many as there are steps; rows that W does not divide are left out.

    Args:
        job: how many steps, of how many batches each.
        batches: global ones, taken in turn.
        rank: which share of the rows.
        size: number of shares; 1 is the whole.
    """
    taken = []
    for index in range(job.steps * job.accumulate_grad_batches):
        batch = batches[index % len(batches)]
        rows = rows_of(batch) // job.world_size * job.world_size
        taken.append(take_rows(batch, rank * rows // size, (rank + 1) * rows // size))
    return taken


def silence_dropout(module: nn.Module) -> tuple[str, ...]:
    """Switch off what drops at random, whose draws depend on the rows of a rank.

    Returns:
        Paths of the modules that dropped something before.
    """
    silenced = []
    for path, layer in module.named_modules():
        for attribute in _dropping(layer):
            if getattr(layer, attribute) != 0.0:
                setattr(layer, attribute, 0.0)
                silenced.append(path)
    return tuple(dict.fromkeys(silenced))


def _dropping(layer: nn.Module) -> tuple[str, ...]:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return ("p",)
    if isinstance(layer, nn.MultiheadAttention):
        return ("dropout",)
    # timm's and torchvision's stochastic depth
    attribute = {"DropPath": "drop_prob", "StochasticDepth": "p"}.get(type(layer).__name__)
    return (attribute,) if attribute and isinstance(getattr(layer, attribute, None), float) else ()


def batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Paths of layers that normalise with the rows of their own rank in training."""
    return tuple(
        path
        for path, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    )


def make_strategy(strategy: Any, expert_parallel_size: int) -> Any:
    """The strategy that is to be tested, fresh.

    Args:
        strategy: a registered name, an address, a strategy, or a function without arguments that makes one.
        expert_parallel_size: for our own by name; another strategy brings its own.

    Raises:
        ValueError: there is none of that name or address, it needs a GPU, or it has another expert_parallel_size.
        TypeError: what was given or made is no strategy.
    """
    made = strategy
    if isinstance(strategy, str):
        made = load_factory(strategy) if ":" in strategy else _registered(strategy, expert_parallel_size)
    if callable(made) and not isinstance(made, pl.strategies.Strategy):
        made = made()
    if not isinstance(made, pl.strategies.Strategy):
        raise TypeError(
            f"strategy={strategy!r} gave a {type(made).__name__}. Give a name that Trainer(strategy=...) takes, a "
            f"strategy of {ROOT}, or a function that makes one."
        )
    if isinstance(made, pl.strategies.FSDPStrategy):
        raise ValueError(_needs_gpu(type(made).__name__))
    own = getattr(made, "expert_parallel_size", 1)
    if expert_parallel_size not in (1, own):
        raise ValueError(
            f"expert_parallel_size={expert_parallel_size} with strategy={strategy!r}, which has {own}. It is an "
            "argument of 'moeclip': give a strategy of your own the size that it is to have."
        )
    if getattr(made, "_start_method", None) is not None:
        made._start_method = "popen"
    return made


def _needs_gpu(strategy: str) -> str:
    name = "deepspeed" if strategy.lower().startswith("deepspeed") else "fsdp"
    return (
        f"strategy={strategy!r} needs a GPU, and verify trains on the CPUs of this machine. "
        f"`python -m lightning_moeclip explain package.module:factory --strategy {name}` says what it would do to each "
        "parameter."
    )


def _registered(name: str, expert_parallel_size: int) -> Callable[[], Any]:
    plain = _LAUNCH.sub("", name.lower())
    plain = "ddp" if plain == "auto" else plain
    if plain.startswith(_NEED_GPU):
        raise ValueError(_needs_gpu(name))
    if plain == "moeclip":
        return lambda: MoEClipStrategy(expert_parallel_size=expert_parallel_size)
    registry = pl.strategies.StrategyRegistry
    if plain not in registry:
        names = [n for n in registry.available_strategies() if not (_LAUNCH.search(n) or n.startswith(_NEED_GPU))]
        known = ", ".join(sorted(names))
        raise ValueError(
            f"strategy={name!r} is not registered with Lightning. Write one of {known}, an address such as "
            "my_project.train:make_strategy, or give a strategy itself."
        )
    return lambda: registry.get(plain)
