"""Where a figure comes from: this checkout, its commit and the device. Needs torch alone."""

import os
import subprocess
from pathlib import Path

import torch

__all__ = ["RESULTS", "ROOT", "device_name", "is_dirty", "short_commit"]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "benchmarks" / "results"


def device_name() -> str:
    """The accelerator, or the number of CPUs that ranks share."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu x {os.cpu_count()}"


def short_commit() -> str:
    """The commit of this checkout, marked when files differ from it."""
    found = _git("rev-parse", "--short", "HEAD")
    return f"{found}-dirty" if is_dirty() else found


def is_dirty() -> bool:
    """Whether files other than results differ from the commit."""
    changed = _git(
        "status",
        "--porcelain",
        "--untracked-files=all",
        "--",
        ".",
        ":!tests/benchmarks/results",
        ":!tests/benchmarks/README.md",
    )
    return bool(changed)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
