"""What a snapshot makes of tensors that are no plain real ones, and of memory that runs out."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor

from lightning_moeclip.state import host_copy
from lightning_moeclip.state.digest import joint_digest, tensor_digest
from lightning_moeclip.state.finite import not_finite
from lightning_moeclip.state.snapshot import LiveState, SnapshotRing, live_state
from tests.state.timeline import bits

pytestmark = pytest.mark.filterwarnings("ignore:Sparse ", "ignore:torch.quantize_per_tensor")


def complex_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {"odd": torch.ones(1)}  # what comes next begins after half a word
    for dtype in (torch.complex64, torch.complex128):
        for size in (1, 3, 3_001):
            found[f"{dtype} {size}"] = torch.randn(size, dtype=dtype, generator=generator)
            found[f"between {dtype} {size}"] = torch.ones(1)
        found[f"conjugate {dtype}"] = torch.randn(3, dtype=dtype, generator=generator).conj()
        found[f"large conjugate {dtype}"] = torch.randn(3_001, dtype=dtype, generator=generator).conj()
        found[f"negative {dtype}"] = torch.randn(3, dtype=dtype, generator=generator).conj().imag
    return found


def test_complex_tensors_of_both_widths_go_back_in_place_beside_others() -> None:
    tensors = complex_tensors()
    live, kept = LiveState({f"parameters/{n}": t for n, t in tensors.items()}, {}), values_of(tensors)
    ring = SnapshotRing(max_bytes=2**22)
    ring.take(live, step=1)
    for tensor in tensors.values():
        tensor.zero_()
    assert values_of(tensors) != kept
    assert ring.restore(live) == 1
    assert values_of(tensors) == kept
    assert ring.verify() == (1,)


def values_of(tensors: dict[str, Tensor]) -> Any:
    return bits({name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("size", [3, 5_001])
def test_digest_and_finite_see_either_part_of_a_complex_element(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    before = int(tensor_digest(tensor)), int(joint_digest([tensor], device=tensor.device))
    assert int(tensor_digest(tensor.conj().conj_physical())) == before[0]
    assert int(tensor_digest(tensor.conj())) != before[0]
    for part in (0, 1):
        changed = tensor.clone()
        number = torch.view_as_real(changed)[2, part]
        number.copy_(torch.nextafter(number, number + 1))
        after = int(tensor_digest(changed)), int(joint_digest([changed], device=tensor.device))
        assert all(a != b for a, b in zip(before, after, strict=True))
        number.fill_(torch.nan)
        assert not_finite({"parameters/a": tensor, "buffers/b": changed}, ["parameters/a", "buffers/b"]) == [
            "buffers/b"
        ]


class Sparse(nn.Module):
    """A buffer of every sparse layout."""

    def __init__(self) -> None:
        super().__init__()
        eye = torch.eye(4)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("coo", eye.to_sparse())
        self.register_buffer("twice", torch.sparse_coo_tensor([[1, 1], [0, 0]], [1.0, 2.0], (4, 4)))
        self.register_buffer("csr", eye.to_sparse_csr())
        self.register_buffer("csc", eye.to_sparse_csc())
        self.register_buffer("bsr", eye.to_sparse_bsr((2, 2)))
        self.register_buffer("bsc", eye.to_sparse_bsc((2, 2)))

    @property
    def inside(self) -> dict[str, Tensor]:
        found = {}
        for name, buffer in self.named_buffers():
            is_coo = buffer.layout == torch.sparse_coo
            found[name] = buffer._values() if is_coo else buffer.values()
            if is_coo:
                found[f"{name} indices"] = buffer._indices()
        return found


def test_sparse_buffers_of_every_layout_go_back_in_place_coalesced_or_not() -> None:
    module = Sparse()
    optimizer = SGD(module.parameters(), 0.1)
    kept, ring = bits(module.inside), SnapshotRing(max_bytes=2**20)
    ring.take(live_state(module, [optimizer]), step=1)
    dense = {name: buffer.to_dense() for name, buffer in module.named_buffers()}
    for tensor in module.inside.values():
        tensor.zero_()
    ring.restore(live_state(module, [optimizer]))
    assert bits(module.inside) == kept
    assert all(torch.equal(buffer.to_dense(), dense[name]) for name, buffer in module.named_buffers())
    assert [module.coo.is_coalesced(), module.twice.is_coalesced()] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda old: torch.eye(5).to_sparse(),
        lambda old: torch.ones(4, 4).to_sparse(),
        lambda old: torch.sparse_coo_tensor(old._indices(), old._values(), (4, 4)),
    ],
    ids=["shape", "elements", "coalesced"],
)
def test_snapshot_of_a_sparse_buffer_of_another_form_is_not_restored(change: Any) -> None:
    module = Sparse()
    ring = SnapshotRing(max_bytes=2**20)
    ring.take(live_state(module, []), step=1)
    module.coo = change(module.coo)
    with pytest.raises(RuntimeError, match=r"that of step 1 was taken without buffers/coo \(sparse_coo \["):
        ring.restore(live_state(module, []))


def test_nan_in_a_sparse_buffer_is_not_kept() -> None:
    module = Sparse()
    module.csr.values()[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"buffers/csr \(sparse_csr \[4, 4\]\) values not finite"):
        SnapshotRing(max_bytes=2**20).take(live_state(module, []), step=1)


UNFIT = {
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a tensor on the meta device": lambda: torch.empty(3, device="meta"),
    "a tensor of torch._mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "a TwoTensor": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
}


@pytest.mark.parametrize("what", list(UNFIT))
def test_buffer_without_memory_of_its_own_is_refused_by_name(what: str) -> None:
    module = nn.Module()
    module.register_buffer("odd", UNFIT[what]())
    message = rf"buffers/odd is {re.escape(what)}.*bit by bit.*Hold it in plain tensors.*int_repr\(\)"
    with pytest.raises(TypeError, match=message):
        live_state(module, [])


def test_sparse_optimizer_state_is_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    optimizer = SGD(module.parameters(), 0.1)
    optimizer.state[module.bias]["touched"] = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match=r"optimizer_state/0: bias\.touched is a tensor of torch\.sparse_coo"):
        live_state(module, [optimizer])


HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: ...")
DEVICE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")


@pytest.mark.parametrize(
    ("function", "error", "kind"),
    [
        ("empty", HOST, "host"),  # of the buffer
        ("empty_strided", HOST, "host"),  # of a copy in order, of a tensor that does not lie so
        ("empty_strided", DEVICE, "device"),
    ],
)
def test_memory_that_runs_out_is_one_error_with_the_bytes(
    monkeypatch: pytest.MonkeyPatch, function: str, error: Exception, kind: str
) -> None:
    real = getattr(torch, function)

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "meta":
            return real(*args, **kwargs)
        raise error

    live, ring = LiveState({"parameters/a": torch.ones(100, 100)[:, 1:]}, {}), SnapshotRing(max_bytes=2**20)
    told = rf"no {kind} memory for the 39,616 bytes of a snapshot.*CosineRollback\(max_snapshot_bytes=39616\).*leave"
    with monkeypatch.context() as patch:
        patch.setattr(host_copy.torch, function, refuse)
        with pytest.raises(MemoryError, match=told):
            ring.take(live, step=1)
    assert ring.steps == ()
    ring.take(live, step=1)
    assert ring.steps == (1,)


def test_another_error_of_the_copy_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(host_copy.HostCopy, "fill", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        SnapshotRing(max_bytes=2**20).take(LiveState({"parameters/a": torch.ones(3)}, {}), step=1)
