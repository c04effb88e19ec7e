"""When a fault happens: also where steps come by twos, behind a resumption, or not at all."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import Callback, LightningModule
from lightning_moeclip.testing import InjectedFault, inject
from lightning_moeclip.testing.timed_fault import Fault
from tests.models import loader, quiet_trainer

DATA = list(torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0)))


class TwoSteps(LightningModule):
    """Two optimizers, each of which steps in every batch: batches begin at steps 0, 2, 4 and 6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)
        self.automatic_optimization = False
        self.kept: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        kept: dict[str, Tensor] = {}
        for name, optimizer in zip(("first", "second"), self.optimizers(), strict=True):
            optimizer.zero_grad()
            layer = getattr(self, name)
            self.manual_backward(layer(batch).pow(2).mean())
            kept[name] = torch.cat([layer.weight.detach(), layer.weight.grad])
            layer.weight.grad = None  # nothing moves, so that later steps do not know of the fault
            optimizer.step()
        self.kept.append(kept)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in (self.first, self.second)]


def fit(*faults: Callback, module: LightningModule | None = None, **arguments: Any) -> LightningModule:
    module = module or TwoSteps()
    settings = {"strategy": "auto", "callbacks": list(faults), **arguments}
    quiet_trainer(1, **settings).fit(module, loader(DATA))
    return module


ARGUMENTS: dict[str, dict[str, Any]] = {"stall": {"seconds": 1e-3}}


@pytest.mark.parametrize("fault", ["nan_grad", "scale_grad", "sign_flip", "desync", "stall"])
def test_a_fault_between_the_steps_of_two_batches_happens_in_the_second(fault: str) -> None:
    planted = inject(fault, 3, 0, **ARGUMENTS.get(fault, {}))
    faulty = fit(planted).kept
    assert planted.fired == 4
    changed = [
        (index, name)
        for index, (found, wanted) in enumerate(zip(faulty, fit().kept, strict=True))
        for name in wanted
        if not torch.equal(found[name], wanted[name])
    ]
    assert (
        changed
        == {
            "nan_grad": [(2, "first")],
            "scale_grad": [(2, "first"), (2, "second")],
            "sign_flip": [(2, "first")],  # after the first backward of the step
            "desync": [(3, "first")],  # a parameter, from the next batch on
            "stall": [],
        }[fault]
    )


def test_an_exception_between_the_steps_of_two_batches_is_raised_before_the_second() -> None:
    module = TwoSteps()
    with pytest.raises(InjectedFault, match=re.escape("inject('exception', step=3, rank=0): step 4 on rank 0")):
        fit(inject("exception", 3, 0), module=module)
    assert len(module.kept) == 2


def test_a_fault_behind_the_end_of_the_run_is_an_error_when_training_ends() -> None:
    message = r"step=300, rank=0\) did not happen: this fit ended after 8 optimizer steps\. Write a step up to 6, or"
    with pytest.raises(RuntimeError, match=message):
        fit(inject("nan_grad", 300, 0))


class NeverSteps(TwoSteps):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        return None


def test_a_fault_in_a_step_that_never_ends_is_an_error_when_training_ends() -> None:
    with pytest.raises(RuntimeError, match=r"rank=0\) did not happen: training ended within step 0\."):
        fit(inject("nan_grad", 0, 0), module=NeverSteps())


def test_integers_of_numpy_are_integers() -> None:
    assert inject("exception", np.int64(3), np.int64(0)).step == 3


def test_a_fault_before_a_resumed_run_is_told_of_and_does_not_happen_again(tmp_path: Path) -> None:
    trainer = quiet_trainer(1, strategy="auto", callbacks=[inject("nan_grad", 3, 0)])
    trainer.fit(TwoSteps(), loader(DATA))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    planted: Fault = inject("nan_grad", 3, 0)
    trainer = quiet_trainer(1, strategy="auto", callbacks=[planted], max_epochs=2)
    message = re.escape("inject('nan_grad', step=3, rank=0): training begins at step 8, behind it. Nothing is planted")
    with pytest.warns(UserWarning, match=message):
        trainer.fit(TwoSteps(), loader(DATA), ckpt_path=tmp_path / "last.ckpt")
    assert planted.fired is None


class Words(LightningModule):
    """A lookup whose gradient is sparse."""

    def __init__(self, *, is_used: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)
        self.is_used = is_used
        self.kept: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.words(torch.tensor([3, 1, 3] if self.is_used else [], dtype=torch.int64)).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.kept.append(self.words.weight.grad.to_dense())
        self.words.weight.grad = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("fault", ["nan_grad", "scale_grad", "sign_flip"])
def test_faults_reach_a_sparse_gradient(fault: str) -> None:
    kept = fit(inject(fault, 1, 0), module=Words()).kept
    wanted = torch.zeros(5, 3)
    wanted[1], wanted[3] = 1.0, 2.0
    faulty = {"nan_grad": wanted.clone(), "scale_grad": 1e6 * wanted, "sign_flip": -wanted}[fault]
    if fault == "nan_grad":
        faulty[3, 0] = torch.nan  # of the first element that is stored
    for step, found in enumerate(kept):
        torch.testing.assert_close(found, faulty if step == 1 else wanted, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_sparse_gradient_without_elements_has_nothing_to_act_on() -> None:
    with pytest.raises(RuntimeError, match=r"inject\('nan_grad', step=1, rank=0\) did not happen: no parameter got"):
        fit(inject("nan_grad", 1, 0), module=Words(is_used=False))


@pytest.mark.parametrize("number", [1.5, "1", True, None])
def test_steps_and_ranks_that_are_no_integers_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match=rf"step={re.escape(repr(number))}, rank=0\): both count from 0"):
        inject("nan_grad", number, 0)
    with pytest.raises(ValueError, match=rf"step=0, rank={re.escape(repr(number))}\): both count from 0"):
        inject("nan_grad", 0, number)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fault": "stall", "seconds": math.inf}, r"seconds=inf\) must be a positive number"),
        ({"fault": "stall", "seconds": True}, r"seconds=True\) must be a positive number"),
        ({"fault": "scale_grad", "factor": math.nan}, r"factor=nan\) must be a number"),
        ({"fault": "stall", "seconds": None}, r"inject\('stall', seconds=None\) must be a positive number"),
        ({"fault": "stall", "seconds": "1"}, r"inject\('stall', seconds='1'\) must be a positive number"),
        (
            {"fault": "scale_grad", "factor": "2"},
            r"inject\('scale_grad', factor='2'\) must be a number.*default is 1e6",
        ),
        (
            {"fault": "desync", "parameter": 3},
            r"inject\('desync', parameter=3\) must be the name of a parameter, or None",
        ),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inject(step=0, rank=0, **arguments)
