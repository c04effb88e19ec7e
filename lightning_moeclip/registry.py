"""Makes ``Trainer(strategy="moeclip")`` known, without importing Lightning before the user does.

Lightning has no entry point for strategies: an import has to register the name. Importing this package must not import
Lightning, since its kernels work with torch alone. So the names are registered when Lightning's own registry comes.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["STRATEGIES", "register_with_lightning"]

STRATEGIES = {"moeclip": "popen", "moeclip_spawn": "spawn", "moeclip_fork": "fork"}
_REGISTRIES = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")


def register_with_lightning() -> None:
    """Register the names of our strategies with a Lightning that is imported, or with one that will be."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _register(strategies: ModuleType) -> None:
    for name, start_method in STRATEGIES.items():
        strategies.StrategyRegistry.register(
            name,
            partial(_make, strategies.__name__, start_method=start_method),
            description=f"Gradients of one process for CLIP with MoE towers; start_method {start_method!r}",
            override=True,
        )


def _make(registry: str, **arguments: Any) -> object:
    strategy = import_module("lightning_moeclip.strategy").MoEClipStrategy
    bound = import_module("lightning_moeclip.binding").ROOT
    root = registry.removesuffix(".strategies")
    if root != bound:
        raise ImportError(
            f"A Trainer of {root} asked for our strategy, which this process has made for {bound}: the two do not "
            f"take each other's strategies. Import Trainer and LightningModule from {bound}, or import {root} alone, "
            "before lightning_moeclip.strategy."
        )
    return strategy(**arguments)


class _RegistryFinder(MetaPathFinder):
    """Lets Lightning's registry load as always, and registers with it afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and the like, for tracebacks
