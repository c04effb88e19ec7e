"""Factories of users' modules that cannot be used: what was got and what was wanted."""

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from lightning_moeclip.diagnosis.factory import load_factory, make_case, make_module, rows_of, take_rows
from tests.diagnosis import odd_modules
from tests.models import TwoTowers

HERE = "tests.diagnosis.odd_modules"


def case(*batches: object) -> object:
    return lambda: (TwoTowers(), list(batches))


def test_a_factory_is_found_by_its_address_also_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_factory(f"{HERE}:two_towers") is odd_modules.two_towers
    assert load_factory(f"{HERE}:Lists.configure_optimizers") is odd_modules.Lists.configure_optimizers
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "project_of_a_user.py").write_text("def make():\n    return 7\n")
    assert load_factory("project_of_a_user:make")() == 7


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("no_colon", r"'no_colon' is no address of a factory\. Write package\.module:function"),
        (":make", r"is no address of a factory"),
        ("package:", r"is no address of a factory"),
        ("no_such_package.model:make", r"importing no_such_package\.model failed with ModuleNotFoundError"),
        (f"{HERE}:no_such", r"has no 'no_such'\. Write the name of a function"),
        (f"{HERE}:NOT_A_FUNCTION", r"is a int\. Write the name of a function without arguments"),
    ],
)
def test_an_address_without_a_factory_is_refused(address: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_factory(address)


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_project.py").write_text("raise OSError('no disk')\n")
    with pytest.raises(ValueError, match=r"importing broken_project failed with OSError: no disk"):
        load_factory("broken_project:make")


def test_a_module_is_taken_alone_or_before_its_batches() -> None:
    assert isinstance(make_module(odd_modules.two_towers), TwoTowers)
    assert isinstance(make_module(odd_modules.with_batches), TwoTowers)
    assert isinstance(make_module(lambda: nn.Linear(2, 2)), nn.Linear)


@pytest.mark.parametrize(
    ("factory", "got"), [(odd_modules.a_number, "a int"), (lambda: (3, 4), r"a tuple of \(int, int\)")]
)
def test_another_type_is_named(factory: object, got: str) -> None:
    with pytest.raises(TypeError, match=rf"returned {got}\. It must return an nn\.Module, or a tuple"):
        make_module(factory)
    with pytest.raises(TypeError, match=rf"returned {got}\. It must return \(module, batches\)"):
        make_case(factory)


def test_a_plain_module_and_loose_batches_are_no_case() -> None:
    with pytest.raises(TypeError, match=r"a tuple of \(Linear, list\)\. It must return \(module, batches\)"):
        make_case(lambda: (nn.Linear(2, 2), [torch.zeros(2)]))
    for batches in (torch.zeros(2, 3), [], 3):
        with pytest.raises(TypeError, match=r"as batches\. It must be a list with at least one batch"):
            make_case(lambda batches=batches: (TwoTowers(), batches))


def test_a_module_that_needs_a_gpu_is_told_to_be_made_on_the_cpu() -> None:
    def needs_gpu() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    def needs_nothing() -> None:
        raise KeyError("width")

    def needs_arguments(width: int) -> None:
        del width

    with pytest.raises(ValueError, match=r"failed with RuntimeError: Found no NVIDIA driver.*leave out \.cuda\(\)"):
        make_module(needs_gpu)
    with pytest.raises(ValueError, match=r"failed with KeyError: 'width'\. It is called without arguments"):
        make_module(needs_nothing)
    with pytest.raises(ValueError, match=r"failed with TypeError: .*missing 1 required.*called without arguments"):
        make_case(needs_arguments)


def test_batches_of_unequal_structure_are_told_apart() -> None:
    with pytest.raises(
        ValueError,
        match=r"unequal structure: batch 0 has \[0\]: \[rows, 8\] torch\.float32.* batch 1 has \[0\]: \[rows, 9\]",
    ):
        make_case(case((torch.zeros(4, 8), torch.zeros(4, 7)), (torch.zeros(4, 9), torch.zeros(4, 7))))
    with pytest.raises(ValueError, match=r"unequal structure"):
        make_case(case({"x": torch.zeros(4, 8)}, {"y": torch.zeros(4, 8)}))
    with pytest.raises(ValueError, match=r"unequal structure.*float32.*float64"):
        make_case(case(torch.zeros(4), torch.zeros(4).double()))
    with pytest.raises(ValueError, match=r"batch 0 has \[0\]: \[4, 8\], \[1\]: \[3, 7\]\. Every tensor of a batch"):
        make_case(case((torch.zeros(4, 8), torch.zeros(3, 7))))
    with pytest.raises(ValueError, match=r"batch 0 has no tensors"):
        make_case(case("words"))
    with pytest.raises(ValueError, match=r"batch 1 has the tensor: \[\]"):
        make_case(case(torch.zeros(3), torch.tensor(1.0)))


def test_rows_are_shared_out_and_the_rest_is_kept() -> None:
    found = make_case(case({"x": torch.arange(6), "name": "first"}, {"x": torch.arange(2), "name": "second"}))
    assert [rows_of(batch) for batch in found.batches] == [6, 2]
    part = take_rows(found.batches[0], 2, 4)
    assert (part["x"].tolist(), part["name"]) == ([2, 3], "first")


def test_lists_with_an_entry_for_each_row_are_shared_out_too() -> None:
    batch = {
        "x": torch.arange(4),
        "captions": ["a", "b", "c", "d"],
        "tokens": ([1], [2, 3], [], [4]),
        "by_prompt": [["p0", "p1", "p2", "p3"], ["q0", "q1", "q2", "q3"]],
        "array": numpy.arange(4),
        "sizes": (224, 224),
    }
    part = take_rows(make_case(case(batch)).batches[0], 1, 3)
    assert (part["captions"], part["tokens"]) == (["b", "c"], ([2, 3], []))
    assert part["by_prompt"] == [["p1", "p2"], ["q1", "q2"]]
    assert (part["array"].tolist(), part["sizes"]) == ([1, 2], (224, 224))


def test_a_lazy_layer_needs_a_forward_in_the_factory() -> None:
    class Lazy(TwoTowers):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.LazyLinear(3)

    message = r"lazy parameters have no shape yet: head\.weight, head\.bias\. Run one forward in the factory"
    with pytest.raises(ValueError, match=message):
        make_module(Lazy)
    with pytest.raises(ValueError, match=message):
        make_case(lambda: (Lazy(), [torch.zeros(2, 3)]))
