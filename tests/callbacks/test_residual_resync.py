"""``ResidualResync`` in whole fits: what differs is found at the next check, told of and mended, and nothing else is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, Trainer
from lightning_moeclip.callbacks.residual_resync import ResidualResync
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

NUM_STEPS = 6
DENSE, EXPERT = "text.head.weight", "image.moe.experts.w_in"
Fault = Callable[[Trainer, Any], None]


class Once(Callback):
    """A fault of some ranks at the end of a step."""

    def __init__(self, fault: Fault, *, ranks: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.fault, self.ranks, self.steps = fault, ranks, steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step - 1 in self.steps:
            with torch.no_grad():
                self.fault(trainer, pl_module)


def one_ulp(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], torch.inf))


def run(rank: Rank, *callbacks: Callback, ep: int = 1, num_steps: int = NUM_STEPS, **arguments: Any) -> Any:
    """State after a fit, and what was warned of."""
    module = TwoTowers()
    trainer = quiet_trainer(
        rank.world_size, strategy=MoEClipStrategy(expert_parallel_size=ep), callbacks=list(callbacks), **arguments
    )
    data = share(batches(num_steps), [8 // rank.world_size] * rank.world_size, rank.index)
    kept = Keep()
    trainer.callbacks.append(kept)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader(data))
    kept.told = [str(w.message) for w in told if "ResidualResync" in str(w.message)]
    kept.trainer = trainer
    return kept


class Keep(Callback):
    """Parameters and optimizer state of this rank when training ends, while experts are spread."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        (optimizer,) = trainer.strategy.optimizers
        state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
        self.parameters = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self.moments = [{k: v.clone() for k, v in entries.items()} for entries in state]


def assert_same(a: Any, b: Any) -> None:
    for name, value in a.parameters.items():
        assert torch.equal(value, b.parameters[name]), name
    for one, other in zip(a.moments, b.moments, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


@on_ranks(2)
def test_first(rank: Rank) -> None:
    plain = run(rank)
    kept = run(
        rank,
        ResidualResync(every_n_steps=1),
        Once(lambda t, m: one_ulp(dict(m.named_parameters())[DENSE]), ranks=(1,), steps=(2,)),
    )
    print([n for n in plain.parameters])
    print(kept.told, kept.trainer.callback_metrics)
    assert_same(kept, plain)
    assert 0
