"""The command line of ``doctor``."""

import argparse
import sys
from importlib import import_module

from lightning_moeclip.diagnosis.doctor_versions import compromised
from lightning_moeclip.diagnosis.findings import Diagnosis, Finding, line_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, when all are made")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the job (of the launch, the GPUs, or 2)")
    parser.add_argument("--expert-parallel-size", type=int, metavar="K", help="of the job (what suits the links)")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code.

    Raises:
        ValueError: numbers that do not go together.
    """
    findings: list[Finding] = []
    is_shown = True
    # a compromised release is not imported, not even to look at the rest
    found = compromised() or None
    if found is None:
        doctor, launches = (import_module(f"lightning_moeclip.diagnosis.{m}") for m in ("doctor", "current_launch"))
        launch = launches.current_launch()
        is_shown = launch is None or launch.rank == 0
        found = doctor.examine(world_size=args.world_size, expert_parallel_size=args.expert_parallel_size)
    for finding in found:
        findings.append(finding)
        if is_shown and not args.json:
            print(line_of(finding, color=sys.stdout.isatty()), flush=True)
    diagnosis = Diagnosis(tuple(findings))
    if is_shown and args.json:
        print(diagnosis.to_json())
    return 0 if diagnosis.ok else 1
