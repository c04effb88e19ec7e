"""The command line of ``explain``."""

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    raise NotImplementedError
