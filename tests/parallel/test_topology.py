"""What lies between ranks, read from matrices as ``nvidia-smi topo -m`` prints them on machines of these kinds."""

from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.topology import Level, Links, place_experts, rank_groups, read_links, told_ranks
from lightning_moeclip.testing import Rank, on_ranks

FOLDER = Path(__file__).parent / "topologies"
NVLINK, SWITCH, HOST, SOCKETS = Level.NVLINK, Level.SWITCH, Level.HOST, Level.SOCKETS


def links_of(name: str) -> Links:
    return read_links((FOLDER / f"{name}.txt").read_text())


@pytest.mark.parametrize(
    ("name", "num_gpus", "between"),
    [
        ("a100_nvswitch", 8, {(0, 1): NVLINK, (0, 7): NVLINK}),
        ("v100_cube_mesh", 8, {(0, 3): NVLINK, (0, 4): NVLINK, (0, 5): SOCKETS}),
        ("pcie_switches", 6, {(0, 1): SWITCH, (1, 2): HOST, (3, 4): SOCKETS}),
        ("seven_gpus", 7, {(0, 2): SWITCH, (2, 3): HOST}),
        ("bridged_pairs", 4, {(0, 2): NVLINK, (0, 1): SOCKETS}),
        ("one_gpu", 1, {(0, 0): Level.SELF}),
    ],
)
def test_links_of_gpus_are_read_and_those_of_network_cards_are_not(
    name: str, num_gpus: int, between: dict[tuple[int, int], Level]
) -> None:
    links = links_of(name)
    assert links.gpus == tuple(range(num_gpus))
    assert {pair: links.between(*pair) for pair in between} == between
    assert all(links.between(a, b) == links.between(b, a) for a in links.gpus for b in links.gpus)
    assert all((links.between(a, b) == Level.SELF) == (a == b) for a in links.gpus for b in links.gpus)


@pytest.mark.parametrize(
    ("name", "size", "order", "slowest"),
    [
        ("a100_nvswitch", 8, range(8), NVLINK),
        # all eight have NVLink, but only four have it to each other
        ("v100_cube_mesh", 4, range(8), NVLINK),
        ("pcie_switches", 2, range(6), SWITCH),
        # three and four behind a switch: no groups of one size, so the next kind of link counts
        ("seven_gpus", 7, range(7), HOST),
        # neighbours by number are not those with the bridge
        ("bridged_pairs", 2, (0, 2, 1, 3), NVLINK),
        ("one_gpu", 1, (0,), Level.SELF),
    ],
)
def test_experts_are_shared_out_where_all_links_are_fast(
    name: str, size: int, order: tuple[int, ...], slowest: Level
) -> None:
    links = links_of(name)
    placement = place_experts(links)
    assert placement.expert_parallel_size == size
    assert placement.order == tuple(order)
    assert placement.slowest == slowest
    for group in placement.groups:
        assert len(group) == size
        assert all(links.between(a, b) <= slowest for a in group for b in group)


def test_groups_that_the_first_choice_does_not_leave_room_for_are_found() -> None:
    # 0 reaches 1 and 2, 1 reaches 3 as well: only {0, 2} leaves 1 its neighbour
    fast = {(0, 1), (0, 2), (1, 3)}
    levels = [
        [Level.SELF if a == b else NVLINK if {(a, b), (b, a)} & fast else SOCKETS for b in range(4)] for a in range(4)
    ]
    placement = place_experts(Links((0, 1, 2, 3), tuple(map(tuple, levels))))
    assert placement.groups == ((0, 2), (1, 3))


def test_some_of_the_gpus_in_any_order() -> None:
    links = links_of("bridged_pairs").only([3, 1])
    assert links.gpus == (3, 1)
    assert links.between(1, 3) == NVLINK
    with pytest.raises(ValueError, match=r"There is no GPU 4: nvidia-smi counts \[0, 1, 2, 3\]"):
        links_of("bridged_pairs").only([4])


@pytest.mark.parametrize(
    ("matrix", "told"),
    [
        ("", "no matrix of `nvidia-smi topo -m`: 0 GPUs in its header, 0 rows"),
        ("NVIDIA-SMI has failed", "It begins with 'NVIDIA-SMI has failed'"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV4\n", "2 GPUs in its header, 1 rows"),
        ("\tGPU0\tGPU1\nGPU0\t X \tFOO\nGPU1\tFOO\t X \n", "'FOO' is no link that is known; known are NV1, NV2"),
    ],
)
def test_what_is_no_matrix_is_refused(matrix: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_links(matrix)


@on_ranks(4)
def groups_of_mesh(rank: Rank) -> dict[int, dict[str, list[int]]]:
    found = {}
    for size in (1, 2, 4):
        mesh = Mesh.build(size)
        groups = {"ep": mesh.experts and mesh.experts.group, **mesh.gradient_groups}
        if mesh.gradient_groups["edp"] is mesh.gradient_groups["dp"]:
            del groups["edp"]
        found[size] = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group}
    return found


def test_groups_that_are_told_are_those_that_the_mesh_makes() -> None:
    by_rank = groups_of_mesh.launch()
    for size in (1, 2, 4):
        told = rank_groups(4, size)
        for rank, found in enumerate(by_rank):
            own = {axis: list(group) for axis, groups in told.items() for group in groups if rank in group}
            assert own == found[size], f"expert_parallel_size={size}, rank {rank}"
    assert rank_groups(1, 1) == {"dp": (), "ep": (), "edp": ()}


@pytest.mark.parametrize(
    ("ranks", "told"),
    [((0, 1), "0, 1"), ((4, 5, 6), "4-6"), ((0, 4), "0, 4"), (range(0, 40, 4), "0, 4, 8, ..., 36")],
)
def test_ranks_are_told_briefly(ranks: tuple[int, ...], told: str) -> None:
    assert told_ranks(ranks) == told
