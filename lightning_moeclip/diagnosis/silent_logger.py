"""A logger that takes everything and writes nothing, for modules that use the one of their Trainer."""

from typing import Any

from typing_extensions import override

from lightning_moeclip.binding import pl

__all__ = ["SilentLogger"]


class _Anything:
    """Whatever a logger's own object may be asked for: each attribute, item and call is this again."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self

    def __getitem__(self, key: Any) -> "_Anything":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class SilentLogger(pl.loggers.Logger):  # type: ignore[misc, name-defined, unused-ignore]
    """Takes everything and writes nothing.

    Args:
        folder: of ``save_dir``, where a module may write by itself.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def experiment(self) -> Any:
        """What a module calls by its own names, such as ``add_scalar``."""
        return _Anything()

    @property
    @override
    def save_dir(self) -> str:
        return self._folder

    @property
    @override
    def name(self) -> str:
        return "verify"

    @property
    @override
    def version(self) -> str:
        return "0"

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Anything()
