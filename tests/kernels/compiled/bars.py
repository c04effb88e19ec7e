"""What has to hold of every kernel on every target: each bar returns what is wrong, or nothing."""

from collections.abc import Callable

from tests.kernels.compiled.resources import SHARED_BYTES, WIDE, Resources

__all__ = ["BARS"]


def _spills(r: Resources) -> str:
    return f"{r.spills} spilled" if r.spills else ""


def _shared(r: Resources) -> str:
    limit = SHARED_BYTES[r.target]
    return f"{r.shared} bytes of shared memory, {limit} exist" if r.shared > limit else ""


def _width(r: Resources) -> str:
    if "ragged" in r.case:
        return ""  # rows of a ragged length are not aligned
    narrow = [access for access in r.accesses if access.is_bulk and access.narrowest < WIDE]
    return ", ".join(f"{access.kind} in {access.place} by {access.widths} (bytes: instructions)" for access in narrow)


def _atomics(r: Resources) -> str:
    return f"{r.atomics} atomics" if r.atomics else ""


def _fusion(r: Resources) -> str:
    # whether a * b + c is rounded once is said by the launcher: Triton 3.10 turns its default around
    return "" if "enable_fp_fusion" in r.options else "launched without enable_fp_fusion"


def _matrix(r: Resources) -> str:
    if r.target != "sm_90" or not set(r.matrix) - {"wgmma.mma_async"}:
        return ""
    return f"multiplies by {r.matrix} and not by warp groups"


BARS: dict[str, Callable[[Resources], str]] = {
    "nothing is spilled": _spills,
    "shared memory fits": _shared,
    "bulk loads and stores take 16 bytes": _width,
    "no atomics": _atomics,
    "fusion of products and sums is chosen": _fusion,
    "products on sm_90 are of warp groups": _matrix,
}
