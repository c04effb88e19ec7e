"""Copies from and to devices: what cannot be waited for is blocking, and a refused pinning leaves no error behind."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moeclip.state import host_copy
from lightning_moeclip.state.host_copy import HostCopy, places_of


class Copies(TorchDispatchMode):
    """Notes which copies may return before their values have arrived; those of device "meta" have none."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default):
            self.non_blocking.append(bool(args[2]) if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
            return args[0] if func is torch.ops.aten.copy_.default else None
        return func(*args, **(kwargs or {}))


def test_copies_of_a_device_that_is_not_waited_for_are_blocking() -> None:
    tensors = {"small": torch.empty(3, device="meta"), "large": torch.empty(5_000, device="meta")}
    copy = HostCopy(tensors, places_of(tensors))
    for use in (copy.fill, copy.restore):
        # the checksums of "meta" cannot be read, after the copies
        with Copies() as copies, pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            use(tensors)
        assert copies.non_blocking[:2] == [False, False]


def test_copies_of_cuda_tensors_do_not_wait_for_each_other() -> None:
    assert host_copy._is_awaited(torch.device("cuda", 1))
    # step counters of an optimizer lie on the host beside them
    assert host_copy._is_awaited(torch.device("cpu"))


class Runtime:
    """CUDA that remembers the last error until somebody asks."""

    def __init__(self, code: int) -> None:
        self.code, self.last_error = code, 0
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.last_error = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.unregistered.append(address)

    def launch(self, size: int, *, device: torch.device) -> None:
        """A kernel, and the check after it."""
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


@pytest.mark.parametrize("code", [0, 2])
def test_a_refused_pinning_leaves_no_error_for_the_next_kernel(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, device = Runtime(code), torch.device("cuda", 0)
    buffer: Tensor | None = torch.zeros(64, dtype=torch.uint8)
    address = buffer.data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch, "ones", runtime.launch)
        host_copy._pin(buffer, device)
    runtime.launch(1, device=device)
    del buffer
    gc.collect()
    assert runtime.unregistered == ([] if code else [address])
