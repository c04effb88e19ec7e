"""How an explanation is told: a table, Markdown, JSON, and red for what is wrong."""

import io
import json
import sys

import pytest
import torch
from torch import nn

from lightning_moeclip import explain
from lightning_moeclip.parallel.tables import collapsed, spell_bytes, spell_runs
from tests.diagnosis.odd_modules import Hiding, Soft, Unanswered
from tests.models import TwoTowers

RED = "\x1b[31m"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(2, 2, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


TABLE = """\
Gradients under moeclip on 2 ranks

parameter      tower  kind         shape  count  ranks  operation    divisor  gradient  scale  bucket  per step
-------------  -----  -----------  -----  -----  -----  -----------  -------  --------  -----  ------  --------
logit_scale    -      logit_scale  0-d        1  all 2  sum over dp        2  float32   model  0            4 B
visual.weight  image  dense        2 x 2      1  all 2  sum over dp        2  float32   model  0           16 B

Each rank holds 20 B of gradients.
dp: 1 ring of 2 ranks; each rank sends 20 B per step, over 2 links, none of them between nodes.
Not counted: tokens and features that layers and losses exchange, and one small sum at the end of each backward.

Note: Small has no configure_optimizers(): parameters that only an optimizer holds are not known.

Nothing is left unreduced: every trainable parameter is reduced over all ranks that hold it."""


def test_a_table_is_the_one_written_by_hand() -> None:
    assert str(explain(Small(), world_size=2)) == TABLE


def test_what_nobody_reduces_is_named_last_with_its_reason() -> None:
    text = explain(Hiding()).to_text(is_coloured=False)
    *_, last = text.splitlines()
    assert last.startswith("NOBODY REDUCES ")
    assert "leaf" in last
    assert "leaf: it asks for a gradient, no module registers it" in text
    assert "\x1b" not in text
    stock = explain(Small(), strategy="fsdp").to_text(is_coloured=False)
    assert stock.splitlines()[-1] == "REDUCED TO SOMETHING WRONG, OR REFUSED: logit_scale."


def test_what_is_reduced_in_some_steps_or_not_known_is_told_as_that() -> None:
    *_, last = explain(Soft(), strategy="ddp").to_text(is_coloured=False).splitlines()
    assert last == (
        "MAY BE LEFT UNREDUCED, in a step in which a rank has no token for it: experts.0.weight, experts.1.weight. If "
        "every rank calls every expert in every step it is sound: python -m lightning_moeclip verify tells."
    )
    text = explain(Unanswered()).to_text(is_coloured=True)
    *_, last = text.splitlines()
    assert last.startswith(f"{RED}NOT KNOWN, since configure_optimizers() failed: loss.logit_scale.")
    assert any("not known" in line for line in text.splitlines() if line.startswith(f"{RED}loss.logit_scale "))
    assert "NOBODY" not in text


def test_red_is_for_terminals_alone_and_no_color_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    found = explain(Hiding())
    assert RED not in str(found)
    monkeypatch.setattr(sys, "stdout", Terminal())
    red = [line for line in str(found).splitlines() if line.startswith(RED)]
    assert any("NONE: nobody" in line for line in red)
    assert any("NOBODY REDUCES" in line for line in red)
    assert not any("layer.weight" in line for line in red)
    assert RED not in str(explain(TwoTowers()))
    assert RED not in found.to_markdown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert RED not in str(found)


def test_markdown_has_a_row_for_each_group_and_names_that_stay_as_they_are() -> None:
    found = explain(Hiding())
    lines = found.to_markdown().splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == len(found.groups) + 2
    assert any(line.startswith("| `layer.weight` | - | dense | 4 x 4 |") for line in rows)
    assert any(line.startswith("| **`listed[*].weight`** |") for line in rows)
    assert lines[-1].startswith("**NOBODY REDUCES ")


def test_json_holds_the_same() -> None:
    found = explain(TwoTowers(), world_size=4, expert_parallel_size=2, ranks_per_node=2)
    told = json.loads(found.to_json())
    assert set(told) == {
        "strategy", "world_size", "expert_parallel_size", "groups", "totals_per_rank", "links", "unreduced", "unsound",
        "conditional", "unknown", "is_complete", "notes",
    }  # fmt: skip
    assert [group["pattern"] for group in told["groups"]] == [group.pattern for group in found.groups]
    expert = next(group for group in told["groups"] if group["pattern"] == "image.moe.w_in")
    assert expert["replicas"] == [[0, 2], [1, 3]]
    assert (expert["shape"], expert["divisor"], expert["dtype"], expert["count"]) == ([2, 6, 8], 4, "float64", 1)
    assert told["totals_per_rank"]["gradient_bytes"] == found.gradient_bytes
    assert told["totals_per_rank"]["sent_bytes"] == {ring.axis: ring.bytes_per_rank for ring in found.rings}
    assert {"source": 1, "target": 2, "crosses_nodes": True, "axis": "dp", "bytes": found.rings[0].bytes_per_rank} in (
        told["links"]
    )
    assert json.loads(explain(Hiding()).to_json())["unreduced"] == list(explain(Hiding()).unreduced)


def test_ranks_of_a_large_axis_are_told_by_their_stride() -> None:
    text = explain(TwoTowers(), world_size=8, expert_parallel_size=2).to_text(is_coloured=False)
    assert "{r, r+2, ..., r+6}" in text
    assert "{r, r+4}" in explain(TwoTowers(), world_size=8, expert_parallel_size=4).to_text(is_coloured=False)
    assert "{r} " in explain(TwoTowers(), world_size=4, expert_parallel_size=4).to_text(is_coloured=False)


def test_spellings() -> None:
    assert collapsed("12.blocks.3.attn1.w_2.0") == "*.blocks.*.attn1.w_2.*"
    assert collapsed("extra[3][10].weight") == "extra[*][*].weight"
    assert [spell_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]
    assert [spell_runs(n) for n in ((), (4,), (0, 1, 2, 5, 7, 8))] == ["-", "4", "0-2, 5, 7-8"]
