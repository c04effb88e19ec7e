"""The one file through which Lightning is imported, whichever of its two roots the program uses.

``lightning`` brings ``lightning.pytorch`` and ``lightning.fabric``; ``pytorch-lightning`` brings
``pytorch_lightning`` and ``lightning_fabric``. The two roots reject each other's strategies, so
everything of ours takes its base classes from here.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

_ROOTS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def _choose_root() -> str:
    """The root that the program has imported, if it is one of the two; else the first that is installed."""
    loaded = [root for root in _ROOTS if root in sys.modules]
    if len(loaded) == 1:
        return loaded[0]
    return next((root for root in _ROOTS if find_spec(root.split(".")[0])), "lightning.pytorch")


ROOT = _choose_root()
FABRIC_ROOT = _ROOTS[ROOT]


def _pytorch(path: str) -> ModuleType:
    return import_module(f"{ROOT}.{path}")


pl = import_module(ROOT)
fabric = import_module(FABRIC_ROOT)

Callback = pl.Callback
LightningModule = pl.LightningModule
Trainer = pl.Trainer
call = _pytorch("trainer.call")
TrainerFn = _pytorch("trainer.states").TrainerFn
TrainerStatus = _pytorch("trainer.states").TrainerStatus
DDPStrategy = _pytorch("strategies").DDPStrategy
Precision = _pytorch("plugins.precision").Precision
MixedPrecision = _pytorch("plugins.precision").MixedPrecision
DoublePrecision = _pytorch("plugins.precision").DoublePrecision
HalfPrecision = _pytorch("plugins.precision").HalfPrecision
GradClipAlgorithmType = _pytorch("utilities").GradClipAlgorithmType
LightningOptimizer = _pytorch("core.optimizer").LightningOptimizer
SubprocessScriptLauncher = _pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
MultiProcessingLauncher = _pytorch("strategies.launchers.multiprocessing")._MultiProcessingLauncher

__all__ = [
    "FABRIC_ROOT",
    "ROOT",
    "Callback",
    "DDPStrategy",
    "DoublePrecision",
    "GradClipAlgorithmType",
    "HalfPrecision",
    "LightningModule",
    "LightningOptimizer",
    "MixedPrecision",
    "MultiProcessingLauncher",
    "Precision",
    "SubprocessScriptLauncher",
    "Trainer",
    "TrainerFn",
    "TrainerStatus",
    "call",
    "fabric",
    "pl",
]
