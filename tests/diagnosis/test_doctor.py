"""``doctor`` as a whole: by itself, on the ranks of a launch, with planted faults, and its command line."""

import functools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_moeclip.__main__ import main
from lightning_moeclip.diagnosis import doctor as module
from lightning_moeclip.diagnosis import doctor_command, doctor_parity
from lightning_moeclip.diagnosis.current_launch import Launch, current_launch
from lightning_moeclip.diagnosis.doctor import differences, doctor
from lightning_moeclip.diagnosis.findings import Diagnosis, Finding
from lightning_moeclip.testing import Rank, inject, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed

# in this order, those of known-bad versions before all
NAMES = [
    "Python", "torch", "lightning", "pytorch-lightning", "torchmetrics", "triton", "numpy", "Lightning's roots",
    "backend", "links", "process groups", "memory for snapshots", "shared memory", "open files", "loopback",
    "store's port", "name lookup", "kernels",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _outside_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_command_tells_all_findings_and_two_processes_equal_one(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--world-size", "4", "--expert-parallel-size", "2"])
    told = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in told["findings"]] == [*NAMES, "one-step parity"]
    found = {finding["name"]: finding for finding in told["findings"]}
    assert code == (0 if told["ok"] else 1)
    assert "world_size=4, expert_parallel_size=2: dp: [0-3]; ep: [0, 1] [2, 3]" in found["process groups"]["found"]
    parity = found["one-step parity"]
    assert parity["status"] == "ok", parity
    assert "on two gloo processes, in " in parity["found"]
    assert float(parity["found"].split()[3]) <= 1e-10


@on_ranks(2)
def doctor_in_a_launch(rank: Rank, fault: str) -> tuple[Diagnosis, bool]:
    dist.destroy_process_group()  # there is none when a script starts
    assert current_launch() is not None
    if fault:
        step = doctor_parity.step_on_rank

        def faulty(*args: Any, **trainer: Any) -> Any:
            return step(*args, **trainer, callbacks=[inject(fault, 0, 1)])

        doctor_parity.step_on_rank = faulty
    if rank.index == 1:
        # as on a machine with other versions, and little memory to share
        module.doctor_versions.installed_version.__code__ = (lambda name: f"{len(name)}.0").__code__
        module.doctor_machine._SHARED_BYTES = 2**60
    return doctor(expert_parallel_size=2)


@pytest.mark.parametrize("fault", ["", "drop_reduce", "sign_flip"])
def test_every_rank_of_a_launch_takes_the_step_and_a_fault_on_one_is_an_error_on_all(fault: str) -> None:
    by_rank = doctor_in_a_launch.launch(fault=fault)
    for diagnosis in by_rank:
        parity = diagnosis.findings[-1]
        assert parity.name == "one-step parity"
        assert parity.status == ("error" if fault else "ok"), parity
        assert "on 2 ranks of torchrun, in " in parity.found
        assert ("on rank 1" in parity.found) or not fault
        others = [finding for finding in diagnosis.findings if finding.found.startswith("on rank 1: ")]
        assert [(f.name, f.status) for f in others if f.name in ("shared memory", "torch")] == [
            ("torch", "error"),
            ("shared memory", "warning"),
        ]
        assert not diagnosis.ok
    assert by_rank[0].findings[-1] == by_rank[1].findings[-1]


@on_ranks(1)
def waits_for_ever(rank: Rank, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    with module._ended_by(0.1):
        threading.Event().wait(30)


def test_a_rank_that_waits_for_others_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        waits_for_ever.launch(log=str(tmp_path / "err"))
    assert caught.value.failures == {0: "ended with exit code 1"}
    assert "doctor: no end within 0.1 s: a rank waits for one that has not come" in (tmp_path / "err").read_text()


def test_a_step_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: object) -> None:
        raise RanksFailed(2, {0: "Traceback\nsome line\nRuntimeError: no gloo"})

    monkeypatch.setattr(doctor_parity.step_on_two, "launch", fail)
    finding = doctor_parity.parity_finding()
    assert finding.status == "error"
    assert finding.found.endswith("failed: Traceback | some line | RuntimeError: no gloo")

    def refuse(*arguments: object) -> None:
        raise RuntimeError("rank 1 failed with OSError")

    monkeypatch.setattr(doctor_parity, "launch_errors", refuse)
    launch = functools.partial(module._on_all_ranks, None, [], (1,))
    (finding,) = launch()
    assert finding.found == "a step on the ranks of this launch failed: RuntimeError: rank 1 failed with OSError"


def test_a_launch_takes_a_step_with_sizes_that_divide_it() -> None:
    two, four = Launch("torchrun", 0, 2, 2), Launch("torchrun", 0, 4, 2)
    # a job of 64 ranks that share experts out over 8 is tried out on two
    assert module.parity_sizes(two, 8) == (1, 2)
    assert module.parity_sizes(four, 4) == (1, 4)
    assert module.parity_sizes(four, None) == (1, 2)
    assert module.parity_sizes(four, 3) == (1, 1)


def test_errors_of_a_step_name_what_is_wrong() -> None:
    reference = doctor_parity.one_process(2, 4)
    exact = doctor_parity.largest_errors(reference, reference, 0)
    assert set(exact.values()) == {0.0}
    assert {"gradient of loss.logit_scale", "parameter image.1.w_in"} <= set(exact)

    twice = {**reference.gradients, "image.0.bias": 2 * reference.gradients["image.0.bias"]}
    del twice["text.0.bias"]
    changed = doctor_parity.Step(reference.loss, twice, reference.parameters)
    errors = doctor_parity.largest_errors(changed, reference, 0)
    assert errors["gradient of image.0.bias"] == pytest.approx(1.0)
    assert errors["gradient of text.0.bias"] == float("inf")
    # the second of two expert-parallel ranks holds the last two of four experts
    name = "image.1.w_in"
    half = doctor_parity.Step(0.0, {**reference.gradients, name: reference.gradients[name][2:]}, reference.parameters)
    assert doctor_parity.largest_errors(half, reference, 1)[f"gradient of {name}"] == 0.0
    assert doctor_parity.largest_errors(half, reference, 0)[f"gradient of {name}"] > 0.1
    nan = {**reference.gradients, name: torch.full_like(reference.gradients[name], torch.nan)}
    errors = doctor_parity.largest_errors(doctor_parity.Step(0.0, nan, reference.parameters), reference, 0)
    assert errors[f"gradient of {name}"] == float("inf")
    assert doctor_parity.judged({"a": 1e-11, "b": 2e-10}, "here").found == (
        "largest relative error 2.0e-10 on here, in b; 1e-10 is allowed"
    )
    for errors in ({"a": 0.0, "b": float("nan")}, {"b": float("nan"), "a": 0.0}):
        assert doctor_parity.judged(errors, "here").status == "error"


def test_what_other_ranks_found_worse_is_told_once() -> None:
    slow = Finding("name lookup", "warning", "slow", "Mend it.")
    ranks = [
        [Finding("torch", "ok", "2.13"), Finding("name lookup", "ok", "1 ms")],
        [Finding("torch", "ok", "2.13"), Finding("name lookup", "ok", "2 ms")],
        [Finding("torch", "ok", "2.12"), slow],
        [Finding("torch", "ok", "2.13"), slow, Finding("launch", "error", "odd")],
    ]
    assert list(differences(ranks)) == [
        Finding(
            "torch",
            "error",
            "on rank 2: 2.12, and 2.13 on rank 0",
            "Install one and the same environment on every machine.",
        ),
        Finding("name lookup", "warning", "on rank 2, 3: slow", "Mend it."),
        Finding("launch", "error", "on rank 3: odd"),
    ]


def test_a_compromised_release_is_told_of_before_anything_imports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_command, "compromised", lambda: [Finding("lightning", "error", "2.6.2 is bad", "Go.")])
    monkeypatch.setattr(doctor_command, "import_module", None)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [f"error   {'lightning':24}2.6.2 is bad", f"{'':32}-> Go."]


def test_numbers_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--world-size", "8", "--expert-parallel-size", "3"]) == 2
    assert "expert_parallel_size=3 does not divide the world of 8 ranks" in capsys.readouterr().err
    assert main(["doctor", "--world-size", "0"]) == 2
    assert "world_size=0 must be 1 or more" in capsys.readouterr().err


def test_half_a_launch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(module._stray_launch()) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    (warning,) = module._stray_launch()
    assert warning.status == "warning"
    assert warning.found == "WORLD_SIZE=4 is set, and nothing that Lightning knows as torchrun or srun"


@on_ranks(2)
def test_a_process_group_that_is_there_is_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"makes a process group of its own, and there is one already\. Call it"):
        doctor()


def test_errors_are_red_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "examine", lambda **sizes: iter([Finding("links", "error", "none")]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == f"error   {'links':24}none\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("\x1b[31merror")
