"""What one process knows of another: that it has ended, whatever the machine is busy with."""

import fcntl
import os
from pathlib import Path


def hold_or_wait(folder: str) -> None:
    """Hold a lock of this folder until this process ends; wait until the process that holds it has ended."""
    fcntl.flock(os.open(f"{folder}/alive", os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)


def started_at(pid: int) -> str | None:
    """When the process started, in ticks of the machine: a pid is used again. None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # 22 of all, with the two up to the name
