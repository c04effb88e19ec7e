"""Waits for what another process or thread has done, however busy the machine is."""

import fcntl
import os
import time
from collections.abc import Callable


def hold_or_wait(folder: str) -> None:
    """Hold a lock of this folder until this process ends; wait until the process that holds it has ended."""
    fcntl.flock(os.open(f"{folder}/alive", os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
