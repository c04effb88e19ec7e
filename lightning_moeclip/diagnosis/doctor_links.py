"""Which process groups a job would have, and which ranks should share out experts."""

import math
import os
import shutil
import subprocess
from collections.abc import Callable

from lightning_moeclip.diagnosis.findings import Finding
from lightning_moeclip.parallel.mesh import check_divides
from lightning_moeclip.parallel.topology import Links, Placement, place_experts, rank_groups, read_links, told_ranks

__all__ = ["groups_finding", "link_findings", "links_of_machine"]

_TOPOLOGY_S = 15.0  # nvidia-smi wakes up GPUs that no driver daemon keeps awake
_FITS = "any divisor of it that divides the number of experts fits too"


def groups_finding(world_size: int, expert_parallel_size: int) -> Finding:
    """The groups that the strategy makes, by axis.

    Raises:
        ValueError: ``expert_parallel_size`` does not divide ``world_size``.
    """
    check_divides(world_size, expert_parallel_size)
    groups = rank_groups(world_size, expert_parallel_size)
    told = "; ".join(f"{axis}: {_told(found)}" for axis, found in groups.items() if found)
    return Finding(
        "process groups",
        "ok",
        f"world_size={world_size}, expert_parallel_size={expert_parallel_size}: {told or 'none, one rank'}",
    )


def _told(groups: tuple[tuple[int, ...], ...]) -> str:
    shown = [f"[{told_ranks(group)}]" for group in groups]
    return " ".join(shown if len(shown) <= 4 else [*shown[:2], f"... {len(shown)} groups ...", shown[-1]])


def links_of_machine(run: Callable[[], str] | None = None) -> Links | None:
    """Links between the GPUs of this machine that CUDA_VISIBLE_DEVICES lets a job see; None without GPUs.

    Args:
        run: prints the matrix; None asks nvidia-smi.

    Raises:
        ValueError: nvidia-smi does not answer, or in words that are not known.
    """
    if run is None:
        if shutil.which("nvidia-smi") is None:
            return None
        run = _ask
    links = read_links(run())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return links
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = names[: names.index("-1")] if "-1" in names else names  # CUDA shows what stands before it
    if not all(name.isdigit() for name in names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible!r} does not name GPUs by number, as nvidia-smi's matrix does. Write "
            "numbers, with CUDA_DEVICE_ORDER=PCI_BUS_ID, which counts as it does."
        )
    return links.only([int(name) for name in names]) if names else None


def _ask() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_TOPOLOGY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"`nvidia-smi topo -m` does not answer: {error}") from error
    if done.returncode:
        raise ValueError(f"`nvidia-smi topo -m` failed: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def link_findings(
    links: Links | None, world_size: int, ranks_per_node: int, expert_parallel_size: int | None
) -> tuple[list[Finding], int]:
    """What lies between ranks, and the size of expert-parallel groups that suits it.

    Args:
        links: of this machine's GPUs; None where ranks run on CPUs.
        world_size: number of ranks.
        ranks_per_node: ranks on each machine.
        expert_parallel_size: what the user means to write; None leaves it to what is found.

    Returns:
        Findings, and the ``expert_parallel_size`` that was given or is suggested.
    """
    if links is None:
        told = "no GPU, so no links to compare: ranks of one machine meet in its memory"
        size = ranks_per_node if world_size % ranks_per_node == 0 else 1
        return [_suggestion(told, size, expert_parallel_size, "")], expert_parallel_size or size
    if len(links.gpus) < ranks_per_node:
        told = f"{ranks_per_node} ranks on a machine that shows {len(links.gpus)} GPU(s)"
        advice = f"Write Trainer(devices={len(links.gpus)}), or make more of them visible in CUDA_VISIBLE_DEVICES."
        return [Finding("links", "warning", told, advice)], expert_parallel_size or 1
    used = links.only(links.gpus[:ranks_per_node])
    placement = place_experts(used)
    size = math.gcd(placement.expert_parallel_size, world_size)  # the last machine may have fewer ranks
    told = f"{len(used.gpus)} GPU(s) on this machine"
    if size > 1:
        groups = " ".join(f"[{told_ranks(group)}]" for group in placement.groups)
        told += f": groups of {placement.expert_parallel_size} have {placement.slowest} between all of them: {groups}"
    if world_size > ranks_per_node:
        told += f"; {-(-world_size // ranks_per_node)} machines, with the network between them"
    return [_suggestion(told, size, expert_parallel_size, _order(placement, used))], (expert_parallel_size or size)


def _order(placement: Placement, used: Links) -> str:
    if placement.order == used.gpus:
        return ""
    order = ",".join(map(str, placement.order))
    return f" Write CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={order} before the launch: neighbours share out."


def _suggestion(told: str, size: int, given: int | None, order: str) -> Finding:
    if given is not None and size % given:  # groups of another size reach over the edge of those
        advice = (
            f"Write MoEClipStrategy(expert_parallel_size={size}): tokens of groups of {given} cross slower links in "
            f"every layer.{order}"
        )
        return Finding("links", "warning", told, advice)
    advice = f"expert_parallel_size={size} is the most that stays within them; {_FITS}.{order}" if size > 1 else ""
    return Finding("links", "ok" if not order else "note", told, advice)
