"""Steps that a user takes, leaves out or puts together in ways of his own, and what watching makes of them."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.callbacks import CosineRollback, VarianceHeatmap
from lightning_moeclip.callbacks.step_numbers import StepNumbers, reduce_step_numbers
from lightning_moeclip.modules import ContrastiveLoss
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.tiny_experts import TinyExperts
from tests.models import loader, quiet_trainer

RAW = r"SGD.step\(\) was called past Lightning.*Step what self.optimizers\(\) returns"
ALONE = r"watches loss and gradient norm alone: no loss tells of its directions. Use ContrastiveLoss or SigmoidLoss"


def pairs(num_batches: int, *, num_rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    images = [torch.randn(num_rows, 4, generator=generator) for _ in range(num_batches)]
    return [(x, x + 0.1 * torch.randn(num_rows, 4, generator=generator)) for x in images]


class Pair(LightningModule):
    """Two linear towers under the contrastive loss."""

    def __init__(self, *, lr: float = 0.05, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.loss = nn.Linear(4, 3), nn.Linear(4, 3), ContrastiveLoss()
        self.lr, self.automatic_optimization = lr, automatic

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(self.image(batch[0]), self.text(batch[1]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def run(module: LightningModule, data: list, *callbacks: Callback, **arguments: Any) -> list[Tensor]:
    """Parameters after a fit on one process."""
    quiet_trainer(1, callbacks=list(callbacks), **arguments).fit(module, loader(data))
    return [p.detach().clone() for p in module.parameters()]


def scaled(precision: str) -> dict[str, Any]:
    """Arguments of a Trainer; a plugin each, since it keeps the state of a run."""
    settings = {"init_scale": 8.0} if precision == "16-mixed" else {}
    return {"plugins": [MoEClipPrecision(precision, device="cpu", **settings)]}


def have_same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Notes(Callback):
    """What is known of each step before it is taken."""

    def __init__(self) -> None:
        self.numbers: list[StepNumbers] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        world = trainer.strategy
        automatic = pl_module.automatic_optimization
        self.losses.append(world.step_loss.item())
        self.numbers.append(
            reduce_step_numbers(world, None, micro_batches=trainer.accumulate_grad_batches if automatic else None)
        )


class ClosureByHand(Pair):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class ClosureWithoutResult(Pair):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> None:
            optimizer_closure()

        optimizer.step(closure=closure)


@pytest.mark.parametrize("module", [ClosureByHand, ClosureWithoutResult])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_closure_without_a_result_trains_with_and_without_callbacks(module: type[Pair], precision: str) -> None:
    plain = run(Pair(), pairs(4), **scaled(precision))
    assert not have_same_bits(plain, list(Pair().parameters()))
    assert have_same_bits(run(module(), pairs(4), **scaled(precision)), plain)
    assert have_same_bits(run(module(), pairs(4), CosineRollback(), **scaled(precision)), plain)


class NoneInLast(Pair):
    """Of two micro-batches the second has no loss, or none that counts."""

    def __init__(self, *, says_none: bool) -> None:
        super().__init__()
        self.says_none = says_none

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss_of(batch)
        if batch_idx % 2 == 0:
            return loss
        return None if self.says_none else loss * 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned `None`")
def test_none_in_the_last_micro_batch_keeps_what_the_others_gave(precision: str) -> None:
    def after(*callbacks: Callback, says_none: bool) -> list[Tensor]:
        module = NoneInLast(says_none=says_none)
        return run(module, pairs(4), *callbacks, accumulate_grad_batches=2, **scaled(precision))

    zero = after(says_none=False)
    assert not have_same_bits(zero, list(Pair().parameters()))
    assert have_same_bits(after(says_none=True), zero)
    assert have_same_bits(after(CosineRollback(), says_none=True), zero)


class AllNone(Pair):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        return None


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned `None`")
def test_no_loss_at_all_is_no_step_and_nothing_that_counts(precision: str) -> None:
    notes = Notes()
    after = run(AllNone(), pairs(3), CosineRollback(), notes, **scaled(precision))
    assert have_same_bits(after, list(Pair().parameters()))
    assert [(n.is_whole, n.grad_norm) for n in notes.numbers] == [(False, 0.0)] * 3


class NeedsClosure(torch.optim.SGD):
    """As sharpness-aware minimizers are: optional in the signature alone."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None, "this optimizer requires a closure"
        return super().step(closure)


class Fails(torch.optim.SGD):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        raise ValueError("an error of its own")


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (
            NeedsClosure,
            TypeError,
            r"NeedsClosure.step\(\) was called without its closure.*requires a closure.*Leave out",
        ),
        (Fails, ValueError, "an error of its own"),
    ],
)
def test_an_optimizer_that_asks_for_its_closure_is_told_why_there_is_none(
    optimizer: type[torch.optim.SGD], error: type[Exception], message: str
) -> None:
    module = Pair()
    module.configure_optimizers = lambda: optimizer(module.parameters(), 0.1)  # type: ignore[method-assign]
    with pytest.raises(error, match=message):
        run(module, pairs(1), CosineRollback())


class DropsOne(Pair):
    """Leaves out the step of one batch, by hand or, in automatic optimization, by running the closure alone."""

    def __init__(self, dropped: int, *, automatic: bool, factor: float) -> None:
        super().__init__(lr=0.0, automatic=automatic)
        self.dropped, self.factor = dropped, factor
        self.rollback: CosineRollback | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if self.rollback is not None:
            first = torch.ones(2, 2) if batch_idx == self.dropped else torch.eye(2)
            self.rollback.hand_in(first, torch.ones(2, 2))
        loss = self.loss_of(batch) * (self.factor if batch_idx == self.dropped else 1.0)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if batch_idx == self.dropped:
            optimizer.zero_grad()
        else:
            optimizer.step()
        return None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == self.dropped:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("factor", [1e3, math.nan])
def test_what_went_backward_and_was_dropped_is_no_part_of_the_next_step(automatic: bool, factor: float) -> None:
    data = pairs(1) * 90
    rollback, notes = CosineRollback(), Notes()
    module = DropsOne(85, automatic=automatic, factor=factor)
    run(module, data, rollback, notes)
    assert not rollback.history
    assert len(notes.losses) == 89
    assert set(notes.losses) == {notes.losses[0]}


@pytest.mark.parametrize("automatic", [True, False])
def test_cosines_of_dropped_gradients_are_no_part_of_the_next_step(automatic: bool) -> None:
    seen = {}
    for dropped in (1, -1):
        module, rollback = DropsOne(dropped, automatic=automatic, factor=1.0), CosineRollback()
        module.rollback = rollback
        seen[dropped] = cosines_of(module, pairs(3), rollback)
    assert seen[1] == [seen[-1][0], seen[-1][2]]
    assert seen[-1][0] != seen[-1][2]  # it would be seen


class HandsInBehind(Pair):
    """Tells of its directions behind the backward; one batch has no step, and a cosine of its own."""

    def __init__(self, rollback: CosineRollback) -> None:
        super().__init__(lr=0.0)
        self.rollback, self.batch_idx = rollback, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        return (self.image(batch[0]) - self.text(batch[1])).square().mean()

    def on_after_backward(self) -> None:
        first = torch.tensor([-1e6 if self.batch_idx == 1 else 1.0, 0.0])
        self.rollback.hand_in(first, torch.ones(2))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


def cosines_of(module: LightningModule, data: list, rollback: CosineRollback, **arguments: Any) -> list[float | None]:
    cosines = []

    class Watch(Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            assert rollback.observation is not None
            cosines.append(rollback.observation.cosine)

    run(module, data, rollback, Watch(), **arguments)
    return cosines


def test_cosines_handed_in_behind_a_backward_that_was_dropped_are_no_part_of_the_next_step() -> None:
    rollback = CosineRollback()
    assert cosines_of(HandsInBehind(rollback), pairs(4), rollback) == pytest.approx([math.sqrt(0.5)] * 3)


class Cached(Pair):
    """Cotangents of the features first, then a backward that takes them on: the loss runs backward by itself."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            features = self.image(batch[0]), self.text(batch[1])
        leaves = [x.requires_grad_() for x in features]
        cotangents = torch.autograd.grad(self.loss(*leaves), leaves)
        again = self.image(batch[0]), self.text(batch[1])
        return sum((x * cotangent).sum() for x, cotangent in zip(again, cotangents, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_differentiated_within_the_step_tells_of_its_directions(accumulate: int) -> None:
    data = pairs(4)
    arguments = {"accumulate_grad_batches": accumulate}
    wanted = cosines_of(Pair(lr=0.0), data, CosineRollback(), **arguments)
    assert len(wanted) == 4 // accumulate
    assert cosines_of(Cached(lr=0.0), data, CosineRollback(), **arguments) == pytest.approx(wanted)


class Steady(LightningModule):
    """A loss that stays near -1; None in chosen batches."""

    def __init__(self, *, nones: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight, self.nones = nn.Parameter(torch.zeros(4)), nones

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.nones else (self.weight * batch).sum() - 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-6)


def noise(num_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.ones(4) + 0.01 * torch.randn(4, generator=generator) for _ in range(num_batches)]


@pytest.mark.parametrize(("num_batches", "nones"), [(321, ()), (323, (170,))], ids=["remainder", "none"])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned `None`", "ignore:.*watches loss and gradient norm alone")
def test_a_step_of_fewer_micro_batches_is_judged_by_their_mean(num_batches: int, nones: tuple[int, ...]) -> None:
    rollback, notes = CosineRollback(), Notes()
    run(Steady(nones=nones), noise(num_batches), rollback, notes, accumulate_grad_batches=4)
    assert not rollback.history
    assert rollback.observation is not None
    assert rollback.observation.is_judged
    assert [n.loss for n in notes.numbers] == pytest.approx([-1.0] * 81, rel=0.01)
    assert [n.grad_norm for n in notes.numbers] == pytest.approx([2.0] * 81, rel=0.01)


@on_ranks(2)
def test_ranks_with_different_numbers_of_losses_are_no_measure(rank: Rank) -> None:
    notes = Notes()
    trainer = quiet_trainer(2, callbacks=[notes], accumulate_grad_batches=2)
    trainer.fit(Steady(nones=(2,) if rank.index else ()), loader(noise(6)))
    assert [n.is_whole for n in notes.numbers] == [True, False, True]
    assert [n.loss for n in notes.numbers] == pytest.approx([-1.0] * 3, rel=1e-3)


class OnlyExperts(LightningModule):
    """The optimizer holds experts alone; those of rank 1 get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.experts = nn.Linear(4, 4).double(), TinyExperts(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.experts.are_resting = self.global_rank == 1
        return self.experts(self.dense(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.experts.parameters(), 0.1)


@on_ranks(2)
def test_a_rank_without_gradients_counts_its_losses_like_any_other(rank: Rank) -> None:
    notes = Notes()
    strategy = MoEClipStrategy(expert_parallel_size=2)
    trainer = quiet_trainer(2, strategy=strategy, callbacks=[notes], accumulate_grad_batches=2)
    generator = torch.Generator().manual_seed(0)
    trainer.fit(OnlyExperts(), loader([torch.randn(6, 4, generator=generator, dtype=torch.float64)] * 4))
    assert [n.is_whole for n in notes.numbers] == [True, True]


class Wrapper:
    """An optimizer to Lightning, and none to torch."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)


class Lookahead(Wrapper, torch.optim.Optimizer):
    """One to both, which never called ``Optimizer.__init__``."""


class Wrapped(Pair):
    def __init__(self, wrapper: type[Wrapper]) -> None:
        super().__init__()
        self.wrapper = wrapper

    def configure_optimizers(self) -> Any:
        return self.wrapper(super().configure_optimizers())


@pytest.mark.parametrize("callbacks", [0, 1])
def test_an_optimizer_that_wraps_another_trains_as_that_one(callbacks: int) -> None:
    plain = run(Pair(), pairs(4), accumulate_grad_batches=2)
    watching = [CosineRollback() for _ in range(callbacks)]
    assert have_same_bits(run(Wrapped(Lookahead), pairs(4), *watching, accumulate_grad_batches=2), plain)


def test_losses_of_what_is_an_optimizer_to_lightning_alone_are_counted() -> None:
    found, wanted = Notes(), Notes()
    run(Pair(), pairs(4), wanted, accumulate_grad_batches=2)
    run(Wrapped(Wrapper), pairs(4), found, accumulate_grad_batches=2)
    assert found.losses == wanted.losses


class Raw(Pair):
    def __init__(self) -> None:
        super().__init__(automatic=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))
        optimizer.step()


@pytest.mark.parametrize("callback", [CosineRollback, VarianceHeatmap])
def test_steps_past_lightning_are_told_of_once(callback: type[Callback], tmp_path: Any) -> None:
    arguments = {"log_every_n_steps": 1, "default_root_dir": tmp_path}
    with pytest.warns(UserWarning, match=RAW) as told:
        after = run(Raw(), pairs(3), callback(), **arguments)
    assert len([w for w in told if "past Lightning" in str(w.message)]) == 1
    assert have_same_bits(run(Raw(), pairs(3), **arguments), after)  # nobody watches: nothing to tell


class Adversary(Pair):
    """A discriminator steps first, and says nothing of directions."""

    def __init__(self) -> None:
        super().__init__(automatic=False)
        self.other = nn.Linear(3, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        losses = (self.other(self.image(batch[0]).detach()).square().mean(), self.loss_of(batch))
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        towers = [p for layer in (self.image, self.text, self.loss) for p in layer.parameters()]
        return torch.optim.SGD(self.other.parameters(), 0.1), torch.optim.SGD(towers, 0.1)


class NoneFirst(Pair):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        return self.loss_of(batch) if batch_idx else None


@pytest.mark.parametrize("module", [Adversary, NoneFirst])
@pytest.mark.filterwarnings("ignore:.*training_step.*returned `None`")
def test_directions_that_come_later_are_no_reason_to_warn(module: type[Pair]) -> None:
    rollback = CosineRollback()
    run(module(), pairs(3), rollback)  # warnings are errors here
    assert rollback.observation is not None
    assert rollback.observation.cosine is not None


def test_a_loss_without_directions_is_told_of_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(Steady(), noise(3), CosineRollback())
    assert len([w for w in told if "loss and gradient norm alone" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match=ALONE):
        run(Steady(), noise(1), CosineRollback())
