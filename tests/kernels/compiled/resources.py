"""What a kernel needs on a GPU that is not here, read from the code that Triton generates for it.

Kernels are launched by their own launchers on CPU tensors under a driver that only names a target: Triton specialises
and compiles them exactly as it would there and nothing runs, so dtypes, alignments, constants and launch settings are
those of the package. Measuring only; what has to hold is in the tests.
"""

import contextlib
import io
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

__all__ = ["BULK", "SHARED_BYTES", "TARGETS", "WIDE", "Access", "Resources", "compiling_for"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# the most a block may have: CUDA C++ programming guide, table of compute capabilities (163 and 227 KiB); CDNA 3 LDS
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
WIDE = 16  # bytes that one thread moves in one instruction at best (sm_100 has 32 as well)
BULK = 128 * WIDE  # bytes of a block: what 128 threads move in one instruction each, the fewest that are launched


@dataclass(frozen=True)
class Access:
    """Global loads or stores of one place in the source, of one thread.

    Attributes:
        kind: "load" or "store".
        place: "line:column" of the kernel's source, with " from line:column" inside of a function that it calls.
        widths: bytes of an instruction -> how many instructions.
        is_bulk: whether a block moves ``BULK`` bytes and more; less is a number per row, or one for all.
    """

    kind: str
    place: str
    widths: dict[int, int]
    is_bulk: bool

    @property
    def narrowest(self) -> int:
        return min(self.widths)


@dataclass(frozen=True)
class Resources:
    """One kernel, compiled for one target.

    Attributes:
        kernel: name of the function.
        case: which call of an operation launched it first.
        target: key of ``TARGETS``.
        registers: of a thread; on AMD vector and accumulation registers together.
        spills: bytes (NVIDIA) or registers (AMD) that went to memory.
        shared: bytes of a block.
        warps: of a block.
        accesses: global loads and stores by place in the source.
        matrix: instructions of the tensor cores by name.
        atomics: instructions that other blocks can interfere with.
        options: constants and launch settings that the launcher gave by name.
    """

    kernel: str
    case: str
    target: str
    registers: int
    spills: int
    shared: int
    warps: int
    accesses: tuple[Access, ...] = field(repr=False)
    matrix: dict[str, int]
    atomics: int
    options: dict[str, Any] = field(repr=False)

    def widths(self, kind: str) -> Counter[int]:
        """Bytes of an instruction -> number of instructions in bulk accesses of a kind."""
        total: Counter[int] = Counter()
        for access in self.accesses:
            if access.kind == kind and access.is_bulk:
                total.update(access.widths)
        return total


# compiled kernel -> what was found: Triton keeps each in the process as well, and compiles it once
_measured: dict[Any, Resources] = {}


class _Named:
    """A driver that names its target and runs nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_device(self) -> str:
        return self.name  # kernels are cached per device: one per target

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]


@contextlib.contextmanager
def compiling_for(target: str, case: str, found: dict[Any, Resources]) -> Iterator[None]:
    """Kernels launched inside are compiled for ``target`` and measured; outputs stay as they were allocated.

    Args:
        target: key of ``TARGETS``.
        case: name of what is called inside.
        found: filled with one entry per compiled kernel; one that an earlier case had compiled alike keeps its name.
    """
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel not in _measured:
            _measured[kernel] = measure(kernel, self, case, target, log.getvalue(), dict(kwargs))
        found[kernel] = _measured[kernel]
        return kernel

    with contextlib.ExitStack() as undo:
        # a kernel of the disk's cache comes without the log of ptxas
        undo.enter_context(_set(knobs.compilation, always_compile=True))
        undo.enter_context(_set(knobs.nvidia, dump_ptxas_log=True))
        undo.enter_context(_set(JITFunction, run=compile_only))
        undo.callback(driver.set_active, driver._active)
        driver.set_active(_Named(target))
        yield


@contextlib.contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def measure(
    kernel: Any, source: JITFunction, case: str, target: str, ptxas_log: str, options: dict[str, Any]
) -> Resources:
    """Read a compiled kernel's code and the log of its assembler."""
    if "ptx" in kernel.asm:
        code, pattern = kernel.asm["ptx"], r"wgmma\.mma_async|tcgen05\.mma|mma\.sync"
        registers = _largest(r"Used (\d+) registers", ptxas_log)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_log)))
        atomics = len(re.findall(r"\b(?:atom|red)\.", code))
    else:
        code, pattern = kernel.asm["amdgcn"], r"v_mfma"
        # on CDNA 3 one file holds both kinds, and the count of vector registers spans it
        registers = _largest(r"\.vgpr_count:\s*(\d+)", code)
        spills = sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)))
        atomics = len(re.findall(r"(?:global|flat|buffer)_atomic", code))
    return Resources(
        kernel=source.fn.__name__,
        case=case,
        target=target,
        registers=registers,
        spills=spills,
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        accesses=tuple(accesses(code, kernel.asm["ttir"])),
        matrix=dict(Counter(re.findall(pattern, code))),
        atomics=atomics,
        options=options,
    )


def _largest(pattern: str, text: str) -> int:
    found = [int(number) for number in re.findall(pattern, text)]
    assert found, f"no {pattern!r} from Triton {triton.__version__}: {text[-400:]}"
    return max(found)


_LOC = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)\s+(\d+)")
_CALLER = re.compile(r"inlined_at \d+ (\d+) (\d+)|@\[ [^\]]*?:(\d+):(\d+) ")
_PTX = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_PTX_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S*\s+\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-f]+|\d+)")
_AMD = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "sshort": 2}


def accesses(code: str, ttir: str) -> list[Access]:
    """Global loads and stores of PTX or AMD code, gathered by the place that ``.loc`` names before."""
    place, in_assembly, found = "", False, dict[tuple[str, str], Counter[int]]()
    for text in code.splitlines():
        if "// begin inline asm" in text:
            in_assembly, named = True, False
        elif "// end inline asm" in text:
            in_assembly = False
        elif loc := _LOC.match(text):
            # LLVM counts on for every line inside: the first is the place
            if not in_assembly or not named:
                place = ":".join(loc.groups())
                if caller := _CALLER.search(text):
                    place += " from " + ":".join(filter(None, caller.groups()))
            named = True
        elif access := _access(text):
            kind, width = access
            found.setdefault((kind, place), Counter())[width] += 1
    known = sizes(ttir)
    bulk = {place for place, size in known.items() if size >= BULK}
    # a loop of one pass may leave its loads at the place of an address: all such places stand for the one that is lost
    strays = {place for _, place in found} - known.keys()
    lost = bulk - {place for _, place in found}
    assert not lost or strays, f"no loads or stores were found for {lost} of the source"
    bulk |= strays if lost else set()
    return [Access(kind, place, dict(widths), place in bulk) for (kind, place), widths in found.items()]


_LINE = re.compile(r'^(#loc\d*) = loc\("[^"]*":(\d+):(\d+)\)', re.MULTILINE)
_NAMED = re.compile(r'^(#loc\d*) = loc\("[^"]*"\((#loc\d*)\)\)', re.MULTILINE)
_CALL = re.compile(r"^(#loc\d*) = loc\(callsite\((#loc\d*) at (#loc\d*)\)\)", re.MULTILINE)
_MOVED = re.compile(r"tt\.(?:load|store) .*: tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>> loc\((#loc\d*)\)")


def sizes(ttir: str) -> dict[str, int]:
    """Bytes that a block moves at each place in the source, from Triton's own code."""
    lines = {name: f"{line}:{column}" for name, line, column in _LINE.findall(ttir)}
    named, calls = dict(_NAMED.findall(ttir)), {name: (inner, outer) for name, inner, outer in _CALL.findall(ttir)}

    def place_of(name: str) -> str:
        if name in calls:
            inner, outer = map(place_of, calls[name])
            # the code names the nearest caller alone
            return f"{inner} from {outer.partition(' ')[0]}" if " " not in inner else inner
        return lines[name] if name in lines else place_of(named[name])

    found: dict[str, int] = {}
    for shape, bits, name in _MOVED.findall(ttir):
        place = place_of(name)
        found[place] = max(found.get(place, 0), math.prod(map(int, shape.split("x"))) * int(bits) // 8)
    return found


def _access(text: str) -> tuple[str, int] | None:
    if match := _PTX.search(text):
        return ("load" if match[1] == "ld" else "store"), int(match[2] or 1) * int(match[3]) // 8
    if match := _PTX_ASYNC.search(text):
        return "load", int(match[1], 0)
    if match := _AMD.search(text):
        name = match[2].replace("lds_", "")
        return match[1], _AMD_BYTES.get(name, _AMD_BYTES.get(name.split("_")[0], 1))
    return None
