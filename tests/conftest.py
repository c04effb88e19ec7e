"""No test leaves a process group or an environment behind for the next one."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = dict(os.environ)
    yield
    # a Trainer on one device makes both and keeps them for the life of the process
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
