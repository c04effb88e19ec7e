"""The command line of ``doctor``."""

import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    raise NotImplementedError
