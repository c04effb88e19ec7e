"""Many gloo ranks in one test, for our tests and for those of projects that use the package."""

from lightning_moeclip.testing.on_ranks import Rank, on_ranks

__all__ = ["Rank", "on_ranks"]
