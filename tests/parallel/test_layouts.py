"""Towers and kinds of other libraries' models, by their recorded names; ``make interop`` has the live ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_moeclip.parallel.interop import expert_lists, listed_names
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import build_plan
from lightning_moeclip.parallel.roles import ParamRole, read_roles
from tests.parallel.layout_tables import TABLES, Row

RECORDS = Path(__file__).parent / "layouts"


def skeleton(record: dict[str, Any]) -> nn.Module:
    """A module with the recorded parameters and what recognition looks at beside them."""
    root = nn.Module()
    for name, described in record["parameters"].items():
        *path, last = name.split(".")
        parent = root
        for depth, segment in enumerate(path):
            if segment not in parent._modules:
                is_list = ".".join(path[: depth + 1]) in record["lists"]
                parent.add_module(segment, nn.ModuleList() if is_list else nn.Module())
            parent = parent._modules[segment]  # type: ignore[assignment]
        dtype, _, shape = described.partition(" ")
        sizes = [int(size) for size in shape.split("x") if size]
        parameter = nn.Parameter(torch.empty(sizes, dtype=getattr(torch, dtype), device="meta"))
        if name in record["tags"]:
            parameter.allreduce, parameter.group_name = False, record["tags"][name]  # type: ignore[attr-defined]
        parent.register_parameter(last, parameter)
    for path, ep_size in record["layers"].items():
        root.get_submodule(path).ep_size = ep_size
    return root


def wanted_roles(names: list[str], table: list[Row]) -> dict[str, ParamRole]:
    """By the table, which has one row for each parameter and none too many."""
    wanted = {}
    used = set()
    for name in names:
        rows = [row for row in table if re.fullmatch(row[0], name)]
        assert len(rows) == 1, (name, rows)
        used.add(rows[0])
        wanted[name] = ParamRole(rows[0][1], rows[0][2])  # type: ignore[arg-type]
    assert used == set(table), set(table) - used
    return wanted


def recorded(model: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{model}.json").read_text())


def test_every_record_has_a_table() -> None:
    assert sorted(TABLES) == sorted(path.stem for path in RECORDS.glob("*.json"))


@pytest.mark.parametrize("model", TABLES)
@pytest.mark.parametrize("attribute", ["", "model", "clip", "net"])
def test_towers_and_kinds_are_those_written_by_hand(model: str, attribute: str) -> None:
    record = recorded(model)
    module = skeleton(record)
    prefix = f"{attribute}." if attribute else ""
    if attribute:  # as in a LightningModule
        outer = nn.Module()
        outer.add_module(attribute, module)
        module = outer
    wanted = wanted_roles(list(record["parameters"]), TABLES[model])
    assert read_roles(module) == {f"{prefix}{name}": role for name, role in wanted.items()}


def test_only_the_layer_of_deepspeed_is_shared_out_and_reduced_over_its_replicas() -> None:
    for model in TABLES:
        module = skeleton(recorded(model))
        lists = expert_lists(module)
        assert [e.size for e in lists] == ([2, 2] if model == "deepspeed_clip" else [])
        if lists:
            mesh = Mesh(8, 0, 2, None, {"dp": None, "edp": None})
            parameters = dict(module.named_parameters())
            plan = build_plan(parameters, read_roles(module), mesh, listed=listed_names(module))
            own = {p.name for p in plan.parameters if p.axis == "edp"}
            assert own == {name for name in parameters if ".deepspeed_experts." in name}
            assert all(plan[name].is_listed for name in own)
            assert plan.divisor == 8


def names_of(*names: str) -> dict[str, Any]:
    return {"parameters": dict.fromkeys(names, "float32 2x2"), "tags": {}, "layers": {}, "lists": []}


def test_experts_in_lists_as_transformers_4_named_them() -> None:
    block = "vision_model.encoder.layers.3.block_sparse_moe"
    found = read_roles(skeleton(names_of(f"{block}.gate.weight", f"{block}.experts.7.w1.weight")))
    assert [role.kind for role in found.values()] == ["router", "expert"]
    assert {role.tower for role in found.values()} == {"image"}


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["dense", "dense"]),
        (["mlp.gate.weight", "mlp.fc.weight"], ["dense", "dense"]),  # a gate without experts beside it
        (["moe.gates.0.wg.weight", "moe.experts.batched_fc1_w"], ["router", "expert"]),  # Tutel
        (["mlp.gate.gate.weight", "mlp.experts.htoh4.weight"], ["router", "expert"]),  # FastMoE
        (["mlp.router.classifier.weight", "mlp.experts.expert_0.wi.weight"], ["router", "expert"]),  # Switch
    ],
)
def test_gates_are_routers_where_there_are_experts(names: list[str], kinds: list[str]) -> None:
    assert [role.kind for role in read_roles(skeleton(names_of(*names))).values()] == kinds


def test_a_scale_of_each_head_is_no_temperature() -> None:
    module = nn.Module()
    module.logit_scale = nn.Parameter(torch.zeros(1, 1, 1))
    assert read_roles(module) == {"logit_scale": ParamRole(None, "dense")}


def test_everything_else_is_said_by_towers() -> None:
    module = skeleton(names_of("pictures.fc.weight", "words.0.weight", "head.weight"))
    assert {role.tower for role in read_roles(module).values()} == {None}
    found = read_roles(module, {"image": "pictures", "text": ["words", "head"]})
    assert [role.tower for role in found.values()] == ["image", "text", "text"]
