"""``explain`` on other libraries' models, by their recorded names, against the tables written by hand."""

import pytest
from torch import nn

from lightning_moeclip import explain
from lightning_moeclip.parallel.explanation import Explanation
from lightning_moeclip.parallel.roles import ParamRole
from tests.parallel.layout_tables import TABLES
from tests.parallel.test_layouts import recorded, skeleton, wanted_roles

WORLD_SIZE = 8
OVER_PAIRS = ((0, 2, 4, 6), (1, 3, 5, 7))  # of experts that pairs of neighbours share out


def explained_roles(told: Explanation) -> dict[str, ParamRole]:
    return {name: ParamRole(group.tower, group.kind) for group in told.groups for name in group.names}  # type: ignore[arg-type]


def check_explanation(model: str, module: nn.Module) -> Explanation:
    """Every parameter has the tower and the kind of the table, and is reduced over all ranks that hold it."""
    ep = 2 if model == "deepspeed_clip" else 1
    told = explain(module, world_size=WORLD_SIZE, expert_parallel_size=ep)
    assert explained_roles(told) == wanted_roles([name for name, _ in module.named_parameters()], TABLES[model])
    assert told.is_ok
    for group in told.groups:
        assert group.divisor == WORLD_SIZE
        is_shared_out = any(".deepspeed_experts." in name for name in group.names)
        assert group.replicas == (OVER_PAIRS if is_shared_out else (tuple(range(WORLD_SIZE)),)), group.pattern
    held = sum(parameter.numel() * parameter.dtype.itemsize for parameter in module.parameters())
    assert sum(group.num_bytes for group in told.groups) == held
    return told


@pytest.mark.parametrize("model", TABLES)
def test_rows_are_those_written_by_hand(model: str) -> None:
    check_explanation(model, skeleton(recorded(model)))


def test_experts_that_deepspeed_shares_out_have_to_be_spread_alike() -> None:
    with pytest.raises(ValueError, match=r"ep_size=2 means that .* Write MoEClipStrategy\(expert_parallel_size=2\)"):
        explain(skeleton(recorded("deepspeed_clip")))


def test_what_ddp_makes_of_experts_that_deepspeed_shares_out() -> None:
    told = explain(skeleton(recorded("deepspeed_clip")), strategy="ddp_find_unused_parameters_true")
    assert told.unsound
    assert all(".deepspeed_experts." in name for name in told.unsound)
