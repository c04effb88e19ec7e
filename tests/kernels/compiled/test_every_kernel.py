"""Every kernel of the package, as its launcher launches it, on every target; and no kernel is left out."""

import ast

import pytest

from tests.kernels.compiled.bars import BARS
from tests.kernels.compiled.launches import FOLDER, OPERATIONS, compiled
from tests.kernels.compiled.resources import TARGETS


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_on_each_target(target: str, operation: str, bar: str) -> None:
    found = compiled(operation, target)
    assert found
    missed = [f"{r.kernel} ({r.case}): {wrong}" for r in found if (wrong := BARS[bar](r))]
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("operation", ["clip", "sigmoid"])
def test_tiles_of_half_precision_are_products_of_warp_groups_on_sm_90(operation: str) -> None:
    of_halves = [r for r in compiled(operation, "sm_90") if "bf16" in r.case and r.kernel != "fold_kernel"]
    assert of_halves
    assert all(set(r.matrix) == {"wgmma.mma_async"} for r in of_halves), of_halves


@pytest.mark.parametrize("operation", ["clip", "sigmoid"])
@pytest.mark.parametrize(
    ("target", "precision"), [("sm_80", "tf32x3"), ("sm_90", "tf32x3"), ("sm_100", "tf32x3"), ("gfx942", "ieee")]
)
def test_tiles_of_float32_never_enter_a_product_as_plain_tf32(operation: str, target: str, precision: str) -> None:
    """Triton's own default, plain tf32, would move a logit of 100 by 0.05."""
    of_float32 = [r for r in compiled(operation, target) if "fp32" in r.case and r.kernel != "fold_kernel"]
    assert of_float32
    assert {r.options["PRECISION"] for r in of_float32} == {precision}


def jitted(source: str) -> dict[str, set[str]]:
    """Functions under ``triton.jit``, each with the names that it mentions."""
    return {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }


def test_no_kernel_is_left_out() -> None:
    launched = {r.kernel for operation in OPERATIONS for r in compiled(operation, "sm_90")}
    functions: dict[str, set[str]] = {}
    for path in FOLDER.glob("*_triton.py"):
        functions |= jitted(path.read_text())
    inner = {name for mentioned in functions.values() for name in mentioned}
    assert functions.keys() - inner
    assert functions.keys() - inner <= launched
