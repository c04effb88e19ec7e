"""What a step may be made of, asked of settings and modules alone."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.roles import ParamRole
from lightning_moeclip.parallel.step_checks import (
    check_equal_accumulation,
    check_recomputed_batch_norm,
    reentrant_wrappers,
    warn_of_accumulated_contrast,
)
from lightning_moeclip.parallel.whereabouts import Place

CONTRASTIVE = {"head": ParamRole(None, "dense"), "loss.logit_scale": ParamRole(None, "logit_scale")}


class Cached(nn.Module):
    def __init__(self, *, recomputes: bool = True) -> None:
        super().__init__()
        self.recomputes_micro_batches = recomputes


def test_differing_accumulation_is_refused_with_the_number_of_each_rank() -> None:
    check_equal_accumulation([4, 4])
    with pytest.raises(ValueError, match=r"differs between ranks \(rank 0: 1, rank 1: 4\).*\[MOE401:"):
        check_equal_accumulation([1, 4])


def test_accumulated_contrast_is_warned_of_and_nothing_else_is() -> None:
    with pytest.warns(UserWarning, match=r"accumulate_grad_batches=4 .*\(loss\.logit_scale\).* 4 micro.*\[MOE404:"):
        assert warn_of_accumulated_contrast(CONTRASTIVE, 4)
    assert not warn_of_accumulated_contrast(CONTRASTIVE, 1)
    assert not warn_of_accumulated_contrast({"head": ParamRole(None, "dense")}, 4)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.BatchNorm2d(2, track_running_stats=False).eval()])
def test_batch_norm_in_recomputed_micro_batches_is_refused(norm: nn.Module) -> None:
    both = nn.ModuleDict({"loss": Cached(), "norm": norm})
    name = type(norm).__name__
    with pytest.raises(ValueError, match=rf"norm is a {name} in training, and loss runs the forward .*\[MOE403:"):
        check_recomputed_batch_norm(both)


@pytest.mark.parametrize(
    "module",
    [
        nn.ModuleDict({"loss": Cached(recomputes=False), "norm": nn.BatchNorm1d(2)}),
        nn.ModuleDict({"norm": nn.BatchNorm1d(2)}),
        nn.ModuleDict({"loss": Cached(), "norm": nn.BatchNorm1d(2).eval()}),
        nn.ModuleDict({"loss": Cached(), "norm": nn.LayerNorm(2)}),
    ],
)
def test_batch_norm_is_left_alone_where_nothing_depends_on_micro_batches(module: nn.Module) -> None:
    check_recomputed_batch_norm(module)


def test_reentrant_wrappers_around_experts_are_found_and_no_others() -> None:
    def wrapped(implementation: CheckpointImpl, inside: nn.Module) -> nn.Module:
        return checkpoint_wrapper(inside, checkpoint_impl=implementation)

    module = nn.ModuleDict(
        {
            "reentrant": wrapped(CheckpointImpl.REENTRANT, nn.Sequential(nn.Linear(2, 2), MoE(2, 2, 2))),
            "not": wrapped(CheckpointImpl.NO_REENTRANT, MoE(2, 2, 2)),
            "dense": wrapped(CheckpointImpl.REENTRANT, nn.Linear(2, 2)),
            "plain": MoE(2, 2, 2),
        }
    )
    assert [re.sub(r"\._\w+", "", path) for path in reentrant_wrappers(module)] == ["reentrant.1"]
    assert len(reentrant_wrappers(wrapped(CheckpointImpl.REENTRANT, MoE(2, 2, 2)))) == 1


@pytest.mark.parametrize(
    ("place", "num_paused", "has_passed"),
    [
        (Place(step=3), 1, False),  # behind, and may come
        (Place(step=4), 1, False),  # in the same step
        (Place(step=4, num_paused=2), 1, False),  # it has more micro-batches than the other rank
        (Place(step=4, num_paused=2), 0, True),
        (Place(step=3, num_paused=2), 0, False),  # kept in an earlier step, of which nothing is known
        (Place(step=5), 1, True),
    ],
)
def test_only_a_rank_beyond_a_reduction_has_passed_it(place: Place, num_paused: int, has_passed: bool) -> None:
    assert place.has_passed(step=4, num_paused=num_paused) == has_passed


def test_sync_batch_norm_counts_as_batch_norm_too() -> None:
    with torch.device("meta"):
        norm = nn.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="SyncBatchNorm in training"):
        check_recomputed_batch_norm(nn.ModuleDict({"loss": Cached(), "norm": norm}))
