"""What tests of several ranks need: the ranks, and faults to plant; for our tests and those of projects that use us."""

from lightning_moeclip.testing.faults import InjectedFault
from lightning_moeclip.testing.inject import inject
from lightning_moeclip.testing.on_ranks import Rank, on_ranks

__all__ = ["InjectedFault", "Rank", "inject", "on_ranks"]
