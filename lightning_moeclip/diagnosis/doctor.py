"""``doctor``: is this machine, and the launch that it runs in, fit for training, and how is it best laid out?"""

import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_moeclip.binding import ROOT
from lightning_moeclip.diagnosis import doctor_links, doctor_machine, doctor_network, doctor_parity, doctor_versions
from lightning_moeclip.diagnosis.current_launch import Launch, current_launch
from lightning_moeclip.diagnosis.doctor_kernels import kernels_finding
from lightning_moeclip.diagnosis.findings import Diagnosis, Finding
from lightning_moeclip.parallel.agreement import gather_objects

__all__ = ["doctor", "examine", "parity_sizes"]

_VERSIONS = ("Python", "torch", "lightning", "pytorch-lightning", "torchmetrics", "triton", "numpy")


def doctor(*, world_size: int | None = None, expert_parallel_size: int | None = None) -> Diagnosis:
    """Look at versions, machine and process groups; under torchrun or srun, on every rank, at the same time.

    Args:
        world_size: number of ranks that a job would have; None takes those of the launch, or the GPUs, or two.
        expert_parallel_size: that the job would have; None takes what suits the links.

    Raises:
        ValueError: numbers that do not go together, or a process group that is there already.
    """
    return Diagnosis(tuple(examine(world_size=world_size, expert_parallel_size=expert_parallel_size)))


def examine(*, world_size: int | None = None, expert_parallel_size: int | None = None) -> Iterator[Finding]:
    """The findings of ``doctor`` one by one, as they are made."""
    launch = current_launch()
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "doctor makes a process group of its own, and there is one already. Call it before the Trainer is, or run "
            "python -m lightning_moeclip doctor in the place of the script."
        )
    world_size, ranks_per_node = _sizes(world_size, launch)
    if expert_parallel_size is not None:
        doctor_links.groups_finding(world_size, expert_parallel_size)  # refuses what does not divide, before all else
    own: list[Finding] = []
    for finding in _local(launch, world_size, ranks_per_node, expert_parallel_size):
        own.append(finding)
        yield finding
    if launch is None:
        yield from _stray_launch()
        yield doctor_parity.parity_finding()
        return
    yield from _on_all_ranks(launch, own, parity_sizes(launch, expert_parallel_size))


def parity_sizes(launch: Launch, expert_parallel_size: int | None) -> tuple[int, int]:
    """Values of ``expert_parallel_size`` that a launch takes a step with, which may have fewer ranks than the job.

    Each rank takes the same ones from what is the same for all: arguments, and not the links of its machine.

    Args:
        launch: that this process is a rank of.
        expert_parallel_size: that the job would have; None takes the ranks of a machine.
    """
    return 1, math.gcd(expert_parallel_size or launch.local_world_size, launch.world_size)


def _sizes(world_size: int | None, launch: Launch | None) -> tuple[int, int]:
    """World size and ranks on this machine."""
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size={world_size} must be 1 or more. Write the number of ranks of the job.")
    num_gpus = torch.cuda.device_count()
    if launch is not None:
        world_size = world_size or launch.world_size
        return world_size, min(world_size, launch.local_world_size)
    world_size = world_size or num_gpus or 2
    return world_size, min(world_size, num_gpus or world_size)


def _local(
    launch: Launch | None, world_size: int, ranks_per_node: int, expert_parallel_size: int | None
) -> Iterator[Finding]:
    """What a rank can say without the others."""
    yield from doctor_versions.version_findings()
    yield doctor_versions.roots_finding(ROOT)
    yield from doctor_machine.backend_findings()
    try:
        links = doctor_links.links_of_machine()
        findings, size = doctor_links.link_findings(links, world_size, ranks_per_node, expert_parallel_size)
        yield from findings
    except ValueError as error:
        yield Finding("links", "warning", str(error))
        size = expert_parallel_size or 1
    yield doctor_links.groups_finding(world_size, size)
    yield doctor_machine.memory_finding(ranks_per_node)
    yield doctor_machine.shared_memory_finding()
    yield doctor_machine.open_files_finding(world_size, size)
    yield doctor_network.loopback_finding()
    yield doctor_network.port_finding(launch)
    yield doctor_network.lookup_finding()
    yield kernels_finding()


def _stray_launch() -> Iterator[Finding]:
    """Half an environment of a launch that Lightning would not join."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        told = f"WORLD_SIZE={world} is set, and nothing that Lightning knows as torchrun or srun"
        yield Finding("launch", "warning", told, "Start with torchrun, or unset WORLD_SIZE, RANK and LOCAL_RANK.")


def _on_all_ranks(launch: Launch, own: Sequence[Finding], sizes: Sequence[int]) -> Iterator[Finding]:
    """The step on all ranks, and what the other ranks have found; a collective."""
    try:
        with _ended_by(doctor_parity.PARITY_S):
            errors = doctor_parity.launch_errors(launch, sizes)
            everybody = gather_objects((list(own), errors))
    except Exception as error:  # whatever it is, it is what the user's own run would meet
        yield doctor_parity.failed(f"a step on the ranks of this launch failed: {type(error).__name__}: {error}")
        return
    yield from differences([findings for findings, _ in everybody])
    together = {what: error for _, found in everybody for what, error in found.items()}
    yield doctor_parity.judged(together, f"{launch.world_size} ranks of {launch.by}")


def differences(by_rank: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """What other ranks than 0 found worse, and versions that are not the same everywhere.

    Args:
        by_rank: the findings of each rank.
    """
    first = {finding.name: finding for finding in by_rank[0]}
    told: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            before = first.get(finding.name)
            is_worse = finding.status in ("warning", "error") and (before is None or finding.status != before.status)
            if is_worse or (finding.name in _VERSIONS and finding != before):
                told.setdefault(finding, []).append(rank)
    for finding, ranks in told.items():
        where = f"on rank {', '.join(map(str, ranks))}: {finding.found}"
        if finding.name not in _VERSIONS:
            yield Finding(finding.name, finding.status, where, finding.advice)
            continue
        other = first[finding.name].found if finding.name in first else "none"
        advice = finding.advice or "Install one and the same environment on every machine."
        yield Finding(finding.name, "error", f"{where}, and {other} on rank 0", advice)


@contextmanager
def _ended_by(seconds: float) -> Iterator[None]:
    """End this process when the body does not: a collective that another rank never enters cannot be left."""

    def give_up() -> None:
        text = f"doctor: no end within {seconds:g} s: a rank waits for one that has not come. Start all ranks anew."
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
