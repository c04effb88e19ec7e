"""The rooms import downward only, know no cycles and have no rooms without a name."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_moeclip"

# room -> rooms of ours that it may import, and whether it may import Lightning (through binding.py)
ALLOWED: dict[str, tuple[set[str], bool]] = {
    "kernels": (set(), False),
    "binding": (set(), True),
    "parallel": (set(), False),
    "gradients": ({"parallel", "kernels"}, False),
    "modules": ({"parallel", "kernels"}, False),
    "state": ({"parallel", "gradients"}, False),
    "launch": ({"parallel", "binding"}, True),
    "precision": ({"parallel", "gradients", "state", "binding"}, True),
    "strategy": ({"parallel", "gradients", "state", "launch", "precision", "binding"}, True),
    "testing": ({"parallel", "gradients", "modules", "state", "precision", "strategy", "binding", "kernels"}, True),
    "registry": (set(), False),
    "__init__": ({"registry"}, False),
}
COLLECTIVE_FILES = {
    "gradients/collectives.py",
    "modules/dispatch.py",
    "modules/global_batch.py",  # all exchanges of features and cotangents, for both losses
    "parallel/agreement.py",
    "state/canonical.py",
    "testing/on_ranks.py",
}
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "reduce_scatter_tensor", "gather", "scatter", "monitored_barrier",
    "all_gather_single", "reduce_scatter_single",
}  # fmt: skip


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


@pytest.mark.parametrize("name", sorted(sources()))
def test_which_call_can_hang_is_answered_by_few_files(name: str) -> None:
    if name in COLLECTIVE_FILES:
        return
    for node in ast.walk(ast.parse(sources()[name].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES:
            owner = node.func.value
            assert not (isinstance(owner, ast.Name) and owner.id in {"dist", "distributed"}), f"{name}:{node.lineno}"
