"""What stock strategies would do to each kind of parameter."""

from itertools import product

import pytest
import torch
from torch import nn

from lightning_moeclip import explain
from lightning_moeclip.binding import pl
from lightning_moeclip.diagnosis.stock import _RULES, StockParameter, known_strategies, rule_for
from lightning_moeclip.parallel.explanation import Explanation
from lightning_moeclip.parallel.roles import ParamRole
from tests.diagnosis.odd_modules import Built, Lists, Soft, Tagged
from tests.models import TwoTowers

ALONE = {f"moe.experts.{index}.{name}" for index in (0, 1) for name in ("weight", "bias")}
OUTSIDE = "optimizer1.group0.0"


def operations(explanation: Explanation) -> dict[str, str]:
    return {name: group.operation for group in explanation.groups for name in group.names}


def reasons(explanation: Explanation) -> dict[str, str]:
    return {name: group.why for group in explanation.groups for name in group.names}


def test_ddp_leaves_experts_of_a_list_and_what_it_does_not_know() -> None:
    found = explain(Lists(), strategy="ddp")
    assert set(found.unreduced) == {*ALONE, "ignored", OUTSIDE}
    assert found.unsound == ()
    assert operations(found)["moe.router.weight"] == operations(found)["logit_scale"] == "sum over dp"
    assert "the next step waits for ever" in reasons(found)["moe.experts.0.weight"]
    assert "ddp_find_unused_parameters_true" in reasons(found)["moe.experts.0.weight"]
    assert "_ddp_params_and_buffers_to_ignore" in reasons(found)["ignored"]
    assert "as loss.logit_scale" in reasons(explain(Lists()))[OUTSIDE]


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_experts_of_a_list_are_unreduced_under_a_condition_that_is_told(strategy: str) -> None:
    found = explain(Soft(), strategy=strategy)
    experts = ("experts.0.weight", "experts.1.weight")
    assert found.unreduced == found.conditional == experts
    (group,) = (group for group in found.groups if group.kind == "expert")
    assert "unreduced in a step in which a rank has no token" in group.why
    assert group.why.endswith(
        "If every rank calls every expert in every step it is sound: python -m lightning_moeclip verify tells"
    )
    # a step in which all are called sums them, and what travels counts them
    assert (group.divisor, group.replicas) == (8, (tuple(range(8)),))
    size = sum(p.numel() * 4 for p in Soft().parameters())
    assert [ring.bytes_per_rank for ring in found.rings] == [size * (2 if strategy == "ddp" else 1) * 7 / 8]
    # what nobody ever reduces is under no condition
    assert explain(Lists(), strategy="ddp").conditional == tuple(
        name for name in explain(Lists(), strategy="ddp").unreduced if name in ALONE
    )


def test_a_scalar_that_fsdp_refuses_has_the_code_of_its_rule() -> None:
    for strategy in ("fsdp", "model_parallel"):
        assert reasons(explain(Lists(), strategy=strategy))["logit_scale"].endswith("[MOE204: docs/checks/moe204.md]")


def test_ddp_that_finds_unused_parameters_has_no_false_alarm() -> None:
    found = explain(Lists(), strategy="ddp_find_unused_parameters_true")
    assert set(found.unreduced) == {"ignored", OUTSIDE}
    assert operations(found)["moe.experts.0.weight"] == "sum over dp"


def test_ours_reduces_all_of_it() -> None:
    assert explain(Lists()).is_ok


def test_our_fused_experts_are_fine_under_ddp_and_their_size_is_a_note() -> None:
    found = explain(TwoTowers(), strategy="ddp", world_size=4, expert_parallel_size=2)
    assert found.is_ok
    assert {group.shape for group in found.groups if group.kind == "expert"} == {(4, 6, 8), (4, 8, 6)}
    assert all(group.divisor == 4 for group in found.groups)
    spread, used = found.notes
    assert "spreads experts under MoEClipStrategy alone" in spread
    assert used.startswith("Which parameters a loss uses only a step can tell")
    assert explain(TwoTowers(), strategy="ddp_find_unused_parameters_true").notes == ()


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_cpu_offload", "model_parallel"])
def test_fsdp_refuses_0_d_parameters_and_does_not_know_what_an_optimizer_holds(strategy: str) -> None:
    found = explain(Lists(), strategy=strategy)
    assert found.unreduced == (OUTSIDE,)
    assert found.unsound == ("logit_scale",)
    assert operations(found)["logit_scale"] == "REFUSED: 0-d"
    assert operations(found)["moe.router.weight"] == "reduce-scatter over dp"
    # one ring pass: n (R - 1) / R
    size = sum(p.numel() * 4 for n, p in Lists().named_parameters() if n != "logit_scale")
    assert [ring.bytes_per_rank for ring in found.rings] == [size * 7 / 8]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true", "fsdp", "model_parallel"])
def test_experts_that_differ_by_rank_are_averaged_with_others(strategy: str) -> None:
    found = explain(Tagged(), strategy=strategy)
    assert found.unsound == ("experts.0.weight", "experts.1.weight")
    assert operations(found)["experts.0.weight"].endswith("over dp, of different experts")
    assert found.unreduced == ()


def test_deepspeed_sums_its_experts_over_their_replicas() -> None:
    found = explain(Tagged(), strategy="deepspeed", world_size=8, expert_parallel_size=4)
    (expert,) = (group for group in found.groups if group.kind == "expert")
    assert (expert.operation, expert.replicas, expert.divisor) == (
        "sum over edp",
        ((0, 4), (1, 5), (2, 6), (3, 7)),
        8,
    )
    assert found.unsound == expert.names
    assert "#5618" in expert.why
    assert "0.16" in expert.why
    refused = explain(Tagged(), strategy="deepspeed_stage_3")
    assert operations(refused)["experts.0.weight"] == "REFUSED: experts of ZeRO 3"
    for stage in (1, 2, 3):
        assert set(explain(Lists(), strategy=f"deepspeed_stage_{stage}").unreduced) > ALONE
    assert explain(TwoTowers(), strategy="deepspeed").is_ok


def test_model_parallel_reduces_nothing_that_is_left_plain_beside_dtensors() -> None:
    net = Tagged()
    for parameter in net.experts.parameters():
        del parameter.allreduce
        parameter.device_mesh, parameter.placements = object(), ()  # as a DTensor has
    found = explain(net, strategy="model_parallel")
    assert set(found.unreduced) == {"dense.weight", "dense.bias"}
    assert "fully_shard over the whole module" in found.notes[-1]
    assert explain(Tagged(), strategy="ddp").unreduced == ()


def test_one_rank_needs_nobody() -> None:
    for strategy in ("ddp", "fsdp", "deepspeed"):
        assert explain(Lists(), strategy=strategy, world_size=1).is_ok


def test_frozen_parameters_stay_frozen() -> None:
    module = Lists().requires_grad_(False)
    module.moe.router.requires_grad_(True)
    assert explain(module, strategy="ddp").unreduced == (OUTSIDE,)
    assert operations(explain(module, strategy="fsdp"))["logit_scale"] == "none: frozen"


def test_every_strategy_that_lightning_knows_and_every_rule_is_met() -> None:
    registry = pl.strategies.StrategyRegistry.available_strategies()
    multi_process = {name for name in registry if name.startswith(("ddp", "fsdp", "deepspeed", "moeclip"))}
    assert len(multi_process) > 20
    assert multi_process <= set(known_strategies())
    for name in known_strategies():
        explain(Built(), strategy=name)
    # each rule is the first that fits something, and each parameter has a rule
    families = set(known_strategies().values()) - {"moeclip"}
    parameters = [
        StockParameter(ParamRole(None, "dense"), num_dims, *flags)
        for num_dims in (0, 2)
        for flags in product((False, True), repeat=5)
    ]
    assert {id(rule_for(family, p)) for family in families for p in parameters} == {id(rule) for rule in _RULES}
    assert all(rule.why and rule.source for rule in _RULES if not (rule.is_reduced and rule.is_sound))


def test_experts_of_a_dict_count_and_a_list_of_blocks_does_not() -> None:
    net = nn.Module()
    net.experts = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    net.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    net.single = nn.Module()
    net.single.experts = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    net.router = nn.Parameter(torch.ones(2))
    assert set(explain(net, strategy="ddp").unreduced) == {"experts.a.weight", "experts.b.weight"}
