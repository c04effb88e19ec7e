"""What FSDP or a DTensor shards is read off a module, and refused for the reason that weighs most."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.roles import ParamRole
from lightning_moeclip.parallel.sharding_checks import (
    ShardedParameter,
    check_expert_devices,
    check_scalars_before_sharding,
    check_sharded_parameters,
    sharded_parameters,
)
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

CPU = torch.device("cpu")


def sharded(kind: str, **changes: object) -> ShardedParameter:
    settings: dict = {"name": f"the.{kind}", "kind": kind, "how": "fsdp2", "ranks": (0, 1, 2, 3)}
    return ShardedParameter(**{**settings, **changes})


REFUSED = {
    "experts over other ranks": (sharded("expert"), 2, r"the\.expert is an expert under fully_shard.*\[MOE201:"),
    "no shard": (sharded("expert", how="fsdp1", is_replicated=True), 2, r"with NO_SHARD, of which only .*\[MOE203:"),
    "no shard of equal experts": (sharded("expert", how="fsdp1", is_replicated=True), 1, r"\[MOE202:"),
    "experts over their own ranks": (sharded("expert", ranks=(0, 2)), 2, r"sums their gradients by itself.*\[MOE202:"),
    "dense": (sharded("dense", how="dtensor"), 2, r"the\.dense is sharded by a DTensor over ranks .*\[MOE202:"),
    "scale in 16 bits": (sharded("logit_scale", compute_dtype=torch.bfloat16), 1, r"steps of 3\.1%.*\[MOE309:"),
    "router in 16 bits": (sharded("router", compute_dtype=torch.float16), 1, r"computes in torch\.float16.*\[MOE309:"),
    "router in 32 bits": (sharded("router", compute_dtype=torch.float32), 1, r"\[MOE202:"),
    "dense in 16 bits": (sharded("dense", compute_dtype=torch.bfloat16), 1, r"\[MOE202:"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sharded_parameter_is_refused_by_its_rule_alone(name: str) -> None:
    parameter, ep, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        check_sharded_parameters([parameter], replicas=(0, 2) if ep == 2 else (0, 1, 2, 3), expert_parallel_size=ep)
    assert str(caught.value).count("[MOE") == 1


def test_each_rule_is_told_once_and_nothing_sharded_is_nothing_wrong() -> None:
    several = [sharded("dense"), sharded("expert"), sharded("dense", name="another"), sharded("expert")]
    with pytest.raises(ValueError, match=r"MOE202.*\n.*MOE201") as caught:
        check_sharded_parameters(several, replicas=(0, 2), expert_parallel_size=2)
    assert len(str(caught.value).splitlines()) == 2
    check_sharded_parameters([], replicas=(0, 2), expert_parallel_size=2)


def test_scalars_are_refused_before_they_are_sharded_and_what_is_left_out_is_not() -> None:
    module = nn.Linear(2, 2)
    check_scalars_before_sharding(module)
    module.logit_scale = nn.Parameter(torch.zeros(()))
    for kind, argument in (("fsdp1", "ignored_states"), ("fsdp2", "ignored_params")):
        with pytest.raises(ValueError, match=rf"logit_scale has no dimension .*{argument}.*\[MOE204:"):
            check_scalars_before_sharding(module, kind=kind)
        check_scalars_before_sharding(module, kind=kind, ignored=[module.logit_scale])
    module.logit_scale = nn.Parameter(torch.zeros(1))
    check_scalars_before_sharding(module)


def test_experts_elsewhere_are_refused_and_others_may_lie_where_they_like() -> None:
    roles = {"moe.w_in": ParamRole(None, "expert"), "head": ParamRole(None, "dense")}
    cuda, first = torch.device("cuda"), torch.device("cuda:0")
    check_expert_devices({"moe.w_in": cuda, "head": CPU, "unknown": CPU}, roles, run_device=first)
    for device, run_device in ((CPU, first), (first, torch.device("cuda:1"))):
        with pytest.raises(ValueError, match=rf"moe\.w_in is an expert on {device}, while .*{run_device}.*\[MOE205:"):
            check_expert_devices({"moe.w_in": device}, roles, run_device=run_device)


class Net(LightningModule):
    def __init__(self, wrap: Callable[["Net"], None]) -> None:
        super().__init__()
        self.dense, self.moe, self.router = nn.Linear(4, 4), MoE(4, 4, 2), nn.Linear(4, 2)
        self.wrap = wrap

    def configure_model(self) -> None:
        self.wrap(self)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise AssertionError("training began")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def experts(net: Net) -> None:
    fully_shard(net.moe, mesh=init_device_mesh("cpu", (2,)))


def dense(net: Net) -> None:
    fully_shard(net.dense, mesh=init_device_mesh("cpu", (2,)))


def narrow_router(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.router, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def replicated(net: Net) -> None:
    weight = distribute_tensor(net.dense.weight, init_device_mesh("cpu", (2,)), [Replicate()])
    net.dense.weight = nn.Parameter(weight)


def flat_experts(net: Net) -> None:
    net.moe = FullyShardedDataParallel(net.moe, device_id=CPU)


def whole_flat_experts(net: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that NO_SHARD is deprecated
        net.moe = FullyShardedDataParallel(
            net.moe, device_id=CPU, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD
        )


def narrow_flat_router(net: Net) -> None:
    policy = MixedPrecision(param_dtype=torch.float16)
    net.router = FullyShardedDataParallel(net.router, device_id=CPU, mixed_precision=policy)


# how a module is wrapped, the codes that it is refused by when experts are spread, and when they are not
WRAPPED: dict[Callable[[Net], None], tuple[list[str], list[str]]] = {
    # the router of a MoE is no expert
    experts: (["MOE201", "MOE202"], ["MOE202"]),
    dense: (["MOE202"], ["MOE202"]),
    narrow_router: (["MOE309"], ["MOE309"]),
    replicated: (["MOE202"], ["MOE202"]),
    flat_experts: (["MOE201", "MOE202"], ["MOE202"]),
    whole_flat_experts: (["MOE202", "MOE203"], ["MOE202"]),
    narrow_flat_router: (["MOE309"], ["MOE309"]),
}


def told(kind: Callable[[Net], None], ep: int) -> str:
    trainer = quiet_trainer(2, strategy=MoEClipStrategy(expert_parallel_size=ep))
    try:
        trainer.fit(Net(kind), loader([torch.zeros(1, 4)]))
    except ValueError as error:
        return str(error)
    return ""


@on_ranks(2)
def test_strategy_refuses_what_is_sharded_before_it_broadcasts_anything(rank: Rank) -> None:
    for kind, by_size in WRAPPED.items():
        for ep, codes in zip((2, 1), by_size, strict=True):
            message = told(kind, ep)
            found = [line[line.rindex("[MOE") + 1 :].partition(":")[0] for line in message.splitlines()]
            assert sorted(found) == codes, (kind.__name__, ep, message)
            assert all(line.startswith(("dense.", "moe.", "router.")) for line in message.splitlines()), message


@on_ranks(2)
def test_parameters_are_read_with_their_ranks_and_dtypes(rank: Rank) -> None:
    net = Net(lambda _: None)
    assert sharded_parameters(net) == []
    narrow_router(net)
    found = sharded_parameters(net)
    assert [(p.name, p.kind, p.how, p.ranks, p.compute_dtype) for p in found] == [
        (f"router.{name}", "router", "fsdp2", (0, 1), torch.bfloat16) for name in ("weight", "bias")
    ]
    assert isinstance(net.router.weight, DTensor)
    flat_experts(net)
    assert [(p.name, p.kind) for p in sharded_parameters(net) if p.how == "fsdp1"] == [
        ("moe.w_in", "expert"),
        ("moe.w_out", "expert"),
        ("moe.router.weight", "router"),
    ]
