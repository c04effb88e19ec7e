"""What is installed: every source file, the kernels beneath the package, and no more demands than promised."""

import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import lightning_moeclip

ROOT = Path(__file__).parent.parent
PACKAGE = "lightning_moeclip"
# every other package than torch that some file of ours imports
ALL_BUT_TORCH = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "tensorboard", "triton")

# what is not installed is not found: import and importlib.util.find_spec see it alike
HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in {hidden!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources, built apart so that no earlier build can leave files in it."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    without_caches = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "kernels", "tests"):
        shutil.copytree(ROOT / name, sources / name, ignore=without_caches)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        sources,
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel is unpacked to."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(code: str, installed: Path, *, hidden: tuple[str, ...] = ()) -> str:
    """Run code on the installed package alone; returns what it printed."""
    code = HIDE.format(hidden=hidden) + f"sys.path.insert(0, {str(installed)!r})\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).rglob("*.py")}
    wanted |= {f"{PACKAGE}/kernels/{p.name}" for p in (ROOT / "kernels").glob("*.py")} | {f"{PACKAGE}/py.typed"}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == wanted


# the only files that import Triton; operations import them when a kernel is launched
TRITON_FILES = {p.stem for p in (ROOT / "kernels").glob("*_triton.py")}
OPERATIONS = [
    f"{PACKAGE}.kernels.{p.stem}" for p in sorted((ROOT / "kernels").glob("*.py")) if p.stem not in TRITON_FILES
]


def test_kernels_need_torch_alone(installed: Path) -> None:
    assert OPERATIONS
    assert TRITON_FILES
    code = f"import importlib\nfor name in {OPERATIONS!r}:\n    print(importlib.import_module(name).__file__)\n"
    files = run(code, installed, hidden=ALL_BUT_TORCH).split()
    assert all(Path(file).parent == installed / PACKAGE / "kernels" for file in files)


def test_triton_is_imported_by_a_launch_alone(installed: Path) -> None:
    # of the package and its operations; Lightning and torch.distributed import Triton themselves
    names = [PACKAGE, *OPERATIONS]
    code = (
        f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\nprint('triton' in sys.modules)\n"
    )
    assert run(code, installed).strip() == "False"


def test_a_checkout_finds_its_kernels_without_being_installed() -> None:
    code = f"import {PACKAGE}.kernels.reference as reference\nprint(reference.__file__)"
    assert run(code, ROOT, hidden=ALL_BUT_TORCH).strip() == str(ROOT / "kernels" / "reference.py")


FIT = """
import torch
import pytorch_lightning as pl
from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip import binding

assert "lightning" not in sys.modules and binding.ROOT == "pytorch_lightning"
assert issubclass(MoEClipStrategy, pl.strategies.DDPStrategy)
assert issubclass(MoEClipPrecision, pl.plugins.Precision)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        torch.nn.init.ones_(self.layer.weight)
    def training_step(self, batch, _):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

net = Net()
data = torch.utils.data.DataLoader(torch.ones(2, 3), batch_size=1)
pl.Trainer(
    accelerator="cpu", devices=2, strategy="moeclip_fork", max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(net, data)
print(net.layer.weight.tolist())
"""


def test_package_trains_where_only_pytorch_lightning_is_installed(installed: Path) -> None:
    # the mean over both ranks of d(sum)/dw = 1: every weight goes from 1 to 0
    assert run(FIT, installed, hidden=("lightning",)).splitlines()[-1] == "[[0.0, 0.0, 0.0]]"


def test_public_names_are_found_and_others_are_not() -> None:
    for name in lightning_moeclip.__all__:
        assert getattr(lightning_moeclip, name) is not None
        assert name in dir(lightning_moeclip)
    for room, names in {
        "callbacks": {"CosineRollback", "ExpertLoadMonitor", "ResidualResync", "VarianceHeatmap"},
        "testing": {"InjectedFault", "Rank", "inject", "on_ranks"},
    }.items():
        module = import_module(f"lightning_moeclip.{room}")
        assert set(module.__all__) == names
        assert all(callable(getattr(module, name)) for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        _ = lightning_moeclip.NoSuchName
