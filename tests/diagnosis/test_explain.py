"""``explain`` against tables written by hand, and what it must find that nobody registers."""

import copy
import random
import sys
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_moeclip
from lightning_moeclip import explain
from lightning_moeclip.diagnosis.configured import optimizers_in
from lightning_moeclip.diagnosis.stand_in import standing_in
from lightning_moeclip.modules import MoE
from lightning_moeclip.parallel.explanation import ExplainedGroup, Explanation
from lightning_moeclip.parallel.mesh import Mesh
from tests.diagnosis.odd_modules import DIM, Built, Empty, Hiding, Lazy, NeedsTrainer, Restless, Scheduled, Unanswered
from tests.models import TwoTowers

ALL = (tuple(range(8)),)


def row(group: ExplainedGroup) -> tuple[Any, ...]:
    return group.pattern, group.tower, group.kind, group.shape, group.count, group.operation, group.num_bytes


def by_pattern(explanation: Explanation) -> dict[str, ExplainedGroup]:
    return {group.pattern: group for group in explanation.groups}


def table_of_two_towers(expert_parallel_size: int) -> list[tuple[Any, ...]]:
    """By hand, in float64: 8 bytes a number; DIM is 6, experts are 4 of 6 x 8 and 8 x 6."""
    held = 4 // expert_parallel_size
    over = "sum over dp" if expert_parallel_size == 1 else "sum over edp"
    rows: list[tuple[Any, ...]] = []
    for tower, width in (("image", 8), ("text", 7)):
        rows += [
            (f"{tower}.stem.weight", tower, "dense", (5, width), 1, "sum over dp", 5 * width * 8),
            (f"{tower}.stem.bias", tower, "dense", (5,), 1, "sum over dp", 40),
            (f"{tower}.moe.w_in", tower, "expert", (held, 6, 8), 1, over, held * 384),
            (f"{tower}.moe.w_out", tower, "expert", (held, 8, 6), 1, over, held * 384),
            (f"{tower}.moe.router.weight", tower, "router", (4, 6), 1, "sum over dp", 192),
            (f"{tower}.head.weight", tower, "dense", (5, 6), 1, "sum over dp", 240),
            (f"{tower}.head.bias", tower, "dense", (5,), 1, "sum over dp", 40),
        ]
    return [*rows, ("loss.logit_scale", None, "logit_scale", (), 1, "sum over dp", 8)]


REPLICAS = {1: ALL, 2: ((0, 2, 4, 6), (1, 3, 5, 7)), 4: ((0, 4), (1, 5), (2, 6), (3, 7))}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_two_towers_have_the_table_written_by_hand(size: int) -> None:
    found = explain(TwoTowers(), world_size=8, expert_parallel_size=size)
    assert [row(group) for group in found.groups] == table_of_two_towers(size)
    assert found.is_ok
    assert found.unreduced == found.unsound == found.notes == ()
    for group in found.groups:
        assert group.replicas == (REPLICAS[size] if group.kind == "expert" else ALL)
        assert (group.divisor, group.dtype, group.wire_dtype, group.region) == (8, "float64", None, "model")
    experts = 4 * 4 // size * 384
    dense = 8 * 5 * (8 + 7) + 2 * (40 + 192 + 240 + 40) + 8
    assert found.gradient_bytes == experts + dense
    # a ring of R ranks: 2 n (R - 1) / R
    wanted = {"dp": 2 * (dense + experts) * 7 / 8} if size == 1 else {"dp": 2 * dense * 7 / 8}
    if size > 1:
        wanted["edp"] = 2 * experts * (8 // size - 1) / (8 // size)
    assert {ring.axis: ring.bytes_per_rank for ring in found.rings} == pytest.approx(wanted)


def test_experts_that_one_rank_alone_holds_travel_nowhere() -> None:
    found = explain(TwoTowers(), world_size=4, expert_parallel_size=4)
    group = by_pattern(found)["image.moe.w_in"]
    assert (group.operation, group.replicas, group.divisor) == ("sum over edp", ((0,), (1,), (2,), (3,)), 4)
    assert [ring.axis for ring in found.rings] == ["dp"]
    assert explain(TwoTowers(), world_size=1).rings == ()


def test_links_are_those_of_the_rings_and_know_their_nodes() -> None:
    found = explain(TwoTowers(), world_size=4, expert_parallel_size=2, ranks_per_node=2)
    links = {ring.axis: [(k.source, k.target, k.crosses_nodes) for k in ring.links(2)] for ring in found.rings}
    assert links == {
        "dp": [(0, 1, False), (1, 2, True), (2, 3, False), (3, 0, True)],
        "edp": [(0, 2, True), (2, 0, True), (1, 3, True), (3, 1, True)],
    }
    on_one_node = explain(TwoTowers(), world_size=4, expert_parallel_size=2)
    assert not any(link.crosses_nodes for ring in on_one_node.rings for link in ring.links(on_one_node.ranks_per_node))


def test_repeated_blocks_share_a_row_and_others_do_not() -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(12))
    net.blocks[11] = nn.Linear(3, 3, bias=False)
    net.blocks[4].weight.requires_grad_(False)
    net.blocks[5].weight.data = net.blocks[5].weight.data.double()
    net.visual = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    found = {group.pattern: group.count for group in explain(net).groups}
    assert found == {
        "blocks.*.weight": 10,
        "blocks.*.bias": 11,
        "blocks.4.weight": 1,
        "blocks.5.weight": 1,
        "visual.0.weight": 1,
        "visual.0.bias": 1,
        "visual.1.weight": 1,
        "visual.1.bias": 1,
    }


def test_frozen_parameters_are_rows_and_not_unreduced() -> None:
    found = explain(Hiding())
    group = by_pattern(found)["frozen"]
    assert (group.operation, group.divisor, group.num_bytes, group.buckets, group.region) == (
        "none: frozen",
        None,
        0,
        (),
        None,
    )
    assert "frozen" not in found.unreduced


def test_what_nobody_registers_is_found_and_what_an_optimizer_holds_is_reduced() -> None:
    found = explain(Hiding())
    assert set(found.unreduced) == {
        "trained_buffer",
        "extras.heads['first'].weight",
        "extras.heads['first'].bias",
        "listed[0].weight",
        "listed[1].weight",
        "leaf",
    }
    assert found.unsound == ()
    assert not found.is_ok
    groups = by_pattern(found)
    assert groups["listed[*].weight"].count == 2
    assert (groups["leaf"].operation, groups["leaf"].replicas, groups["leaf"].divisor) == ("NONE: nobody", (), None)
    assert "Make it an attribute of a module" in groups["leaf"].why
    held = groups["optimizer0.group0.3"]
    assert (held.kind, held.operation, held.divisor, held.is_in_module) == ("logit_scale", "sum over dp", 8, False)
    assert "as loss.logit_scale" in held.why


def test_the_same_is_unreduced_under_ddp_and_so_is_what_an_optimizer_alone_holds() -> None:
    ours, stock = explain(Hiding()), explain(Hiding(), strategy="ddp_find_unused_parameters_true")
    assert set(stock.unreduced) == {*ours.unreduced, "optimizer0.group0.3"}
    assert "drift apart" in by_pattern(stock)["optimizer0.group0.3"].why


def test_a_bounded_search_ends_in_deep_and_long_containers() -> None:
    net = nn.Linear(2, 2)
    net.long = [[0.0] * 2 for _ in range(20_000)]
    net.deep = [[[[[[nn.Parameter(torch.ones(1))]]]]]]
    start = time.perf_counter()
    assert explain(net).unreduced == ()
    assert time.perf_counter() - start < 1.0


def test_module_and_random_numbers_are_as_before() -> None:
    module = Restless()
    before = {name: id(value) for layer in module.modules() for name, value in vars(layer).items()}
    books = [list(layer._modules) for layer in module.modules()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    told = explain(module)
    drawn = torch.rand(()).item(), random.random(), np.random.rand()
    # what configure_optimizers freezes and adds counts, as it does when a run starts
    groups = by_pattern(told)
    assert groups["body.weight"].operation == "none: frozen"
    assert groups["head.weight"].operation == "sum over dp"
    assert groups["extra.weight"].shape == (DIM, DIM)
    assert {name: id(value) for layer in module.modules() for name, value in vars(layer).items()} == before
    assert [list(layer._modules) for layer in module.modules()] == books
    assert all(parameter.requires_grad for parameter in module.parameters())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert drawn == (torch.rand(()).item(), random.random(), np.random.rand())


def test_a_trainer_that_is_not_there_is_stood_in_for() -> None:
    module = Scheduled()
    found = explain(module, world_size=4)
    (note,) = found.notes
    assert note == (
        "configure_optimizers() asked its Trainer, for which something stood in with imagined answers: "
        "estimated_stepping_batches=1000, world_size=4, max_steps=1000, max_epochs=10, num_training_batches=100."
    )
    assert found.is_ok
    assert by_pattern(found)["optimizer0.group0.2"].operation == "sum over dp"
    # it is gone again, and so is what the method assigned
    assert module._trainer is None
    assert not hasattr(module, "num_steps")
    assert explain(Scheduled(), strategy="ddp").unreduced == ("optimizer0.group0.2",)


def test_a_stand_in_is_gone_after_a_failure_and_knows_no_more_than_it_says() -> None:
    module = nn.Sequential(Scheduled(), nn.Linear(2, 2))
    with standing_in(module, 3) as stand_in:
        assert copy.deepcopy(module[0].trainer).num_devices == 3
        assert module[0].global_step == module[0].current_epoch == module[0].global_rank == 0
        assert not hasattr(module[1], "_trainer")
        assert list(stand_in.asked) == ["global_step", "current_epoch", "global_rank"]
        with pytest.raises(AttributeError, match=r"the stand-in for a Trainer has no 'strategy'"):
            _ = module[0].trainer.strategy
    assert module[0]._trainer is None
    with pytest.raises(ZeroDivisionError), standing_in(module, 3):
        _ = 1 / module[0].trainer.global_step
    assert module[0]._trainer is None


def test_a_trainer_that_is_there_is_asked_itself() -> None:
    module = Scheduled()
    module._trainer = SimpleNamespace(
        estimated_stepping_batches=8, world_size=2, max_steps=3, max_epochs=1, num_training_batches=9
    )
    assert explain(module).notes == ()
    assert module._trainer.max_steps == 3


def test_where_optimizers_are_not_known_strays_are_neither_reduced_nor_unreduced() -> None:
    found = explain(Unanswered())
    (note,) = found.notes
    assert note.startswith(
        "configure_optimizers() failed without a Trainer (AttributeError: the stand-in for a Trainer"
    )
    assert found.unknown == ("loss.logit_scale",)
    assert found.unreduced == found.unsound == ()
    assert not found.is_ok
    group = by_pattern(found)["loss.logit_scale"]
    assert (group.operation, group.is_known, group.divisor) == ("not known", False, None)
    assert group.why.startswith("not known: configure_optimizers failed with AttributeError: the stand-in")
    # Lightning's strategies reduce no parameter that only an optimizer holds
    assert explain(Unanswered(), strategy="ddp").unreduced == ("loss.logit_scale",)
    assert explain(Unanswered(), strategy="ddp").unknown == ()


def test_a_failure_of_configure_optimizers_is_a_note() -> None:
    assert "loss.logit_scale" in explain(NeedsTrainer()).unreduced
    (note,) = explain(nn.Linear(2, 2)).notes
    assert "has no configure_optimizers()" in note
    failed, unbuilt = explain(Built()).notes
    assert "ValueError: optimizer got an empty parameter list" in failed
    assert unbuilt.startswith("configure_model() makes parts of the module")


def test_a_module_without_parameters_is_no_success() -> None:
    found = explain(Empty())
    assert not found.is_ok
    assert str(found).endswith("NOT KNOWN: the module has no parameters.")


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"net\.weight has no shape yet.*Run one forward in the factory"):
        explain(Lazy())
    with pytest.raises(ValueError, match=r"running_mean has no shape yet"):
        explain(nn.LazyBatchNorm1d(affine=False))


def test_every_form_of_configure_optimizers_is_read() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.ConstantLR(first)
    for form in (
        first,
        {"optimizer": first, "lr_scheduler": scheduler},
        [first],
        ([first], [scheduler]),
        ([first], []),
        ({"optimizer": first},),
    ):
        assert optimizers_in(form) == [first]
    for form in ([first, second], (first, second), ([first, second], [scheduler]), [{"optimizer": first}, second]):
        assert optimizers_in(form) == [first, second]
    assert optimizers_in(None) == []
    with pytest.raises(TypeError, match=r"returned a str\. It must return an optimizer"):
        optimizers_in("adam")


def test_gradient_dtype_and_regions_are_shown() -> None:
    found = explain(TwoTowers(), world_size=2, gradient_dtype="bfloat16", loss_scaling="local")
    groups = by_pattern(found)
    assert groups["image.moe.w_in"].region == groups["image.moe.router.weight"].region == "image.moe"
    assert groups["image.stem.weight"].region == "model"
    assert all(group.wire_dtype == "bfloat16" for group in found.groups)
    (ring,) = found.rings
    assert ring.bytes_per_rank == found.gradient_bytes / 4  # 2 n / 2, with 2 bytes a number for 8


def test_declared_towers_are_used() -> None:
    found = explain(TwoTowers(), towers={"left": "image", "right": ["text"]})
    assert {group.tower for group in found.groups} == {"left", "right", None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 8, "expert_parallel_size": 3}, r"expert_parallel_size=3 does not divide the world of 8 ranks"),
        ({"world_size": 0}, r"world_size=0 must be at least 1"),
        ({"world_size": 8, "expert_parallel_size": 8}, r"image\.moe: num_experts=4 cannot be spread over"),
        ({"towers": {"image": "nowhere"}}, r"the module has no 'nowhere'"),
        ({"strategy": "dpp"}, r"strategy='dpp' cannot be explained\. Use one of moeclip, moeclip_spawn, .*deepspeed"),
        ({"ranks_per_node": 0}, r"ranks_per_node=0 must be at least 1"),
        ({"bucket_size_mb": -1.0}, r"bucket_size_mb=-1\.0 must be positive"),
        ({"gradient_dtype": "float17"}, r"gradient_dtype='float17' is not a dtype"),
        ({"loss_scaling": "local", "regions": ["nowhere"]}, r"has no module 'nowhere'"),
    ],
)
def test_what_would_fail_when_a_run_starts_fails_with_the_same_message(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(TwoTowers(), **settings)


def test_only_modules_are_explained() -> None:
    with pytest.raises(TypeError, match=r"explain\(list\): it takes an nn\.Module"):
        explain([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"has sparse=True"):
        explain(nn.Embedding(3, 2, sparse=True))


def test_a_model_of_150_million_parameters_takes_well_under_5_seconds_and_no_memory() -> None:
    with torch.device("meta"):
        net = nn.Module()
        net.visual = nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072), 12, enable_nested_tensor=False)
        net.text = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048), 12, enable_nested_tensor=False)
        net.moe = MoE(768, 3072, 8)
    assert sum(p.numel() for p in net.parameters()) > 150e6
    start = time.perf_counter()
    found = explain(net, expert_parallel_size=4)
    text = str(found)
    assert time.perf_counter() - start < 1.0
    assert by_pattern(found)["visual.layers.*.self_attn.in_proj_weight"].count == 12
    assert len(text.splitlines()) < 60


def test_experts_on_this_rank_have_no_memory_and_the_module_is_left_whole() -> None:
    module = TwoTowers()
    before = copy.deepcopy(module.state_dict())
    explain(module, expert_parallel_size=4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.image.moe.expert_axis is None


def test_the_name_is_the_function_also_when_its_module_was_imported_first() -> None:
    import_module("lightning_moeclip.diagnosis.explain")
    assert lightning_moeclip.explain is sys.modules["lightning_moeclip.diagnosis.explain"].explain
    assert "explain" in dir(lightning_moeclip)


def test_an_imagined_mesh_has_no_groups() -> None:
    mesh = Mesh.imagined(8, 4)
    assert mesh.replicas("edp") == (0, 4)
    assert mesh.replica_sets("edp") == REPLICAS[4]
    assert mesh.replica_sets("dp") == ALL
    assert (mesh.divisor, mesh.experts, set(mesh.gradient_groups.values())) == (8, None, {None})
