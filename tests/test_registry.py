"""The names of our strategies reach Lightning whichever is imported first, each program gets what is made for its root,
and kernels never import Lightning.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_moeclip.registry import STRATEGIES
from lightning_moeclip.roots import ROOTS

REPOSITORY = Path(__file__).parent.parent

# each case in a process of its own, forked where torch is imported and neither Lightning nor ours is
FORK = """
import json, os, runpy, sys, traceback
from pathlib import Path
import torch, torch.distributed, torchmetrics
assert not [m for m in sys.modules if m.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_moeclip")]
folder = Path(sys.argv[1])
for case in sorted(folder.glob("*.py")):
    pid = os.fork()
    if pid == 0:
        told = ""
        try:
            runpy.run_path(str(case), run_name="__main__")
        except BaseException:
            told = traceback.format_exc()
        case.with_suffix(".json").write_text(json.dumps(told))
        os._exit(0)
    os.waitpid(pid, 0)
"""
ORDERS = {
    "ours_first": "import lightning_moeclip; from {root} import Trainer",
    "ours_last": "from {root} import Trainer; import lightning_moeclip",
    # as tools sort imports: a base class is needed before the program has named its root
    "sorted": "from lightning_moeclip import MoEClipStrategy\nfrom {root} import Trainer\n"
    "Trainer(strategy=MoEClipStrategy(), **SETTINGS)",
    "sorted_in_a_function": "def main():\n    from lightning_moeclip import MoEClipPrecision, MoEClipStrategy\n"
    "    from {root} import Trainer\n"
    "    Trainer(strategy=MoEClipStrategy(), plugins=[MoEClipPrecision('64-true')], **SETTINGS)\n"
    "main()\nfrom {root} import Trainer",
}
SETTINGS = "SETTINGS = {'accelerator': 'cpu', 'devices': 1, 'logger': False}\n"
BY_NAME = """
for name in NAMES:
    strategy = Trainer(strategy=name, **SETTINGS).strategy
    assert type(strategy).__name__ == 'MoEClipStrategy', strategy
    assert repr(strategy) == 'MoEClipStrategy(expert_parallel_size=1, made for ROOT)', strategy
import sys
assert OTHER not in sys.modules
"""
KERNELS = """
import sys, lightning_moeclip.kernels.reference
assert not [m for m in sys.modules if m.split('.')[0] in ('lightning', 'pytorch_lightning')]
"""
# a Trainer of the root that ours are not made for, whatever it is given
MISMATCH = """
from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from BOUND import Trainer
from importlib import import_module
other = OTHER
Other = import_module(other).Trainer  # no import that names it
write = 'made for BOUND: import Trainer and LightningModule from BOUND)'
told = {
    'by name': f'A Trainer of {other} asked for our strategy, which this process has made for BOUND',
    'strategy': f'`strategy=MoEClipStrategy(expert_parallel_size=1, {write}`',
    'plugin': f"Found invalid type for plugin MoEClipPrecision('64-true', {write}.",
}
given = {
    'by name': {'strategy': 'moeclip'},
    'strategy': {'strategy': MoEClipStrategy()},
    'plugin': {'plugins': [MoEClipPrecision('64-true')]},
}
for case, arguments in given.items():
    try:
        Other(**arguments, **SETTINGS)
    except Exception as error:
        assert told[case] in str(error), error
    else:
        raise AssertionError(case + ' was accepted')
"""


def other_than(root: str) -> str:
    return next(other for other in ROOTS if other != root)


def cases() -> dict[str, str]:
    found = {"kernels": KERNELS}
    for root in ROOTS:
        checks = BY_NAME.replace("NAMES", repr(tuple(STRATEGIES))).replace("ROOT", root)
        for order, code in ORDERS.items():
            found[f"{order}-{root}"] = f"{SETTINGS}{code.format(root=root)}\n{checks}"
        found[f"mismatch-{root}"] = SETTINGS + MISMATCH.replace("BOUND", root)
    return {
        name: code.replace("OTHER", repr(other_than(name.partition("-")[2] or "lightning.pytorch")))
        for name, code in found.items()
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Traceback of each case, empty where it passed."""
    folder = tmp_path_factory.mktemp("cases")
    for name, code in cases().items():
        (folder / f"{name}.py").write_text(code)
    command = [sys.executable, "-c", FORK, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in cases()}


@pytest.mark.parametrize("case", sorted(cases()))
def test_case_in_a_process_of_its_own(case: str, told: dict[str, str]) -> None:
    assert not told[case]
