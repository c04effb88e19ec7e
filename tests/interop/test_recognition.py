"""Towers, kinds and explanation of the live models, and whether the records that CI reads are still theirs."""

import json
import time
from typing import Any

import pytest
from torch import nn

from lightning_moeclip.parallel.roles import read_roles
from tests.diagnosis.test_explain_layouts import check_explanation
from tests.interop.live_models import MODELS, RECORDS, record
from tests.parallel.layout_tables import TABLES
from tests.parallel.test_layouts import wanted_roles

BOUND_S = 5.0


@pytest.fixture(scope="module", params=MODELS)
def named_model(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, MODELS[request.param]()


def test_record_is_that_of_the_live_model(named_model: tuple[str, nn.Module]) -> None:
    name, model = named_model
    kept: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    assert record(model) == kept, "write the records anew with python -m tests.interop.live_models, then their tables"


def test_towers_and_kinds_are_those_written_by_hand(named_model: tuple[str, nn.Module]) -> None:
    name, model = named_model
    module = nn.ModuleDict({"model": model})
    names = [path for path, _ in model.named_parameters()]
    wanted = wanted_roles(names, TABLES[name])
    assert read_roles(module) == {f"model.{path}": role for path, role in wanted.items()}


def test_explanation_is_the_hand_written_table_and_takes_seconds(named_model: tuple[str, nn.Module]) -> None:
    name, model = named_model
    began = time.perf_counter()
    told = check_explanation(name, model)
    took_s = time.perf_counter() - began
    print(f"{name}: {sum(group.count for group in told.groups)} parameters in {took_s:.2f} s")
    assert took_s < BOUND_S
