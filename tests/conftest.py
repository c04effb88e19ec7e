"""No test leaves a process group or an environment behind for the next one."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

# every connection to a TCP store looks up the name of its peer, and glibc waits 5 s for an answer that got lost: with
# thousands of connections some do. Read by this process and all that it starts, before their first lookup.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = dict(os.environ)
    yield
    # a Trainer on one device makes both and keeps them for the life of the process
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
