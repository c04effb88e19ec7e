"""The names of our strategies reach Lightning whichever is imported first, and kernels never import Lightning."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USE = (
    "assert type(Trainer(accelerator='cpu', devices=1, strategy='{name}', logger=False).strategy).__name__ "
    "== 'MoEClipStrategy'"
)


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_moeclip; from lightning.pytorch import Trainer",
        "from lightning.pytorch import Trainer; import lightning_moeclip",
        "import lightning_moeclip; from pytorch_lightning import Trainer",
        "from pytorch_lightning import Trainer; import lightning_moeclip",
    ],
)
def test_strategy_is_known_by_name_in_either_order_of_imports(imports: str) -> None:
    names = ("moeclip", "moeclip_spawn", "moeclip_fork")
    run("\n".join([imports, *(USE.format(name=name) for name in names)]))


def test_kernels_import_no_lightning() -> None:
    run(
        "import sys, lightning_moeclip.kernels.reference\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('lightning', 'pytorch_lightning')]"
    )


@pytest.mark.parametrize(
    ("imports", "root", "bound"),
    [
        ("import lightning.pytorch", "pytorch_lightning", "lightning.pytorch"),
        ("import pytorch_lightning; import lightning_moeclip.strategy", "lightning.pytorch", "pytorch_lightning"),
    ],
)
def test_a_trainer_of_the_other_root_is_told_which_one_to_import(imports: str, root: str, bound: str) -> None:
    told = f"A Trainer of {root} asked for our strategy, which this process has made for {bound}"
    code = f"{imports}; import lightning_moeclip; from {root} import Trainer\n"
    code += "try:\n    Trainer(accelerator='cpu', devices=1, strategy='moeclip', logger=False)\n"
    code += f"except ImportError as error:\n    assert str(error).startswith({told!r}), error\n"
    run(code + "else:\n    raise AssertionError('accepted')")
