"""Steps that a user takes, leaves out or puts together in ways of his own, under callbacks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip.binding import Callback
from lightning_moeclip.callbacks import CosineRollback, VarianceHeatmap
from tests.callbacks.pair import Notes, Pair, have_same_bits, pairs, run, scaled

# what accumulates here is a contrastive loss, on purpose
pytestmark = pytest.mark.filterwarnings(r"ignore:.*\[MOE404:")

RAW = r"SGD.step\(\) was called past Lightning.*Step what self.optimizers\(\) returns"


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
