"""Which of Lightning's two roots a program means; tests/test_registry.py asks whole programs."""

import linecache
import sys
from types import ModuleType

import pytest

from lightning_moeclip import roots
from lightning_moeclip.binding import ROOT, fabric
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks

STOCK, OTHER = "lightning.pytorch", "pytorch_lightning"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import lightning as L", [STOCK]),
        ("from lightning.pytorch import Trainer", [STOCK]),
        ("import torch, pytorch_lightning.callbacks as c", [OTHER]),
        ("def f():\n    if True:\n        from pytorch_lightning import Trainer", [OTHER]),
        (
            "try:\n    import pytorch_lightning\nexcept ImportError:\n    import lightning.pytorch",
            [OTHER, STOCK],
        ),
        ("from lightning_moeclip import MoEClipStrategy\nimport lightning_utilities", []),
        ("code = '''\nimport pytorch_lightning\n'''  # lightning", []),
        ("from . import lightning", []),
        ("%matplotlib inline\n!pip install lightning\nimport pytorch_lightning as pl", [OTHER]),
        ("this is no Python, and it says lightning", []),
    ],
)
def test_roots_that_a_source_names(source: str, named: list[str]) -> None:
    assert roots._named_in(source.splitlines(keepends=True)) == named


def chosen_by(source: str, *, loaded: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, name: str = "cell") -> str:
    """What is chosen where a source of this name asks, as a cell of a notebook does: it has no file."""
    for root in roots.ROOTS:
        monkeypatch.delitem(sys.modules, root, raising=False)
    for root in loaded:
        monkeypatch.setitem(sys.modules, root, ModuleType(root))
    path = f"<{name}>"
    monkeypatch.setitem(linecache.cache, path, (len(source), None, source.splitlines(keepends=True), path))
    # asked through this file, which names neither
    namespace = {"__name__": name, "choose_root": lambda: roots.choose_root()}
    exec(compile(f"{source}\nchosen = choose_root()", path, "exec"), namespace)
    return str(namespace["chosen"])


BOTH = "if False:\n    import pytorch_lightning\n    import lightning.pytorch"


@pytest.mark.parametrize(
    ("source", "loaded", "chosen"),
    [
        ("if False: import pytorch_lightning", (), OTHER),
        ("if False: import pytorch_lightning", (STOCK,), OTHER),
        ("if False: import lightning", (OTHER,), STOCK),
        ("pass", (OTHER,), OTHER),
        ("pass", (STOCK,), STOCK),
        (BOTH, (), OTHER),
        (BOTH, (STOCK,), STOCK),
        (BOTH, (STOCK, OTHER), OTHER),
    ],
)
def test_the_innermost_file_that_names_a_root_decides(
    source: str, loaded: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_by(source, loaded=loaded, monkeypatch=monkeypatch) == chosen


def test_a_root_that_is_not_installed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_is_installed", lambda root: root == OTHER)
    assert chosen_by("if False: import lightning", loaded=(), monkeypatch=monkeypatch) == OTHER


def test_a_module_of_lightning_itself_means_its_own_root(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = chosen_by("pass", loaded=(STOCK,), monkeypatch=monkeypatch, name="pytorch_lightning.cli")
    assert asked == OTHER


@on_ranks(1)
def root_of_a_rank(rank: Rank) -> str:
    return ROOT


def test_the_root_is_the_one_that_this_run_was_started_with(pytestconfig: pytest.Config) -> None:
    assert (OTHER if pytestconfig.pluginmanager.has_plugin(OTHER) else STOCK) == ROOT


def test_ranks_of_a_test_and_our_base_classes_have_the_root_of_the_test() -> None:
    assert root_of_a_rank.launch() == [ROOT]
    assert fabric.__name__ == roots.ROOTS[ROOT]
    for ours, theirs in ((MoEClipStrategy, "strategies.ddp"), (MoEClipPrecision, "plugins.precision.precision")):
        assert f"{ROOT}.{theirs}" in [base.__module__ for base in ours.__mro__]
