"""The one file through which Lightning is imported, whichever of its two roots the program uses.

``lightning`` brings ``lightning.pytorch`` and ``lightning.fabric``; ``pytorch-lightning`` brings
``pytorch_lightning`` and ``lightning_fabric``. The two roots reject each other's strategies, so
everything of ours takes its base classes from here: a process has one of the two, the one that its program names.
"""

import sys
from importlib import import_module
from types import ModuleType

from lightning_moeclip.roots import ROOTS, choose_root

ROOT = choose_root()
FABRIC_ROOT = ROOTS[ROOT]


def _pytorch(path: str) -> ModuleType:
    return import_module(f"{ROOT}.{path}")


def made_for() -> str:
    """What an object of ours says of itself where Lightning prints it, as it does when a Trainer refuses it."""
    other = next(root for root in ROOTS if root != ROOT)
    return f"made for {ROOT}" + (f": import Trainer and LightningModule from {ROOT}" if other in sys.modules else "")


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
    "made_for",
    "pl",
]
