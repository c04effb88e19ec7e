"""What the ring keeps and refuses: bounds in bytes, damage, values that are not finite, tensors of every layout."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from lightning_moeclip.state.host_copy import HostCopy
from lightning_moeclip.state.snapshot import LiveState, NotFinite, SnapshotRing, live_state
from lightning_moeclip.state.word_sums import MODULUS, device_sum, in_threads, sum_words
from tests.state.timeline import bits


def state_of(**tensors: Tensor) -> LiveState:
    return LiveState({f"parameters/{name}": tensor for name, tensor in tensors.items()}, {})


def ring_of(live: LiveState, tensor: Tensor, steps: int, **arguments: Any) -> SnapshotRing:
    """Snapshots of steps 0, 1, ..., in each of which the tensor is full of the step's number."""
    ring = SnapshotRing(**{"max_bytes": 2**20, **arguments})
    for step in range(steps):
        tensor.fill_(step)
        ring.take(live, step=step)
    return ring


def flip_a_bit(ring: SnapshotRing, place: int, *, byte: int = 9) -> None:
    ring._snapshots[place].values.buffer[byte] ^= 4


def odd_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    base = torch.randn(40)
    with torch.inference_mode():
        made_in_validation = torch.randn(3)
    return {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(3, 5).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every_second": base[:20:2],
        "odd_offset": base[21:30],
        "columns": torch.randn(4, 6)[:, 1:4],
        "expanded": torch.randn(3, 1).expand(3, 7),
        "bfloat16": torch.randn(5, dtype=torch.bfloat16),
        "float16": torch.full((9,), 6e4, dtype=torch.float16),  # whose sum overflows
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "float64": torch.randn(3, dtype=torch.float64),
        "complex64": torch.randn(3, dtype=torch.complex64),
        "int64": torch.tensor([2**62, -1, 3]),
        "uint8": torch.tensor([1, 2, 255], dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "made_in_validation": made_in_validation,
        "large": torch.randn(150_001),  # several parts, and half a word
        "large bfloat16": torch.randn(9_999, dtype=torch.bfloat16),
        "large float64": torch.randn(3_000, dtype=torch.float64),
        "large channels_last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "large columns": torch.randn(100, 100)[:, 1:80],
        "large odd_offset": torch.randn(9_000)[1:],
        "large int8": torch.randint(-128, 127, (70_003,), dtype=torch.int8),
    }


def overwrite(tensor: Tensor) -> None:
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.zero_()
    elif tensor.numel():
        tensor.as_strided(*(_memory_of(tensor))).zero_()


def _memory_of(tensor: Tensor) -> tuple[list[int], tuple[int, ...]]:
    return [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)], tensor.stride()


def test_tensors_of_every_layout_and_dtype_go_back_in_place() -> None:
    tensors = odd_tensors()
    live, kept = LiveState({f"buffers/{n}": t for n, t in tensors.items()}, {}), bits(tensors)
    ring = SnapshotRing(max_bytes=2**22)
    ring.take(live, step=1)
    for _ in range(2):
        for tensor in tensors.values():
            overwrite(tensor)
        assert bits(tensors) != kept
        ring.restore(live)
        assert bits(tensors) == kept


def test_strides_may_change_between_snapshot_and_restore() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    kept = image.clone()
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(state_of(image=image), step=1)
    other = torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ring.restore(state_of(image=other))
    assert torch.equal(other, kept)


def test_the_oldest_goes_and_its_buffer_is_used_again() -> None:
    tensor = torch.zeros(100)
    live = state_of(tensor=tensor)
    ring = ring_of(live, tensor, 2)
    size, buffers = ring.num_bytes, {kept.values.buffer.data_ptr() for kept in ring._snapshots}
    for step in range(2, 7):
        tensor.fill_(step)
        ring.take(live, step=step)
        assert {kept.values.buffer.data_ptr() for kept in ring._snapshots} == buffers
    assert (ring.steps, ring.num_bytes, size) == ((5, 6), 2 * 400, 2 * 400)
    assert ring.restore(live, step=5) == 5
    assert tensor.unique().tolist() == [5.0]
    ring.drop(6)
    assert ring.steps == (5,)
    ring.take(live, step=5)
    assert ring.steps == (5,)


@pytest.mark.parametrize(("size", "byte"), [(10, 39), (150_001, 0), (150_001, 524_288), (150_001, 600_003)])
def test_a_flipped_bit_is_found_and_the_next_older_snapshot_is_taken(size: int, byte: int) -> None:
    tensor = torch.zeros(size)
    live = state_of(tensor=tensor)
    ring = ring_of(live, tensor, 3, depth=3, max_bytes=2**22)
    flip_a_bit(ring, 2, byte=byte)
    assert ring.restore(live) == 1
    assert tensor.unique().tolist() == [1.0]
    assert ring.steps == (0, 1)


def test_when_all_are_damaged_nothing_is_changed_and_the_error_tells_of_each() -> None:
    tensor = torch.zeros(10)
    live = state_of(tensor=tensor)
    ring = ring_of(live, tensor, 2)
    flip_a_bit(ring, 0)
    flip_a_bit(ring, 1)
    tensor.fill_(7)
    with pytest.raises(
        RuntimeError,
        match=r"no snapshot to go back to: that of step 1 was damaged in memory \(parameters/tensor\); that of step 0 "
        r"was damaged.*Resume from a checkpoint",
    ):
        ring.restore(live)
    assert tensor.unique().tolist() == [7.0]
    assert ring.steps == ()


def test_verify_drops_the_damaged_ones_only() -> None:
    tensor = torch.zeros(10)
    ring = ring_of(state_of(tensor=tensor), tensor, 3, depth=3)
    flip_a_bit(ring, 1)
    assert ring.verify() == (0, 2)
    assert ring.steps == (0, 2)


def test_every_bit_counts_in_the_last_incomplete_word_too() -> None:
    tensor = torch.arange(13, dtype=torch.uint8)
    live = state_of(tensor=tensor)
    for place in range(13):
        ring = SnapshotRing(max_bytes=2**20)
        ring.take(live, step=0)
        ring._snapshots[0].values.buffer[place] ^= 128
        assert ring.verify() == ()


def test_a_tensor_that_does_not_hold_what_was_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(4)
    live = state_of(tensor=tensor)
    ring = ring_of(live, tensor, 1)
    restore = HostCopy.restore

    def restore_and_slip(self: HostCopy, tensors: dict[str, Tensor]) -> list[str]:
        other = {name: value.clone() for name, value in tensors.items()}
        found = restore(self, other)
        assert not found
        tensor.fill_(3)
        return self._different(self._sums_of(tensors))

    monkeypatch.setattr(HostCopy, "restore", restore_and_slip)
    with pytest.raises(RuntimeError, match="step 0 was not what the tensors hold after it was copied back"):
        ring.restore(live)


def test_without_a_snapshot_it_says_so() -> None:
    live = state_of(tensor=torch.zeros(2))
    with pytest.raises(RuntimeError, match="no snapshot to go back to: none was taken"):
        SnapshotRing(max_bytes=100).restore(live)
    ring = ring_of(live, live.tensors["parameters/tensor"], 1)
    with pytest.raises(ValueError, match=r"step=3 has no snapshot. Restore one of \[0\]"):
        ring.restore(live, step=3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [10, 150_001])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_that_is_not_finite_is_refused_and_the_last_snapshot_stays(
    value: float, dtype: torch.dtype, size: int, depth: int
) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    live = state_of(fine=torch.ones(2), tensor=tensor)
    ring = ring_of(live, tensor, 2, depth=depth, max_bytes=2**22)
    tensor[-1] = value
    with pytest.raises(NotFinite, match="No snapshot of step 2: parameters/tensor not finite") as caught:
        ring.take(live, step=2)
    assert caught.value.names == ("parameters/tensor",)
    assert ring.verify()[-1:] == (1,)
    ring.restore(live)
    assert tensor.unique().tolist() == [1.0]


def test_large_values_are_finite_though_their_sum_is_not() -> None:
    ring = SnapshotRing(max_bytes=2**22)
    ring.take(state_of(small=torch.full((10,), 3e38), large=torch.full((9_000,), -3e38)), step=1)
    assert ring.steps == (1,)


@pytest.mark.parametrize("length", [0, 1, 8, 4_099])
def test_the_checksum_of_a_device_is_that_of_the_host(length: int) -> None:
    torch.manual_seed(0)
    memory = torch.randint(0, 256, (length + 3,), dtype=torch.uint8)[3:]
    assert int(device_sum(memory)) % MODULUS == sum_words(memory)


@pytest.mark.parametrize("kind", ["buffers", "averages"])
def test_buffers_may_hold_infinities_as_masks_do_and_no_nan(kind: str) -> None:
    mask = torch.tensor([0.0, -torch.inf, torch.inf])
    live = LiveState({f"{kind}/mask": mask, "optimizer_state/moment": torch.tensor(torch.nan)}, {})
    ring = SnapshotRing(max_bytes=1000)
    ring.take(live, step=1)
    mask[0] = torch.nan
    with pytest.raises(NotFinite, match=f"{kind}/mask"):
        ring.take(live, step=2)


def test_a_copy_that_fails_leaves_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(10)
    live = state_of(tensor=tensor)
    ring = ring_of(live, tensor, 2)

    def fail(self: HostCopy, tensors: object, **_: object) -> None:
        raise RuntimeError("out of something")

    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "fill", fail)
        with pytest.raises(RuntimeError, match="out of something"):
            ring.take(live, step=2)
    assert ring.verify() == (1,)

    def refuse() -> None:
        raise RuntimeError("no state")

    with pytest.raises(RuntimeError, match="no state"):
        ring.take(LiveState(live.tensors, {"broken": (refuse, lambda _: None)}), step=3)
    assert ring.verify() == (1,)


def moments(step: int) -> LiveState:
    """A model whose optimizer has no state before its first step: 512 bytes, then 512 + 1024 + 8."""
    parameter = nn.Parameter(torch.zeros(128))
    optimizer = AdamW([parameter])
    module = nn.ParameterList([parameter])
    if step:
        parameter.sum().backward()
        optimizer.step()
    return live_state(module, [optimizer])


def test_larger_than_the_bound_is_refused_with_the_numbers() -> None:
    ring = SnapshotRing(max_bytes=1100)
    ring.take(moments(0), step=0)
    with pytest.raises(
        ValueError,
        match=r"takes 1,544 bytes of host memory \(parameters 512, optimizer_state 1,032\), and max_bytes=1,100 allows "
        r"less. Write CosineRollback\(max_snapshot_bytes=1544\) for one snapshot, 3088 for 2, or leave",
    ):
        ring.take(moments(1), step=1)
    assert ring.steps == (0,)


def test_fewer_are_kept_when_no_more_fit_with_one_warning() -> None:
    ring = SnapshotRing(max_bytes=3300, depth=3)
    ring.take(moments(0), step=0)
    with pytest.warns(UserWarning, match=r"allows 2 of the 3 that were asked for. .*max_snapshot_bytes=4632\)"):
        ring.take(moments(1), step=1)
    assert ring.steps == (0, 1)
    for step in (2, 3):  # a second warning would be an error
        ring.take(moments(1), step=step)
        assert ring.num_bytes <= 3300
    assert ring.steps == (2, 3)


def test_snapshots_of_before_and_after_the_first_step_share_the_ring() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = AdamW([parameter])
    module = nn.ParameterList([parameter])
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(live_state(module, [optimizer]), step=0)
    parameter.sum().backward()
    optimizer.step()
    ring.take(live_state(module, [optimizer]), step=1)
    assert ring.restore(live_state(module, [optimizer]), step=0) == 0
    assert not optimizer.state
    assert ring.restore(live_state(module, [optimizer])) == 1
    assert optimizer.state[parameter]["step"] == 1


def test_half_of_the_memory_is_shared_by_the_ranks_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lightning_moeclip.state.snapshot._CGROUP_LIMITS", (str(tmp_path / "max"),))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert SnapshotRing().max_bytes == total // 2
    assert SnapshotRing(ranks_per_node=4).max_bytes == total // 2 // 4
    (tmp_path / "max").write_text("max\n")
    assert SnapshotRing().max_bytes == total // 2
    (tmp_path / "max").write_text("1000\n")
    assert SnapshotRing().max_bytes == 500
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(ValueError, match=r"does not tell how much memory.*CosineRollback\(max_snapshot_bytes="):
        SnapshotRing()


@pytest.mark.parametrize("arguments", [{"max_bytes": 0}, {"depth": 0}, {"depth": 1.5}, {"ranks_per_node": -1}])
def test_numbers_below_one_are_refused(arguments: dict[str, Any]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match=rf"SnapshotRing\({name}={value}\) must be an integer from 1. Leave it out"):
        SnapshotRing(**arguments)


def test_parameters_that_were_added_since_are_told_and_the_next_snapshot_drops_the_old_ones() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = SGD(module[0].parameters(), lr=0.1)
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(live_state(module, [optimizer]), step=0)
    optimizer.add_param_group({"params": list(module[1].parameters())})
    other = SnapshotRing(max_bytes=2**20)
    other._snapshots = list(ring._snapshots)
    ring.take(live_state(module, [optimizer]), step=1)
    assert ring.steps == (1,)
    with pytest.raises(
        RuntimeError, match=r"that of step 0 was taken without optimizer 0, group 1: 1.weight, 1.bias. Resume"
    ):
        other.restore(live_state(module, [optimizer]))


def test_another_shape_is_told() -> None:
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(state_of(tensor=torch.zeros(4)), step=0)
    with pytest.raises(
        RuntimeError, match=r"taken without parameters/tensor \[2\] torch.float32 and with parameters/tensor \[4\]"
    ):
        ring.restore(state_of(tensor=torch.zeros(2)))


def test_the_state_of_a_scheduler_is_not_loaded_into_one_of_another_class() -> None:
    layer = nn.Linear(2, 2)
    optimizer = SGD(layer.parameters(), lr=0.1)
    first, second = StepLR(optimizer, 3), ExponentialLR(optimizer, 0.5)
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(live_state(layer, [optimizer], schedulers=[first]), step=0)
    live = live_state(layer, [optimizer], schedulers=[second])
    kept = second.state_dict()
    lines = r"without scheduler 0 of torch\..*\.ExponentialLR and with scheduler 0 of torch\..*\.StepLR"
    with pytest.raises(RuntimeError, match=lines):
        ring.restore(live)
    assert second.state_dict() == kept


def test_work_is_shared_out_to_as_many_threads_as_torch_has_and_comes_back_in_order() -> None:
    before = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            barrier = threading.Barrier(number, timeout=20)
            found = in_threads(lambda i, wait=barrier.wait: (i, wait(), threading.get_ident()), list(range(number)))
            assert [i for i, *_ in found] == list(range(number))
            assert len({ident for *_, ident in found}) == number
            assert in_threads(str, []) == []
    finally:
        torch.set_num_threads(before)
