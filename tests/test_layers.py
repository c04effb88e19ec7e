"""The rooms import downward only, know no cycles and have no rooms without a name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_moeclip"

# room -> rooms of ours that it may import, and whether it may import Lightning (through binding.py)
ALLOWED: dict[str, tuple[set[str], bool]] = {
    "kernels": (set(), False),
    "roots": (set(), False),
    "binding": ({"roots"}, True),
    "parallel": (set(), False),
    "gradients": ({"parallel", "kernels"}, False),
    "modules": ({"parallel", "kernels"}, False),
    "state": ({"parallel", "gradients"}, False),
    "launch": ({"parallel", "binding"}, True),
    "batch_counts": ({"parallel", "launch"}, False),
    "casts": ({"binding"}, True),
    "clips": ({"gradients", "casts", "binding"}, True),
    "precision": ({"parallel", "gradients", "state", "clips", "binding"}, True),
    "scalars": (set(), False),
    "scale_log": ({"gradients", "scalars"}, False),
    "plan_log": ({"parallel"}, False),
    "checkpoints": ({"parallel", "gradients", "state", "batch_counts"}, False),
    "watching": ({"parallel", "gradients", "state", "checkpoints", "binding"}, True),
    "setup_checks": ({"parallel", "gradients", "state", "watching"}, False),
    "strategy": (
        {"parallel", "gradients", "state", "setup_checks", "precision", "scale_log", "plan_log", "binding"},
        True,
    ),
    "monitor": ({"gradients"}, False),
    "callbacks": ({"monitor", "state", "gradients", "scalars", "binding"}, True),
    "testing": (
        {"parallel", "gradients", "modules", "monitor", "state", "precision", "strategy", "binding", "kernels"},
        True,
    ),
    "diagnosis": (
        {"parallel", "gradients", "modules", "state", "precision", "strategy", "testing", "binding", "kernels"},
        True,
    ),
    "__main__": (set(), False),  # loads the commands of diagnosis by name
    "registry": (set(), False),
    "__init__": ({"registry"}, False),
}
COLLECTIVE_FILES = {
    "gradients/collectives.py",
    "modules/dispatch.py",
    "modules/global_batch.py",  # all exchanges of features and cotangents, for both losses
    "parallel/agreement.py",
    "state/canonical.py",
    "state/consistency.py",
}
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "reduce_scatter_tensor", "gather", "scatter", "monitored_barrier",
    "all_gather_single", "reduce_scatter_single", "all_gather_coalesced", "all_reduce_coalesced", "all_to_all",
    "gather_object", "reduce", "reduce_scatter", "scatter_object_list", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "send_object_list", "recv_object_list",
}  # fmt: skip


GROUP_FILES = {"parallel/mesh.py", "testing/on_ranks.py"}
GROUPS = {"new_group", "new_subgroups", "split_group", "init_process_group", "init_device_mesh"}


def sources() -> dict[str, Path]:
    files = {str(p.relative_to(ROOT / PACKAGE)): p for p in (ROOT / PACKAGE).rglob("*.py")}
    return files | {f"kernels/{p.name}": p for p in (ROOT / "kernels").glob("*.py")}


def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module} | (
                {f"{node.module}.{a.name}" for a in node.names} if node.module == PACKAGE else set()
            )
    return found


@pytest.mark.parametrize("name", sorted(sources()))
def test_imports_go_downward(name: str) -> None:
    room = room_of(name)
    rooms, lightning = ALLOWED[room]
    for module in imports(sources()[name]):
        if module.startswith(f"{PACKAGE}."):
            target = module.split(".")[1]
            assert target == room or target in rooms, f"{name} imports {module}"
        if module.split(".")[0] in {"lightning", "pytorch_lightning", "lightning_fabric"}:
            assert room == "binding", f"{name} imports {module}: Lightning comes through binding.py alone"
        if module == f"{PACKAGE}.binding":
            assert lightning, f"{name} may not know Lightning"


def test_no_cycles_between_files() -> None:
    graph = {}
    for name, path in sources().items():
        module = f"{PACKAGE}." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        graph[module] = {m for m in imports(path) if m.startswith(PACKAGE)}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in graph and module not in done:
            for target in graph[module] - {PACKAGE}:
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_rooms_without_a_name() -> None:
    assert not [n for n in sources() if Path(n).stem in {"utils", "common", "helpers", "misc"}]


def lines_with(names: set[str], source: str) -> list[int]:
    """Lines that import or use one of ``names`` of torch.distributed, whatever the file calls either."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}  # name in this file -> what it stands for
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            if is_distributed(node.module) and {a.name for a in node.names} & (names | {"*"}):
                lines.append(node.lineno)
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr in names and is_distributed(spelled(node.value, bound))) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and is_distributed(spelled(node.args[0], bound))
            # a name chosen while it runs may be any
            and (not isinstance(node.args[1], ast.Constant) or node.args[1].value in names)
        ):
            lines.append(node.lineno)
    return sorted(lines)


def spelled(node: ast.expr, bound: dict[str, str]) -> str:
    """Dotted name of an expression with the file's aliases resolved; empty for anything else."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := spelled(node.value, bound)):
        return f"{owner}.{node.attr}"
    return ""


def is_distributed(module: str) -> bool:
    return f"{module}.".startswith("torch.distributed.")


@pytest.mark.parametrize("name", sorted(sources()))
def test_which_call_can_hang_is_answered_by_few_files(name: str) -> None:
    found = lines_with(COLLECTIVES, sources()[name].read_text())
    assert not found or name in COLLECTIVE_FILES, f"{name} calls collectives in lines {found}"


@pytest.mark.parametrize("name", sorted(sources()))
def test_groups_are_made_in_one_file(name: str) -> None:
    found = lines_with(GROUPS, sources()[name].read_text())
    assert not found or name in GROUP_FILES, f"{name} makes groups in lines {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed as whatever\nwhatever.all_reduce(x)",
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch as t\nt.distributed.all_reduce(x)",
        "import torch.distributed\ntorch.distributed.distributed_c10d.all_reduce(x)",
        "from torch import distributed\ndistributed.all_reduce(x)",
        "from torch import distributed as d\ncall = d.all_reduce",
        "from torch.distributed import all_reduce",
        "from torch.distributed import all_reduce as quietly",
        "from torch.distributed.nn import all_reduce",
        "from torch.distributed import *",
        "def f():\n    from torch.distributed import distributed_c10d as c\n    c.all_reduce(x)",
        "import torch.distributed as dist\ngetattr(dist, name)(x)",
    ],
)
def test_collective_is_seen_under_any_name(source: str) -> None:
    assert lines_with(COLLECTIVES, source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.get_rank()",
        "from torch.distributed import ProcessGroup",
        "accelerator.broadcast(x)",
        "torch.broadcast(x)",
        "self.trainer.strategy.barrier()",
        "from torch import gather\nimport torch\ntorch.gather(x, 0, i)",
    ],
)
def test_what_is_no_collective_is_left_alone(source: str) -> None:
    assert not lines_with(COLLECTIVES, source)
