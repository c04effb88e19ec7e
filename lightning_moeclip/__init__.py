"""Train CLIP models with Mixture-of-Experts towers on W ranks exactly as one process would.

A gradient walks through one corridor::

    parameter - role - group & plan - bucket - statistics - collective - unscale - clip - step
    parallel/   who must agree with whom       gradients/   what happens to gradients, in order
    modules/    parts for the user's model     state/       what must survive, free of the layout
    monitor/    what the reports mean          callbacks/   who looks on and may act
    strategy.py, precision.py                  the two doors to PyTorch Lightning
    diagnosis/  explain, verify, doctor: what users ask the package about itself
    testing/    many ranks in one test, and faults to inject
    kernels/    plain-torch truths (and Triton), importable with torch alone
"""

from importlib import import_module
from pathlib import Path

from lightning_moeclip.registry import register_with_lightning

__version__ = "0.1.0"

# the kernels live beside this package in the repository and are installed inside it: a checkout finds them too
if not (Path(__file__).parent / "kernels").exists():
    __path__.append(str(Path(__file__).parent.parent))

register_with_lightning()

_HOMES = {
    "MoEClipStrategy": "lightning_moeclip.strategy",
    "MoEClipPrecision": "lightning_moeclip.precision",
    "explain": "lightning_moeclip.diagnosis.explain",
    "verify": "lightning_moeclip.diagnosis.verify",
}

__all__ = ["MoEClipPrecision", "MoEClipStrategy", "__version__", "explain", "verify"]


def __getattr__(name: str) -> object:
    """Load a public name on first use, so that ``lightning_moeclip.kernels`` needs torch alone (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
