"""Each fault does exactly what it says, on its rank and in its step alone."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule
from lightning_moeclip.testing import InjectedFault, Rank, inject, on_ranks
from lightning_moeclip.testing.faults import FAULTS
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

STEP, NUM_STEPS = 2, 4


class Net(LightningModule):
    """Two layers, linear in each parameter's gradient; keeps gradients and parameters of every step."""

    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 3).double()
        self.second = nn.Linear(3, 2).double()
        self.automatic_optimization = not is_manual
        self.kept: list[dict[str, Tensor]] = []
        self.values: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.second(self.first(batch)).pow(2).mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.kept.append({n: p.grad.clone() for n, p in self.named_parameters()})
        # nothing moves, so that later steps do not know of the fault
        self.zero_grad()

    def on_train_batch_end(self, *args: object) -> None:
        self.values.append({n: p.detach().clone() for n, p in self.named_parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own_data(rank: int, num_batches: int) -> list[Tensor]:
    rows = torch.randn(num_batches, 2, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return list(rows[:, rank])


def own_gradients(accumulate: int = 1) -> list[list[dict[str, Tensor]]]:
    """Gradients of each rank's own loss, by rank and step."""
    net = Net()
    by_rank = []
    for rank in range(2):
        steps = []
        for index, batch in enumerate(own_data(rank, NUM_STEPS * accumulate)):
            if index % accumulate == 0:
                net.zero_grad()
            (net.training_step(batch, 0) / accumulate).backward()
            if (index + 1) % accumulate == 0:
                steps.append({n: p.grad.clone() for n, p in net.named_parameters()})
        by_rank.append(steps)
    return by_rank


Told = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int | None]


@on_ranks(2)
def run(rank: Rank, faults: dict[str, tuple[str, dict]], is_manual: bool, settings: dict[str, Any]) -> dict[str, Told]:
    """Gradients, parameters and ``fired`` of a fit with each fault on rank 1."""
    told = {}
    for key, (fault, arguments) in faults.items():
        callback = inject(fault, STEP, 1, **arguments)
        net = Net(is_manual=is_manual)
        data = own_data(rank.index, NUM_STEPS * settings.get("accumulate_grad_batches", 1))
        quiet_trainer(2, callbacks=[callback], **settings).fit(net, loader(data))
        told[key] = net.kept, net.values, callback.fired
    return told


Gradients = dict[str, Tensor]
WEIGHT = "second.weight"


def with_nan(gradients: Gradients, name: str) -> Gradients:
    changed = {n: g.clone() for n, g in gradients.items()}
    changed[name][0, 0] = float("nan")
    return changed


def at(name: str, there: Gradients, else_: Gradients) -> Gradients:
    return {n: there[n] if n == name else else_[n] for n in else_}


def times(factor: float, gradients: Gradients) -> Gradients:
    return {n: g * factor for n, g in gradients.items()}


def half_sum(a: Gradients, b: Gradients) -> Gradients:
    return {n: (a[n] + b[n]) / 2 for n in a}


# arguments of inject, and the gradients of ranks 0 and 1 in its step, from the ranks' own gradients
FAULTY: dict[str, tuple[str, dict, Callable[[Gradients, Gradients], tuple[Gradients, Gradients]]]] = {
    "nan_grad": ("nan_grad", {}, lambda a, b: (with_nan(half_sum(a, b), "first.weight"),) * 2),
    "nan_grad, named": ("nan_grad", {"parameter": WEIGHT}, lambda a, b: (with_nan(half_sum(a, b), WEIGHT),) * 2),
    "scale_grad": ("scale_grad", {}, lambda a, b: (half_sum(a, times(1e6, b)),) * 2),
    "scale_grad, named": (
        "scale_grad",
        {"parameter": WEIGHT, "factor": 3.0},
        lambda a, b: (half_sum(a, at(WEIGHT, times(3.0, b), b)),) * 2,
    ),
    "sign_flip": ("sign_flip", {}, lambda a, b: (half_sum(a, b), times(-1.0, half_sum(a, b)))),
    "sign_flip, named": (
        "sign_flip",
        {"parameter": WEIGHT},
        lambda a, b: (half_sum(a, b), at(WEIGHT, times(-1.0, half_sum(a, b)), half_sum(a, b))),
    ),
    "drop_reduce": ("drop_reduce", {}, lambda a, b: (half_sum(a, b), times(0.5, b))),
    "drop_reduce, named": (
        "drop_reduce",
        {"parameter": WEIGHT},
        lambda a, b: (half_sum(a, b), at(WEIGHT, times(0.5, b), half_sum(a, b))),
    ),
    "desync": ("desync", {}, lambda a, b: (half_sum(a, b),) * 2),
    "desync, named": ("desync", {"parameter": WEIGHT}, lambda a, b: (half_sum(a, b),) * 2),
}
LAYOUTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "automatic": (False, {}),
    "manual": (True, {}),
    "accumulated": (False, {"accumulate_grad_batches": 2}),
    "ddp": (False, {"strategy": "ddp"}),
}


def changed_elements(now: Gradients, before: Gradients) -> list[tuple[str, Tensor, Tensor]]:
    return [
        (n, now[n][now[n] != before[n]], before[n][now[n] != before[n]]) for n in now if (now[n] != before[n]).any()
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_fault_changes_the_gradients_that_it_says_on_its_rank_in_its_step_alone(layout: str) -> None:
    is_manual, settings = LAYOUTS[layout]
    accumulate = settings.get("accumulate_grad_batches", 1)
    own = own_gradients(accumulate)
    faults = {key: value[:2] for key, value in FAULTY.items() if layout != "ddp" or value[0] != "drop_reduce"}
    told = run.launch(faults=faults, is_manual=is_manual, settings=settings)
    for key, rank in [(key, rank) for key in faults for rank in range(2)]:
        kept, values, fired = told[rank][key]
        assert fired == (STEP if rank == 1 else None), key
        assert len(kept) == NUM_STEPS
        for step, found in enumerate(kept):
            a, b = own[0][step], own[1][step]
            wanted = FAULTY[key][2](a, b)[rank] if step == STEP else half_sum(a, b)
            for name in found:
                torch.testing.assert_close(
                    found[name], wanted[name], rtol=1e-12, atol=0.0, equal_nan=True, msg=f"{key} {step} {name}"
                )
        # parameters stand still but for the element of a desync, from the end of its step on
        end = (STEP + 1) * accumulate - 1
        for index, now in enumerate(values):
            moved = changed_elements(now, values[0])
            if FAULTY[key][0] != "desync" or rank == 0 or index < end:
                assert not moved, key
                continue
            ((name, (new,), (old,)),) = moved
            assert name == FAULTY[key][1].get("parameter", "first.weight")
            assert old.abs() == values[0][name].abs().max()
            assert new == torch.nextafter(old, old.sign() * float("inf"))


class Late(Callback):
    """Keeps when each step began on this rank, after the faults."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.began.append(time.monotonic())


@on_ranks(2)
def stalled(rank: Rank) -> tuple[list[float], int | None, bool]:
    late, callback = Late(), inject("stall", STEP, 1, seconds=0.5)
    trainer = quiet_trainer(2, callbacks=[callback, late])
    trainer.fit(Net(), loader(own_data(rank.index, NUM_STEPS)))
    return late.began, callback.fired, trainer.strategy.has_failed


def test_stall_sleeps_before_its_step_and_the_other_rank_waits_in_it() -> None:
    (began_0, _, failed_0), (began_1, fired, failed_1) = stalled.launch()
    assert began_1[STEP] - began_1[STEP - 1] >= 0.5
    # one clock for all processes of a machine: the other rank cannot leave its step before the stalled one begins it
    assert began_0[STEP + 1] >= began_1[STEP]
    assert fired == STEP
    assert not failed_0
    assert not failed_1


@on_ranks(2)
def raised_and_waited(rank: Rank) -> None:
    with pytest.raises(RuntimeError) if rank.index == 0 else pytest.raises(InjectedFault) as caught:
        quiet_trainer(2, callbacks=[inject("exception", STEP, 1)]).fit(Net(), loader(own_data(rank.index, NUM_STEPS)))
    raise caught.value


def test_exception_is_raised_before_its_step_on_its_rank() -> None:
    with pytest.raises(RanksFailed) as caught:
        raised_and_waited.launch()
    assert "InjectedFault: inject('exception', step=2, rank=1): step 2 on rank 1" in caught.value.failures[1]


class RawManual(Net):
    """Backward past the strategy, which the reducer ends by itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.second(self.first(batch)).pow(2).mean().backward()
        optimizer.step()


@on_ranks(2)
def raw(rank: Rank) -> tuple[list[dict[str, Tensor]], str]:
    net = RawManual(is_manual=True)
    quiet_trainer(2, callbacks=[inject("drop_reduce", STEP, 1)]).fit(net, loader(own_data(rank.index, NUM_STEPS)))
    error = ""
    try:
        quiet_trainer(2, callbacks=[inject("sign_flip", STEP, 0), inject("sign_flip", STEP, 1)]).fit(
            RawManual(is_manual=True), loader(own_data(rank.index, NUM_STEPS))
        )
    except RuntimeError as raised:
        error = str(raised)
    return net.kept, error


def test_raw_backward_drops_its_reduction_and_a_fault_that_did_not_happen_is_an_error() -> None:
    own = own_gradients()
    for rank, (kept, error) in enumerate(raw.launch()):
        for step, found in enumerate(kept):
            a, b = own[0][step], own[1][step]
            wanted = times(0.5, b) if (rank, step) == (1, STEP) else half_sum(a, b)
            for name in found:
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=0.0)
        assert re.search(rf"inject\('sign_flip', step=2, rank={rank}\) did not happen: no parameter got", error), error


class SameTowers(TwoTowers):
    """Keeps the parameters of this rank at the end of each batch."""

    def on_train_start(self) -> None:
        self.values: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *args: object) -> None:
        self.values.append({n: p.detach().clone() for n, p in self.named_parameters()})


@on_ranks(4)
def spread(rank: Rank, precision: str, name: str) -> list[dict[str, Tensor]]:
    module = SameTowers(lr=1e-3)
    data = share(batches(3), [2, 2, 2, 2], rank.index)
    if precision == "bf16-true":
        module.float()
        data = [(x.bfloat16(), y.bfloat16()) for x, y in data]
    quiet_trainer(
        4,
        strategy=MoEClipStrategy(expert_parallel_size=2),
        plugins=[MoEClipPrecision(precision, master_weights=precision == "bf16-true")],
        callbacks=[inject("desync", 1, 3, parameter=name)],
    ).fit(module, loader(data))
    return module.values


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_desync_of_a_spread_expert_and_of_a_16_bit_parameter_stays_until_somebody_mends_it(precision: str) -> None:
    name = "image.moe.w_in"
    told = spread.launch(precision=precision, name=name)
    assert not changed_elements(told[3][0], told[1][0]), "ranks 1 and 3 hold the same experts"
    ((found, (new,), (old,)),) = changed_elements(told[3][1], told[1][1])
    assert found == name
    bits = {"64-true": torch.int64, "bf16-true": torch.int16}[precision]
    assert new.view(bits) == old.view(bits) + 1
    # the next step starts from it, through its master too
    assert (told[3][2][name] != told[1][2][name]).any()


@on_ranks(2)
def compiled(rank: Rank) -> list[list[dict[str, Tensor]]]:
    kept = []
    for fault in ("scale_grad", "sign_flip"):
        net = Net()
        net.first.compile(backend="aot_eager")
        quiet_trainer(2, callbacks=[inject(fault, STEP, 1)]).fit(net, loader(own_data(rank.index, NUM_STEPS)))
        kept.append(net.kept)
    return kept


def test_faults_reach_compiled_modules() -> None:
    own = own_gradients()
    for rank, runs in enumerate(compiled.launch()):
        for fault, kept in zip(("scale_grad", "sign_flip"), runs, strict=True):
            for step, found in enumerate(kept):
                a, b = own[0][step], own[1][step]
                wanted = FAULTY[fault][2](a, b)[rank] if step == STEP else half_sum(a, b)
                for name in found:
                    torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fault": "nan"}, rf"no such fault\. Use one of {', '.join(map(repr, FAULTS))}"),
        ({"step": -1}, r"step=-1, rank=0\): both count from 0"),
        ({"rank": -1}, r"rank=-1\): both count from 0"),
        ({"fault": "stall", "seconds": 0.0}, r"seconds=0\.0\) must be a positive number"),
        ({"fault": "stall", "parameter": "first.weight"}, r"inject\('stall', parameter=\.\.\.\): this fault has no"),
        ({"factor": 2.0}, r"inject\('nan_grad', factor=\.\.\.\): this fault has no factor\. Leave it out"),
        ({"seconds": 2.0}, r"this fault has no seconds"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inject(**{"fault": "nan_grad", "step": 0, "rank": 0, **arguments})


@on_ranks(2)
def test_what_only_a_run_knows_is_refused_on_every_rank(rank: Rank) -> None:
    data = loader(own_data(rank.index, NUM_STEPS))
    no_rank = r"inject\('nan_grad', step=0, rank=2\) on 2 rank\(s\): .*Write rank=0 to 1, or Trainer\(devices=3\)"
    with pytest.raises(ValueError, match=no_rank):
        quiet_trainer(2, callbacks=[inject("nan_grad", 0, 2)]).fit(Net(), data)
    with pytest.raises(ValueError, match=r"no parameter of that name\. Close to it are 'first\.weight'"):
        quiet_trainer(2, callbacks=[inject("desync", 0, 1, parameter="first.wieght")]).fit(Net(), data)
    with pytest.raises(TypeError, match=r"MoEClipStrategy, and the strategy is DDPStrategy\. Write Trainer\(strategy="):
        quiet_trainer(2, strategy="ddp", callbacks=[inject("drop_reduce", 0, 1)]).fit(Net(), data)


class Phases(Net):
    """A complex parameter, which the loss does not reach."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([0.5 + 2j, -3j], dtype=dtype))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@on_ranks(1)
def test_desync_moves_the_largest_part_of_a_complex_parameter_by_an_ulp(rank: Rank) -> None:
    for dtype, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        net = Phases(dtype)
        quiet_trainer(1, callbacks=[inject("desync", 1, 0, parameter="phase")]).fit(net, loader(own_data(0, 2)))
        far = torch.tensor(-3.0, dtype=real)
        farther = torch.nextafter(far, torch.tensor(-4.0, dtype=real))
        assert torch.view_as_real(net.phase.detach()).tolist() == [[0.5, 2.0], [0.0, farther.item()]]
