"""Every kernel of the package, as its launcher launches it, on every target; and no kernel is left out."""

import ast

import pytest

from tests.kernels.compiled.bars import BARS, multiplies
from tests.kernels.compiled.launches import FOLDER, MODULES, OPERATIONS, compiled
from tests.kernels.compiled.resources import TARGETS


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_on_each_target(target: str, operation: str, bar: str) -> None:
    found = compiled(operation, target)
    assert found
    missed = [f"{r.kernel} ({r.case}): {wrong}" for r in found if (wrong := BARS[bar](r))]
    assert not missed, "\n".join(missed)


def jitted(source: str) -> dict[str, set[str]]:
    """Functions under ``triton.jit``, each with the names that it mentions."""
    return {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }


def test_no_kernel_is_left_out() -> None:
    launched = {r.kernel for operation in OPERATIONS for r in compiled(operation, "sm_90")}
    for module in MODULES:
        functions = jitted((FOLDER / f"{module}.py").read_text())
        inner = {name for mentioned in functions.values() for name in mentioned} & functions.keys()
        assert functions.keys() - inner <= launched, module
