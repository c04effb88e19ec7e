"""Registers, spills, shared memory and widths of every kernel, compiled for GPUs that are not here.

Run ``python -m tests.benchmarks.kernel_resources``, with each version of Triton that is promised: rows of this version
are replaced, the others stay. ``make kernel-resources`` runs both. What it compiles and what has to hold is in
tests/kernels/compiled; the table goes into the README of this folder.
"""

import csv
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton

from tests.benchmarks.kernel_table import CSV, Row, put_into_readme, read
from tests.benchmarks.origin import short_commit
from tests.kernels.compiled.bars import BARS
from tests.kernels.compiled.launches import CASES, compile_cases
from tests.kernels.compiled.resources import TARGETS, Resources


def row(r: Resources, commit: str) -> Row:
    """The numbers of a kernel as a line of the file; loads and stores are the bulk ones."""

    def listed(numbers: dict[int, int] | dict[str, int]) -> str:
        return " ".join(f"{name}x{numbers[name]}" for name in sorted(numbers))  # type: ignore[index]

    return Row(
        r.kernel, r.case, r.target, triton.__version__, r.warps, r.registers, r.spills, r.shared,
        listed(r.widths("load")), listed(r.widths("store")), listed(r.matrix),
        r.matrix.get("wgmma.mma_async", 0), r.atomics, commit,
    )  # fmt: skip


def kept() -> list[dict[str, str]]:
    """Rows of other versions of Triton."""
    return [line for line in read() if line["triton"] != triton.__version__]


def write(lines: Iterable[dict[str, object]]) -> None:
    """Replace the file, in the order of versions and then of the cases."""
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(lines, key=lambda line: tuple(map(int, str(line["triton"]).split(".")))))


def main() -> int:
    """Compile everything, write the rows and the table; returns 1 if a bar is missed."""
    commit = short_commit()
    found = [r for target in TARGETS for r in compile_cases(CASES, target)]
    write([*kept(), *(asdict(row(r, commit)) for r in found)])
    put_into_readme()
    missed = [
        f"{r.target} {r.kernel} ({r.case}): {name}, but {wrong}"
        for r in found
        for name, bar in BARS.items()
        if (wrong := bar(r))
    ]
    print(*missed, f"Triton {triton.__version__}: {len(found)} kernels, {len(missed)} bars missed", sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
