"""Replicas compared and resynced without Lightning: dense and expert, every rank in turn, every kind of state."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.comparison import Comparison
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.gradients.scaling import AgreedGradScaler, ScalingSettings
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.state.consistency import compare_replicas, resync_replicas
from lightning_moeclip.state.replicated import ReplicatedState
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import logged_collectives
from tests.gradients.tiny_experts import TinyExperts

CPU = torch.device("cpu")
KEPT = ("parameters", "optimizer", "scaler")
ALL = ("gradients", *KEPT)
DIM = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = TinyExperts(DIM, 4)
        self.register_buffer("count", torch.zeros(3))


@functools.cache
def mesh_of(ep: int) -> Mesh:
    """Groups are made once."""
    return Mesh.build(ep)


class Run:
    """A module with experts spread, after some steps on gradients that are equal on all ranks."""

    def __init__(
        self, *, ep: int = 1, make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW, num_steps: int = 2
    ) -> None:
        self.mesh = mesh_of(ep)
        self.net = Net()
        if self.mesh.experts is not None:
            self.net.experts.shard_experts(self.mesh.experts)
        self.optimizer = make(self.net.parameters())
        self.scaler = AgreedGradScaler("cpu", ScalingSettings(init_scale=256.0))
        self.scaler.scale(torch.ones(()))
        for _ in range(num_steps):
            self.fill_gradients()
            self.optimizer.step(self.loss)

    def fill_gradients(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = parameter.detach().cos()

    def loss(self) -> Tensor:
        with torch.enable_grad():
            loss = sum(p.sin().sum() for p in self.net.parameters())
            for parameter in self.net.parameters():
                parameter.grad = torch.autograd.grad(loss, parameter, retain_graph=True)[0]
        return loss

    @property
    def state(self) -> ReplicatedState:
        return ReplicatedState(self.net, [self.optimizer], scaling=self.scaler)

    def compare(self, *what: Any) -> Comparison:
        found = compare_replicas(self.state, self.mesh, what or ALL, device=CPU)
        told = repr(found.differences)  # a difference may be NaN
        assert gather_objects(told) == [told] * self.mesh.world_size
        return found

    def resync(self, found: Comparison) -> None:
        resync_replicas(self.state, self.mesh, found, device=CPU)

    def held(self) -> dict[str, Any]:
        """A copy of everything, for tests of equality."""
        state = {n: self.optimizer.state[p] for n, p in self.net.named_parameters()}
        return copy.deepcopy(
            {
                "parameters": {n: p.detach() for n, p in self.net.named_parameters()},
                "state": {n: dict(s) for n, s in state.items() if s},
                "options": {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"},
                "scaler": self.scaler.state_dict(),
            }
        )

    def state_of(self, name: str) -> dict[str, Any]:
        return self.optimizer.state[self.net.get_parameter(name)]


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        same_kind = isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return same_kind and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b


def one_ulp(tensor: Tensor) -> None:
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], torch.inf))


def resized(run: Run) -> None:
    run.state_of("dense.weight")["exp_avg"] = torch.ones(2)


def as_float(run: Run) -> None:
    run.state_of("dense.weight")["step"] = 2.0


# fault, key of what differs, number of elements and how many differ; None where nothing can be subtracted
FAULTS: dict[str, tuple[Callable[[Run], object], tuple[str, str, str], int | None]] = {
    "dense": (lambda r: one_ulp(r.net.dense.weight), ("parameters", "dense.weight", ""), 1),
    "expert": (lambda r: one_ulp(r.net.experts.weight), ("parameters", "experts.weight", ""), 1),
    "moment": (lambda r: one_ulp(r.state_of("dense.bias")["exp_avg_sq"]), ("optimizer", "dense.bias", "exp_avg_sq"), 1),
    "negated": (
        lambda r: r.state_of("experts.weight")["exp_avg"].neg_(),
        ("optimizer", "experts.weight", "exp_avg"),
        -1,
    ),
    "step": (lambda r: r.state_of("experts.weight")["step"].add_(1), ("optimizer", "experts.weight", "step"), 1),
    "nan": (lambda r: r.net.dense.bias.data[1].fill_(torch.nan), ("parameters", "dense.bias", ""), 1),
    "missing": (lambda r: r.state_of("dense.bias").pop("exp_avg"), ("optimizer", "dense.bias", "exp_avg"), None),
    "extra": (lambda r: r.state_of("dense.bias").update(more=torch.ones(2)), ("optimizer", "dense.bias", "more"), None),
    "resized": (resized, ("optimizer", "dense.weight", "exp_avg"), None),
    "number": (as_float, ("optimizer", "dense.weight", "step"), None),
    "lr": (lambda r: r.optimizer.param_groups[0].update(lr=0.5), ("optimizer", "optimizer0.group0", "lr"), 1),
    "betas": (
        lambda r: r.optimizer.param_groups[0].update(betas=(0.9, 0.9)),
        ("optimizer", "optimizer0.group0", "betas"),
        1,
    ),
    "scaler": (
        lambda r: r.scaler.load_state_dict({**r.scaler.state_dict(), "scale": 128.0}),
        ("scaler", "loss scale", ""),
        1,
    ),
}


def check_fault(rank: Rank, ep: int, name: str, bad: int) -> None:
    fault, key, number = FAULTS[name]
    run = Run(ep=ep)
    healthy = run.held()
    if rank.index == bad:
        fault(run)
    broken = run.held()
    found = run.compare()
    (difference,) = found.differences
    axis = "edp" if "experts" in key[1] and ep > 1 else "dp"
    group = tuple(r for r in range(rank.world_size) if axis == "dp" or r % ep == bad % ep)
    is_outvoted = len(group) > 2 or bad != group[0]
    source = next(r for r in group if r != bad) if is_outvoted else bad
    ranks = (bad,) if is_outvoted else tuple(r for r in group if r != bad)
    assert (difference.key, difference.axis, difference.replicas) == (key, axis, group)
    assert (difference.source, difference.ranks) == (source, ranks)
    wanted = difference.num_elements if number == -1 else number
    assert difference.num_different == wanted
    run.resync(found)
    assert run.compare().is_equal
    # of two replicas that differ nobody knows which is right: the lowest rank wins
    told = gather_objects(broken)
    right = told[bad] if rank.index in group and not is_outvoted else healthy
    assert is_same(run.held(), right), name


@on_ranks(4)
def test_a_fault_of_any_kind_on_any_rank_of_4_is_found_told_and_mended(rank: Rank) -> None:
    for index, name in enumerate(FAULTS):
        for bad in range(4) if name in ("dense", "expert", "moment") else [index % 4]:
            check_fault(rank, 2, name, bad)


@on_ranks(2)
def test_a_fault_of_any_kind_on_either_rank_of_2_is_found_told_and_mended(rank: Rank) -> None:
    for index, name in enumerate(FAULTS):
        for bad in range(2) if name in ("dense", "expert", "moment") else [1 - index % 2]:
            check_fault(rank, 1, name, bad)


@on_ranks(2)
def test_how_much_differs_is_told(rank: Rank) -> None:
    run = Run()
    if rank.index == 1:
        with torch.no_grad():
            run.net.dense.weight[0] += torch.tensor([0.5, -2.0, 0.0, 1.0], dtype=torch.float64)
            run.net.dense.bias[2] = torch.nan
        run.optimizer.param_groups[0]["lr"] = 0.251
    found = {d.name: d for d in run.compare().differences}
    weight = found["dense.weight"]
    assert (weight.num_elements, weight.num_different, weight.largest) == (16, 3, 2.0)
    assert found["dense.bias"].largest != found["dense.bias"].largest
    assert found["optimizer0.group0"].largest == pytest.approx(0.25)


@on_ranks(4)
def test_two_groups_of_experts_and_two_ranks_of_one_are_each_told_by_themselves(rank: Rank) -> None:
    run = Run(ep=2)
    if rank.index in (2, 3):
        one_ulp(run.net.experts.weight)
    if rank.index in (1, 3):
        one_ulp(run.net.dense.bias)
    if rank.index == 0:
        run.net.dense.weight.data.zero_()
    found = run.compare()
    assert [(d.name, d.replicas, d.source, d.ranks) for d in found.differences] == [
        ("dense.bias", (0, 1, 2, 3), 0, (1, 3)),
        ("dense.weight", (0, 1, 2, 3), 1, (0,)),
        ("experts.weight", (0, 2), 0, (2,)),
        ("experts.weight", (1, 3), 1, (3,)),
    ]
    run.resync(found)
    assert run.compare().is_equal
    assert is_same(run.held(), Run(ep=2).held())


@on_ranks(4)
def test_a_rank_without_any_optimizer_state_gets_all_of_it_and_one_that_alone_has_it_loses_it(rank: Rank) -> None:
    healthy = Run(ep=2)
    run = Run(ep=2, num_steps=2 if rank.index != 2 else 0)
    run.net.load_state_dict(healthy.net.state_dict())
    run.resync(run.compare(*KEPT))
    assert run.compare(*KEPT).is_equal
    assert is_same(run.held(), healthy.held())
    fresh = Run(ep=2, num_steps=0)
    if rank.index == 3:
        fresh = Run(ep=2)
        fresh.net.load_state_dict(Run(ep=2, num_steps=0).net.state_dict())
    found = fresh.compare("optimizer")
    assert {d.is_absent for d in found.differences if d.axis == "dp"} == {True}
    fresh.resync(found)
    assert fresh.compare(*KEPT).is_equal
    # experts are a tie of ranks 1 and 3, where the first wins, and an empty state is none
    assert not fresh.optimizer.state


@on_ranks(2)
def test_state_in_lists_as_of_lbfgs_is_compared_and_resynced(rank: Rank) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(list(parameters), lr=0.1, max_iter=3)

    healthy, run = Run(make=lbfgs), Run(make=lbfgs)
    assert run.compare().is_equal
    first = run.optimizer.param_groups[0]["params"][0]
    if rank.index == 1:
        one_ulp(run.optimizer.state[first]["old_dirs"][0])
        run.optimizer.state[first]["old_stps"].pop()
    found = run.compare()
    assert [(d.entry, d.num_different) for d in found.differences] == [("old_dirs", 1), ("old_stps", None)]
    run.resync(found)
    assert is_same(run.held(), healthy.held())


@on_ranks(2)
def test_masters_follow_their_parameter_whichever_of_the_two_was_changed(rank: Rank) -> None:
    for bad_master in (False, True):
        net = nn.Linear(3, 3).to(torch.bfloat16)
        with torch.no_grad():
            net.weight.fill_(0.5)
            net.bias.fill_(0.25)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        masters = MasterWeights()
        masters.cover([optimizer])
        with torch.no_grad():
            masters.master_of(net.weight).add_(2.0**-12)  # below what bfloat16 resolves
        masters.settle()
        mesh = mesh_of(1)
        state = ReplicatedState(net, [optimizer], masters=masters)
        wanted = [t.detach().clone() for t in (net.weight, masters.master_of(net.weight))]
        if rank.index == 1:
            # through .data: no version counter tells of it, as of a bit that flips
            changed = masters.master_of(net.weight) if bad_master else net.weight
            one_ulp(changed.data)
        found = compare_replicas(state, mesh, ALL, device=CPU)
        assert [(d.entry, d.ranks) for d in found.differences] == [("master" if bad_master else "", (1,))]
        resync_replicas(state, mesh, found, device=CPU)
        assert compare_replicas(state, mesh, ALL, device=CPU).is_equal
        assert torch.equal(net.weight, wanted[0])
        assert torch.equal(masters.master_of(net.weight), wanted[1])


@on_ranks(2)
def test_gradients_are_compared_and_never_copied_and_a_missing_one_differs(rank: Rank) -> None:
    run = Run()
    run.fill_gradients()
    assert run.compare("gradients").is_equal
    if rank.index == 1:
        run.net.dense.weight.grad.neg_()
        run.net.dense.bias.grad = None
    found = run.compare("gradients")
    assert [(d.name, d.ranks, d.num_different) for d in found.differences] == [
        ("dense.bias", (1,), None),
        ("dense.weight", (1,), 16),
    ]
    before = run.net.dense.weight.grad.clone()
    run.resync(found)
    assert torch.equal(run.net.dense.weight.grad, before)
    assert run.compare("parameters", "optimizer", "scaler").is_equal


@on_ranks(2)
def test_parameters_that_only_an_optimizer_holds_and_frozen_ones_are_compared(rank: Rank) -> None:
    run = Run(num_steps=0)
    outside = nn.Parameter(torch.ones(3))
    run.optimizer.add_param_group({"params": [outside]})
    run.net.dense.bias.requires_grad_(False)
    run.fill_gradients()
    outside.grad = torch.ones(3)
    run.optimizer.step()
    assert run.compare().is_equal
    if rank.index == 1:
        one_ulp(outside)
        one_ulp(run.net.dense.bias)
        one_ulp(run.optimizer.state[outside]["exp_avg"])
    found = run.compare()
    assert [d.key for d in found.differences] == [
        ("optimizer", "optimizer0.group1.0", "exp_avg"),
        ("parameters", "dense.bias", ""),
        ("parameters", "optimizer0.group1.0", ""),
    ]
    run.resync(found)
    assert run.compare().is_equal


@on_ranks(2)
def test_swapped_parameters_and_swapped_moments_are_seen(rank: Rank) -> None:
    run = Run()
    if rank.index == 1:
        weight, state = run.net.dense.weight, run.state_of("dense.bias")
        weight.data = weight.data.flip(0)
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]
    found = run.compare()
    assert [d.key[1:] for d in found.differences] == [
        ("dense.bias", "exp_avg"),
        ("dense.bias", "exp_avg_sq"),
        ("dense.weight", ""),
    ]


@on_ranks(2)
def test_buffers_and_values_of_unknown_classes_may_differ(rank: Rank) -> None:
    run = Run()
    run.net.count += rank.index
    run.optimizer.param_groups[0]["hook"] = object()
    run.state_of("dense.bias")["nested"] = {"function": print, "list": [object()]}
    assert run.compare().is_equal


@on_ranks(2)
def test_a_value_of_an_unknown_class_that_a_rank_lacks_is_told_and_left(rank: Rank) -> None:
    run = Run()
    if rank.index == 0:
        run.optimizer.param_groups[0]["hook"] = print
    found = run.compare()
    assert [d.entry for d in found.differences] == ["hook"]
    run.resync(found)
    assert ("hook" in run.optimizer.param_groups[0]) is (rank.index == 0)


@on_ranks(2)
def test_a_parameter_of_another_shape_ends_the_run_on_all_ranks(rank: Rank) -> None:
    run = Run()
    if rank.index == 1:
        run.net.dense.bias.data = torch.zeros(DIM + 1, dtype=torch.float64)
    found = run.compare("parameters")
    message = r"bias has another shape or dtype on ranks \[1\] than on rank 0, which no copy can mend\. Change para"
    with pytest.raises(RuntimeError, match=message):
        run.resync(found)


@on_ranks(2)
def test_a_single_replica_is_unwatched_and_the_rest_is_compared(rank: Rank) -> None:
    run = Run(ep=2)
    one_ulp(run.net.experts.weight) if rank.index else None
    found = run.compare()
    assert found.is_equal
    assert found.unwatched == ("experts.weight",)
    one_ulp(run.net.dense.weight) if rank.index else None
    assert not run.compare().is_equal


@on_ranks(4)
def test_a_healthy_comparison_is_one_collective_of_eight_numbers(rank: Rank) -> None:
    run = Run(ep=2)
    run.fill_gradients()
    for what in (ALL, ("gradients",), ()):
        with logged_collectives() as log:
            assert compare_replicas(run.state, run.mesh, what, device=CPU).is_equal
        assert [(name, group) for name, group, _ in log] == [("all_gather", "moeclip_gradients_dp")]


def test_one_process_has_nothing_to_compare_with() -> None:
    run = Run()
    found = run.compare()
    assert found.is_equal
    assert found.unwatched == ("dense.weight", "dense.bias", "experts.weight")
    run.resync(found)
