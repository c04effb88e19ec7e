"""The script for a GPU runs as a whole, and finds what is wrong."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.benchmarks import gpu


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny"])
    monkeypatch.setattr(gpu, "CSV", tmp_path / "gpu.csv")
    return tmp_path / "gpu.csv"


def test_every_operation_holds_its_bound_and_nothing_interpreted_is_a_result(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("interpreted: ")]) == len(gpu.CASES)
    assert not results.exists()


def case(*outputs: Tensor) -> gpu.Case:
    """Ours gives the outputs, plain torch and float64 give ones and a count of 3."""
    right = [torch.ones(4), torch.tensor(3)]
    work = gpu.Work(
        lambda: outputs, lambda: right, lambda: right, lambda: [x.double() for x in right[:1]] + right[1:], 4, 0
    )
    return gpu.Case("op", lambda size, dtype: work, torch.float32, (4,), (4,), (4,))


@pytest.mark.parametrize(
    "outputs",
    [
        (torch.tensor([1.0, 1.0, 1.0, 1.001]), torch.tensor(3)),
        (torch.tensor([1.0, 1.0, 1.0, torch.nan]), torch.tensor(3)),
        (torch.ones(4), torch.tensor(4)),
    ],
)
def test_a_wrong_number_fails_the_script(outputs: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CASES", [case(*outputs)])
    assert gpu.main() == 1
    monkeypatch.setattr(gpu, "CASES", [case(torch.ones(4), torch.tensor(3))])
    assert gpu.main() == 0
