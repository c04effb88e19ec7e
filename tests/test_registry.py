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
