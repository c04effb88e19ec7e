"""What ``doctor`` says of versions, links, memory, files, ports, name servers and kernels."""

import os
import re
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_moeclip.diagnosis import doctor_kernels, doctor_links, doctor_machine, doctor_network, doctor_versions
from lightning_moeclip.diagnosis.current_launch import Launch, current_launch
from lightning_moeclip.diagnosis.findings import Diagnosis, Finding, line_of, within
from lightning_moeclip.parallel.topology import Level
from lightning_moeclip.state.snapshot import SnapshotRing

TOPOLOGIES = Path(__file__).parents[1] / "parallel" / "topologies"
GOOD = {
    "torch": "2.13.0+cpu",
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "torchmetrics": "1.9.0",
    "triton": "3.9.0",
    "numpy": "2.4.6",
}
REQUIREMENTS = [
    "torch>=2.11",
    "lightning>=2.6.4,<2.7,!=2.6.2,!=2.6.3",
    "numpy>=1.26",
    'triton>=3.6; extra == "kernels"',
]


def versions(**changed: str | None) -> list[Finding]:
    found = {**GOOD, **{name.replace("_", "-"): version for name, version in changed.items()}}
    return doctor_versions.version_findings(found.get, REQUIREMENTS, python="3.11.7")


def only(findings: list[Finding], status: str) -> list[Finding]:
    return [finding for finding in findings if finding.status == status]


def test_versions_in_range_are_ok() -> None:
    found = versions()
    assert [(f.name, f.status, f.found) for f in found] == [
        ("Python", "ok", "3.11.7"),
        *((name, "ok", version) for name, version in GOOD.items()),
    ]


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_compromised_release_is_the_first_finding(name: str, version: str) -> None:
    first, *rest = versions(**{name: version})
    assert (first.name, first.status) == (name.replace("_", "-"), "error")
    assert first.found == f"{version} is a compromised release (GHSA-w37p-236h-pfx3), which must not be imported"
    assert 'pip install "lightning>=2.6.4,<2.7"' in first.advice
    assert first.name not in [finding.name for finding in rest]
    assert not only(rest, "error")


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        ("torch", "2.10.1", ">=2.11"),
        ("triton", "3.5.0", ">=3.6"),
        ("lightning", "2.7.0", "!=2.6.2,!=2.6.3,<2.7,>=2.6.4"),
        ("pytorch_lightning", "2.5.0", "!=2.6.2,!=2.6.3,<2.7,>=2.6.4"),
    ],
)
def test_a_version_out_of_range_is_an_error(name: str, version: str, wanted: str) -> None:
    (error,) = only(versions(**{name: version}), "error")
    assert error.found == f"{version} is out of the range {wanted} that this package is made for"
    assert error.advice == f'Write pip install "{error.name}{wanted}" in this environment.'


def test_what_is_not_installed_is_told_where_it_is_missed() -> None:
    assert only(versions(torch=None), "error")[0].advice == "Write pip install torch."
    assert only(versions(triton=None), "note")[0].advice.startswith('Write pip install "lightning-moeclip[kernels]"')
    one_root = {f.name: f for f in versions(lightning=None)}
    assert one_root["lightning"].found == "not installed; pytorch-lightning is, which is all that is needed"
    assert one_root["lightning"].status == "ok"
    no_root = only(versions(lightning=None, pytorch_lightning=None), "error")
    assert [finding.name for finding in no_root] == ["lightning", "pytorch-lightning"]
    assert only(versions(numpy="from git"), "note")[0].found.startswith("from git, which is no version")


def test_ranges_are_those_of_our_own_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor_versions.version_findings({**GOOD, "numpy": "1.20"}.get, python="3.9.1")
    assert {"Python", "numpy"} == {finding.name for finding in only(found, "error")}
    assert next(f for f in found if f.name == "Python").advice.startswith("Use a Python in ")

    def absent(name: str) -> None:
        raise doctor_versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_versions.metadata, "metadata", absent)
    (note,) = only(doctor_versions.version_findings(GOOD.get), "note")
    assert note == Finding(
        "lightning-moeclip",
        "note",
        "runs from a folder and is not installed",
        "Install it, so that its ranges are known: pip install -e . in its folder.",
    )


def test_two_releases_of_lightning_in_one_environment_are_a_warning() -> None:
    assert doctor_versions.roots_finding("lightning.pytorch", GOOD.get).status == "ok"
    warning = doctor_versions.roots_finding("lightning.pytorch", {**GOOD, "pytorch-lightning": "2.6.4"}.get)
    assert warning.status == "warning"
    assert warning.advice.startswith('Write pip install "pytorch-lightning==2.6.6"')


def links(name: str, world_size: int, ranks_per_node: int, size: int | None = None) -> tuple[Finding, int]:
    machine = doctor_links.links_of_machine((TOPOLOGIES / f"{name}.txt").read_text)
    (finding,), suggested = doctor_links.link_findings(machine, world_size, ranks_per_node, size)
    return finding, suggested


def link(a: int, b: int) -> Level:
    """Of two groups of three GPUs."""
    return Level.SELF if a == b else Level.NVLINK if a // 3 == b // 3 else Level.SOCKETS


def test_links_say_which_ranks_should_share_out_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding, size = links("v100_cube_mesh", 16, 8)
    assert (finding.status, size) == ("ok", 4)
    assert "groups of 4 have NVLink between all of them: [0-3] [4-7]; 2 machines, with the network" in finding.found
    assert finding.advice.startswith("expert_parallel_size=4 is the most that stays within them; any divisor")

    finding, size = links("bridged_pairs", 4, 4)
    assert (finding.status, size) == ("note", 2)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,2,1,3 before the launch" in finding.advice

    finding, size = links("a100_nvswitch", 16, 8, 16)
    assert (finding.status, size) == ("warning", 16)
    assert finding.advice.startswith("Write MoEClipStrategy(expert_parallel_size=8): tokens of groups of 16 cross")
    # the last machine has four ranks: groups of four stay within one
    assert links("a100_nvswitch", 12, 8)[1] == 4

    # groups of two in six ranks: the second has a rank of either group of three
    machine = doctor_links.Links(tuple(range(6)), tuple(tuple(link(a, b) for b in range(6)) for a in range(6)))
    assert doctor_links.link_findings(machine, 6, 6, 3)[0][0].status == "ok"
    (finding,), _ = doctor_links.link_findings(machine, 6, 6, 2)
    assert finding.status == "warning"
    assert finding.advice.startswith("Write MoEClipStrategy(expert_parallel_size=3): tokens of groups of 2 cross")
    assert doctor_links.link_findings(machine, 6, 6, 1)[0][0].status == "ok"

    finding, size = links("one_gpu", 2, 2)
    assert (finding.status, finding.found) == ("warning", "2 ranks on a machine that shows 1 GPU(s)")
    assert size == 1


def test_links_are_those_of_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    finding, size = links("bridged_pairs", 2, 2)
    assert (finding.status, size) == ("ok", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-17fa")
    with pytest.raises(ValueError, match=r"'GPU-17fa' does not name GPUs by number.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        links("bridged_pairs", 2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,0")
    machine = doctor_links.links_of_machine((TOPOLOGIES / "bridged_pairs.txt").read_text)
    assert machine is not None
    assert machine.gpus == (2,)
    for nothing in ("-1", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert doctor_links.links_of_machine((TOPOLOGIES / "bridged_pairs.txt").read_text) is None
    assert doctor_links.links_of_machine((TOPOLOGIES / "one_gpu.txt").read_text) is None


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_links.shutil, "which", lambda name: None)
    assert doctor_links.links_of_machine() is None
    (finding,), size = doctor_links.link_findings(None, 4, 4, None)
    assert finding.found == "no GPU, so no links to compare: ranks of one machine meet in its memory"
    assert size == 4


@pytest.mark.parametrize(
    ("script", "told"),
    [("exit 9", "failed: "), ("sleep 30", "does not answer: .*timed out"), ("echo hello", "no matrix of")],
)
def test_an_nvidia_smi_that_does_not_tell_is_told_of(
    script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nexec {script}\n" if "exit" not in script else f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor_links, "_TOPOLOGY_S", 0.3)
    with pytest.raises(ValueError, match=told):
        doctor_links.links_of_machine()


def test_groups_of_a_world_are_told() -> None:
    found = doctor_links.groups_finding(8, 4).found
    assert found == (
        "world_size=8, expert_parallel_size=4: dp: [0-7]; ep: [0-3] [4-7]; edp: [0, 4] [1, 5] [2, 6] [3, 7]"
    )
    assert "ep: [0-7] [8-15] ... 8 groups ... [56-63]" in doctor_links.groups_finding(64, 8).found
    assert doctor_links.groups_finding(1, 1).found.endswith("none, one rank")
    with pytest.raises(ValueError, match="expert_parallel_size=3 does not divide the world of 8 ranks"):
        doctor_links.groups_finding(8, 3)


def test_memory_for_snapshots_is_what_the_ring_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = SnapshotRing(ranks_per_node=4).max_bytes / 2**30
    found = doctor_machine.memory_finding(4).found
    assert found.startswith(f"{gib:.1f} GiB for each of 4 rank(s) of ")
    monkeypatch.setattr(doctor_machine, "memory_bytes", lambda: 96 * 2**30)
    monkeypatch.setattr(doctor_machine, "share_of_memory", lambda ranks: 12 * 10**9 * 2)
    # weight and two moments in float32, twice
    assert doctor_machine.memory_finding(4).found.endswith(
        "two snapshots of 1.0 billion parameters under AdamW in float32"
    )

    def unknown(ranks: int) -> int:
        raise ValueError("Write CosineRollback(max_snapshot_bytes=...).")

    monkeypatch.setattr(doctor_machine, "share_of_memory", unknown)
    warning = doctor_machine.memory_finding(4)
    assert (warning.status, warning.advice) == ("warning", "Write CosineRollback(max_snapshot_bytes=...).")


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = SimpleNamespace(f_bavail=2**14, f_blocks=2**14, f_frsize=2**12)  # 64 MiB, what Docker gives
    monkeypatch.setattr(doctor_machine.os, "statvfs", lambda folder: stat)
    warning = doctor_machine.shared_memory_finding()
    assert (warning.status, warning.found) == ("warning", "0.06 of 0.06 GiB free in /dev/shm")
    assert "docker run --shm-size=8g" in warning.advice
    monkeypatch.setattr(
        doctor_machine.os, "statvfs", lambda folder: SimpleNamespace(**{**vars(stat), "f_bavail": 2**19})
    )
    assert doctor_machine.shared_memory_finding().status == "ok"
    monkeypatch.undo()
    assert doctor_machine.shared_memory_finding("/nowhere").status == "note"


def test_open_files_are_counted_by_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # default and dp: 127 others each; ep: 7; edp: 15; and 260 of the rest
    needed = 2 * 127 + 7 + 15 + 260
    monkeypatch.setattr(resource, "getrlimit", lambda which: (needed, 4096))
    assert doctor_machine.open_files_finding(128, 8).status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (needed - 1, 4096))
    error = doctor_machine.open_files_finding(128, 8)
    assert error.found == f"a rank may open {needed - 1}, and needs some {needed} among 128 ranks"
    assert error.advice == f"Write ulimit -n {2 * needed} before the launch (this user may have 4096)."
    assert error.status == "error"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert doctor_machine.open_files_finding(128, 8).found.startswith("a rank may open any number")


@pytest.mark.parametrize(
    ("sees", "status", "told"),
    [
        ({"is_gloo_available": False}, "error", "no gloo"),
        ({}, "ok", "no GPU: ranks run on the CPU over gloo"),
        ({"device_count": 2, "is_nccl_available": False}, "error", "2 GPU\\(s\\): A GPU"),
        ({"device_count": 1, "is_nccl_available": True}, "ok", "NCCL 2.27.5, .* 1 GPU\\(s\\): A GPU"),
        ({"is_dir": True}, "warning", "which sees none of this machine's NVIDIA GPUs"),
    ],
)
def test_backends(sees: dict[str, object], status: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sees = {"is_gloo_available": True, "is_nccl_available": False, "device_count": 0, "is_dir": False, **sees}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor_machine.dist, "is_gloo_available", lambda: sees["is_gloo_available"])
    monkeypatch.setattr(doctor_machine.dist, "is_nccl_available", lambda: sees["is_nccl_available"])
    monkeypatch.setattr(doctor_machine.torch.cuda, "device_count", lambda: sees["device_count"])
    monkeypatch.setattr(doctor_machine.torch.cuda, "get_device_name", lambda index: "A GPU")
    monkeypatch.setattr(doctor_machine.torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(doctor_machine.Path, "is_dir", lambda path: sees["is_dir"])
    (finding,) = doctor_machine.backend_findings()
    assert finding.status == status
    assert re.search(told, finding.found), finding


def test_lookups_are_measured_and_slow_ones_told_with_what_helps() -> None:
    asked: list[str] = []
    found = doctor_network.lookup_finding(asked.append, samples=3)
    assert (found.status, asked) == ("ok", ["::ffff:127.0.0.1"] * 3)

    now = iter([0.0, 0.001, 1.0, 6.2, 7.0, 7.001])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_network, "time", SimpleNamespace(monotonic=lambda: next(now)))
        slow = doctor_network.lookup_finding(lambda address: None, samples=3)
    assert slow.status == "warning"
    assert (
        slow.found == "3 lookups of ::ffff:127.0.0.1 took 5200.0 ms at most; every connection to a store waits for two"
    )
    assert 'Add the line "::ffff:127.0.0.1 localhost" to /etc/hosts' in slow.advice
    assert 'RES_OPTIONS="timeout:1 attempts:1"' in slow.advice


def test_a_lookup_without_an_answer_does_not_hold_doctor() -> None:
    over = threading.Event()
    found = doctor_network.lookup_finding(lambda address: over.wait(30), deadline_s=0.05)
    over.set()
    assert found.status == "warning"
    assert found.found.startswith("0 lookups of ::ffff:127.0.0.1 took 0.0 ms at most, and then no answer within 0.05 s")

    def refuse(address: str) -> None:
        raise socket.gaierror("no such name")

    assert doctor_network.lookup_finding(refuse).status == "ok"


def test_loopback_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_network.loopback_finding().status == "ok"

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert doctor_network.loopback_finding().found == "no connection to 127.0.0.1: refused"


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


TORCHRUN, SRUN = Launch("torchrun", 1, 2, 2), Launch("srun", 0, 2, 2)


@pytest.mark.parametrize(
    ("address", "port", "launch", "status", "told"),
    [
        (None, None, None, "ok", "MASTER_PORT is not set"),
        (None, "x", None, "error", "MASTER_PORT='x' is no port"),
        (None, "70000", TORCHRUN, "error", "MASTER_PORT='70000' is no port"),
        ("127.0.0.1", "taken", None, "error", "127.0.0.1:[0-9]+ cannot be listened on: Address already in use"),
        ("127.0.0.1", "free", None, "ok", "127.0.0.1:[0-9]+ is free"),
        ("192.0.2.1", "free", None, "note", "192.0.2.1 is an address of another machine"),
        ("nowhere.invalid", "free", None, "error", "MASTER_ADDR='nowhere.invalid' is not known"),
        ("127.0.0.1", "taken", TORCHRUN, "ok", "127.0.0.1:[0-9]+ answers"),
        ("127.0.0.1", "free", TORCHRUN, "ok", "127.0.0.1 is reachable, and nobody listens on [0-9]+ yet"),
        ("nowhere.invalid", "free", TORCHRUN, "error", "no connection to nowhere.invalid"),
        # rank 0 will serve the store itself
        ("127.0.0.1", "taken", SRUN, "error", "cannot be listened on"),
        ("127.0.0.1", "free", SRUN, "ok", "is free"),
    ],
)
def test_the_stores_port(
    address: str | None,
    port: str | None,
    launch: Launch | None,
    status: str,
    told: str,
    listening: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, {"taken": str(listening), "free": str(free)}.get(value, value))
    finding = doctor_network.port_finding(launch)
    assert finding.status == status, finding
    assert re.search(told, finding.found), finding


def test_a_machine_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(doctor_network, "_CONNECT_S", 0.02)
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: over.wait(30))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = doctor_network.port_finding(TORCHRUN)
    over.set()
    assert (found.status, found.found) == ("error", "no connection to 192.0.2.1:29500: no answer within 0.04 s")
    assert "an address of the first machine that all others reach" in found.advice


def test_kernels_tell_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_kernels.kernels_finding().found.endswith("no GPU: torch computes all operations")
    monkeypatch.setattr(doctor_kernels, "runs_triton", lambda x: True)
    monkeypatch.setattr(doctor_kernels, "is_interpreted", lambda: True)
    assert doctor_kernels.kernels_finding().advice.startswith("Unset TRITON_INTERPRET for training")
    monkeypatch.setattr(doctor_kernels, "is_interpreted", lambda: False)
    for agrees, status, told in (
        (True, "ok", "compiled and right after"),
        (False, "error", "to other experts than torch"),
    ):
        monkeypatch.setattr(doctor_kernels, "_agrees_with_torch", lambda agrees=agrees: agrees)
        assert doctor_kernels.kernels_finding().status == status
        assert told in doctor_kernels.kernels_finding().found

    def fail() -> bool:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(doctor_kernels, "_agrees_with_torch", fail)
    error = doctor_kernels.kernels_finding()
    assert error.status == "error"
    assert "does not compile a kernel: RuntimeError: no C compiler" in error.found
    over = threading.Event()
    monkeypatch.setattr(doctor_kernels, "_agrees_with_torch", lambda: over.wait(30))
    monkeypatch.setattr(doctor_kernels, "_COMPILE_S", 0.02)
    assert "TimeoutError: no answer within 0.02 s" in doctor_kernels.kernels_finding().found
    over.set()


def test_launch_is_that_of_torchrun_or_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("SLURM_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    assert current_launch() is None
    elastic = {"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in elastic.items():
            patch.setenv(name, value)
        assert current_launch() == Launch("torchrun", 5, 16, 8)
        assert Launch("torchrun", 5, 16, 8).num_nodes == 2
        patch.setenv("WORLD_SIZE", "1")
        assert current_launch() is None
        patch.setenv("RANK", "first")
        with pytest.raises(ValueError, match="started by torchrun, and RANK, WORLD_SIZE or LOCAL_WORLD_SIZE is"):
            current_launch()
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert current_launch() == Launch("srun", 3, 4, 2)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert current_launch() == Launch("srun", 3, 4, 4)
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert current_launch() == Launch("srun", 3, 4, 2)


def test_findings_as_text_and_json() -> None:
    error = Finding("links", "error", "none", "Write more.")
    assert line_of(error) == "error   links                   none\n                                -> Write more."
    assert line_of(error, color=True).startswith("\x1b[31merror   \x1b[0mlinks")
    assert line_of(Finding("links", "ok", "all"), color=True) == "ok      links                   all"
    assert Diagnosis((Finding("links", "warning", "few"),)).ok
    assert not Diagnosis((error,)).ok
    assert '"found": "none"' in Diagnosis((error,)).to_json()


def test_a_function_that_takes_too_long_is_left() -> None:
    assert within(5.0, lambda: 3) == 3
    with pytest.raises(KeyError, match="own"):
        within(5.0, lambda: {}["own"])
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        within(0.01, lambda: over.wait(30))
    over.set()
