"""The bars find a spill, an atomic, too much shared memory, narrow accesses, and nothing in a kernel without fault."""

from collections.abc import Callable

import pytest

from tests.kernels.compiled import faulty
from tests.kernels.compiled.bars import BARS
from tests.kernels.compiled.resources import TARGETS, Resources, accesses, compiling_for, sizes


def compiled(call: Callable[[], None], target: str) -> Resources:
    found: dict[object, Resources] = {}
    with compiling_for(target, call.__name__, found):
        call()
    (only,) = found.values()
    return only


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("call", "missed"),
    [
        (faulty.good, set()),
        (faulty.unaligned, {"bulk loads and stores take 16 bytes"}),
        (faulty.atomic, {"no atomics"}),
        (faulty.left_to_version, {"fusion of products and sums is chosen"}),
    ],
)
def test_a_fault_misses_its_bar_on_every_target(call: Callable[[], None], missed: set[str], target: str) -> None:
    resources = compiled(call, target)
    assert {name for name, bar in BARS.items() if bar(resources)} == missed


@pytest.mark.parametrize(
    ("call", "missed"), [(faulty.spilling, "nothing is spilled"), (faulty.large, "shared memory fits")]
)
def test_a_kernel_beyond_the_device_misses_its_bar(call: Callable[[], None], missed: str) -> None:
    assert BARS[missed](compiled(call, "sm_90"))


def test_accesses_are_gathered_by_place_with_their_bytes() -> None:
    code = """
    .loc 1 7 3
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd2, %rd3 }, [ %rd1 + 16 ];
    // begin inline asm
    .loc 1 9 3
    mov.u32 %r1, %r5;
    .loc 1 10 3
    @%p2 st.global.b16 [ %rd5 + 0 ], { %rs1 };
    // end inline asm
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd4 + 0 ], 0x10, %r6;
    ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r7 ];
    .loc 1 11 3, function_name $L__info_string0, inlined_at 1 20 5
    st.global.b32 [ %rd5 + 0 ], { %r1 };
    .loc 1 11 3 ; file.py:11:3 @[ file.py:21:5 @[ file.py:30:1 ] ]
    global_load_dwordx4 v[0:3], v[4:5], off
    buffer_load_ushort v0, v1, s[0:3], 0 offen
    global_store_dwordx2 v[4:5], v[0:1], off
    """
    ttir = """
    %1 = tt.load %0, %m, %cst : tensor<16x64x!tt.ptr<bf16>> loc(#loc3)
    tt.store %1, %2, %m : tensor<1024x!tt.ptr<f32>> loc(#loc)
    tt.store %1, %2, %m : tensor<16x!tt.ptr<f32>> loc(#loc6)
    #loc = loc("a file.py":9:3)
    #loc1 = loc("a file.py":7:3)
    #loc3 = loc("x"(#loc1))
    #loc4 = loc("a file.py":20:5)
    #loc5 = loc("a file.py":11:3)
    #loc6 = loc(callsite(#loc5 at #loc4))
    """.replace("    #", "#")
    assert sizes(ttir) == {"7:3": 2048, "9:3": 4096, "11:3 from 20:5": 64}
    found = [(a.kind, a.place, a.widths, a.is_bulk) for a in accesses(code, ttir)]
    assert found == [
        ("load", "7:3", {16: 2}, True),
        ("store", "9:3", {2: 1}, True),
        ("load", "9:3", {16: 1}, True),
        ("store", "11:3 from 20:5", {4: 1}, False),
        ("load", "11:3 from 21:5", {16: 1, 2: 1}, False),
        ("store", "11:3 from 21:5", {8: 1}, False),
    ]


def test_loads_that_lost_their_place_are_bulk_where_another_has_none() -> None:
    ttir = """
    %1 = tt.load %0, %m, %cst : tensor<16x64x!tt.ptr<bf16>> loc(#loc)
    #loc = loc("a file.py":9:3)
    """.replace("    #", "#")
    code = ".loc 1 9 {}\nbuffer_load_dwordx2 v[0:1], v1, s[0:3], 0 offen"
    assert [(a.place, a.is_bulk) for a in accesses(code.format(69), ttir)] == [("9:69", True)]
    both = code.format(69) + "\n" + code.format(3)
    assert [(a.place, a.is_bulk) for a in accesses(both, ttir)] == [("9:69", False), ("9:3", True)]
    with pytest.raises(AssertionError, match="no loads or stores were found for"):
        accesses("", ttir)
