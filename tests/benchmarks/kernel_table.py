"""The rows of kernel_resources.csv as a table of the README; needs no Triton."""

import csv
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.origin import RESULTS

__all__ = ["CSV", "Row", "put_into_readme", "read", "render", "split"]

CSV = RESULTS / "kernel_resources.csv"
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- kernels: make kernel-resources -->\n", "<!-- end of kernels -->\n"


@dataclass(frozen=True)
class Row:
    """A kernel as compiled for one target by one version; widths and matrix instructions are "name x number"."""

    kernel: str
    case: str
    target: str
    triton: str
    warps: int
    registers: int
    spills: int
    shared_bytes: int
    loads: str
    stores: str
    matrix: str
    wgmma: int
    atomics: int
    commit: str


def read() -> list[dict[str, str]]:
    """All rows of the file."""
    if not CSV.exists():
        return []
    with CSV.open(newline="") as file:
        return list(csv.DictReader(file))


def render() -> str:
    """A line per kernel and case; a cell per target: registers by version, shared memory, narrowest bulk access."""
    rows = read()
    versions = list(dict.fromkeys(line["triton"] for line in rows))
    found: dict[tuple[str, str], dict[tuple[str, str], dict[str, str]]] = {}
    for line in rows:
        found.setdefault((line["kernel"], line["case"]), {})[line["target"], line["triton"]] = line
    targets = list(dict.fromkeys(line["target"] for line in rows))
    lines = [
        f"Registers of a thread with Triton {' / '.join(versions)}, KiB of shared memory of a block, bytes of the "
        "narrowest bulk load and store (0: none), products of warp groups; spilled bytes where there are any.",
        "",
        f"| kernel | case | {' | '.join(targets)} |",
        "|---|---|" + "---|" * len(targets),
    ]
    for (kernel, case), cells in found.items():
        shown = [cell([cells[target, v] for v in versions if (target, v) in cells]) for target in targets]
        lines.append(f"| `{kernel}` | {case} | {' | '.join(shown)} |")
    commits = sorted({f"{line['commit']} (Triton {line['triton']})" for line in rows})
    return "\n".join([*lines, "", f"{len(rows)} rows, compiled at {', '.join(commits)}."]) + "\n"


def cell(rows: list[dict[str, str]]) -> str:
    """One target of a kernel, over versions."""
    if not rows:
        return "as another case"
    widths = "/".join(
        min((width.split("x")[0] for line in rows for width in line[kind].split()), key=int, default="0")
        for kind in ("loads", "stores")
    )
    shared = max(int(line["shared_bytes"]) for line in rows) / 1024
    text = f"{' / '.join(line['registers'] for line in rows)}; {shared:.3g} KiB; {widths}"
    if wgmma := max(int(line["wgmma"]) for line in rows):
        text += f"; {wgmma} wgmma"
    if any(int(line["spills"]) for line in rows):
        text += f"; **spilled {' / '.join(line['spills'] for line in rows)}**"
    return text


def split() -> tuple[str, str, str]:
    """The README before its table, the table, and what follows."""
    before, _, rest = README.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


def put_into_readme() -> None:
    """Write the rendered table between the README's marks."""
    before, _, after = split()
    README.write_text(before + BEGIN + render() + END + after)
