"""The script for a GPU runs as a whole, and finds what is wrong."""

import sys
import weakref
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


def test_graphs_do_not_outlive_their_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[gpu.Bucket]] = []
    released: list[int] = []
    buckets_of, destroy, release = gpu.buckets_of, gpu.dist.destroy_process_group, gpu.Bucket.release

    def noted(*arguments: object) -> list[gpu.Bucket]:
        buckets = buckets_of(*arguments)  # type: ignore[arg-type]
        made.extend(map(weakref.ref, buckets))
        return buckets

    def end() -> None:
        assert len(made) == len(released) == 9
        assert [bucket() for bucket in made] == [None] * 9
        destroy()

    monkeypatch.setattr(gpu, "buckets_of", noted)
    monkeypatch.setattr(gpu.Bucket, "release", lambda self: released.append(id(self)) or release(self))
    monkeypatch.setattr(gpu.dist, "destroy_process_group", end)
    assert gpu.check_stash(tiny=True)


def test_no_case_finds_the_compiler_full_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    monkeypatch.setattr(gpu, "CASES", [case(torch.ones(4), torch.tensor(3))] * 3)
    assert gpu.main() == 0
    assert len(resets) == 3


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
