"""Scripts of manual optimization, under the strategy on two ranks and in plain torch on one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.gradients.one_process import TOLERANCE, gradients, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(3, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(LightningModule):
    """A generator (dense) and a critic (with spread experts), trained by a script."""

    def __init__(self, script: Callable[["Net", Any, Tensor], None] = lambda *_: None) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.script = script
        self.generator = nn.Linear(DIM, DIM).double()
        self.critic = nn.Sequential(nn.Linear(DIM, DIM).double(), TinyExperts(DIM, 4), nn.Linear(DIM, 1).double())
        self.seen: list[dict[str, Tensor | None]] = []

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(x).tanh()
        return (self.critic(fake) - 1).pow(2).mean(), self.critic(x).pow(2).mean() + self.critic(fake).mean()

    def note(self) -> None:
        self.seen.append(gradients(self))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.script(self, Engine(self), batch)

    def configure_optimizers(self) -> Any:
        both = [torch.optim.AdamW(self.generator.parameters(), lr=1e-2)]
        return [*both, torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)]


class Engine:
    """What a script calls, under the strategy."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.backward = net.manual_backward
        self.optimizers = net.optimizers()

    def paused(self) -> Any:
        return self.net.trainer.strategy.block_backward_sync()

    def toggled(self, optimizer: Any, *, sync_grad: bool = True) -> Any:
        return optimizer.toggle_model(sync_grad=sync_grad)

    def clip(self, max_norm: float, optimizer: Any = None) -> Tensor:
        return self.net.trainer.strategy.clip_grad_norm_(max_norm, optimizer=optimizer)

    def clip_value(self, value: float, optimizer: Any) -> None:
        self.net.clip_gradients(optimizer, value, "value")


class Plain:
    """The same in plain torch."""

    def __init__(self, net: Net, optimizers: list[torch.optim.Optimizer]) -> None:
        self.net = net
        self.optimizers = optimizers

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def paused(self) -> Any:
        return nullcontext()

    @contextmanager
    def toggled(self, optimizer: Any, *, sync_grad: bool = True) -> Iterator[None]:
        own = {id(p) for p in optimizer.param_groups[0]["params"]}
        others = [p for p in self.net.parameters() if id(p) not in own]
        for p in others:
            p.requires_grad = False
        yield
        for p in others:
            p.requires_grad = True

    def clip(self, max_norm: float, optimizer: Any = None) -> Tensor:
        optimizers = self.optimizers if optimizer is None else [optimizer]
        return nn.utils.clip_grad_norm_([p for o in optimizers for p in o.param_groups[0]["params"]], max_norm)

    def clip_value(self, value: float, optimizer: Any) -> None:
        nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], value)


def zero(engine: Any) -> None:
    for optimizer in engine.optimizers:
        optimizer.zero_grad()


def step(net: Net, engine: Any) -> None:
    net.note()
    for optimizer in engine.optimizers:
        optimizer.step()


def several_synchronised_backwards(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    for k in range(3):
        engine.backward(net.losses(x + k)[k % 2])
        net.note()
    step(net, engine)


def never_zeroed(net: Net, engine: Any, x: Tensor) -> None:
    for index in range(2):
        engine.backward(net.losses(x)[index])
    step(net, engine)


def raw_and_manual(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    net.losses(x)[0].backward()
    net.note()
    engine.backward(net.losses(x)[1])
    net.losses(2 * x)[0].backward()
    step(net, engine)


def paused_before_and_after(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    with engine.paused():
        engine.backward(net.losses(x)[0])
        net.losses(x)[1].backward()
    engine.backward(net.losses(x)[1])
    net.note()
    with engine.paused():
        net.losses(3 * x)[0].backward()
    net.losses(2 * x)[1].backward()
    net.note()
    engine.backward(net.critic(x).mean())  # the generator has no part in it
    step(net, engine)


def zeroed_in_place(net: Net, engine: Any, x: Tensor) -> None:
    for optimizer in engine.optimizers:
        optimizer.zero_grad(set_to_none=False)
    engine.backward(net.losses(x)[0])
    engine.backward(net.losses(x)[1])
    step(net, engine)


def gradients_set_by_the_user(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    first, second = net.losses(x)
    engine.backward(first, retain_graph=True)
    held = [p.grad.clone() for p in net.parameters()]
    zero(engine)
    engine.backward(second)
    for p, g in zip(net.parameters(), held, strict=True):  # as gradient surgery does
        p.grad = g if p.grad is None else 0.5 * (p.grad + g)
    net.note()
    engine.backward(net.losses(2 * x)[0])
    with engine.paused():
        engine.backward(net.losses(x)[0])
    for p in net.parameters():
        p.grad = p.grad.clone()
    engine.backward(net.losses(x)[1])
    step(net, engine)


def adversarial_input(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    engine.backward(net.losses(x)[0])
    leaf = x.clone().requires_grad_()
    engine.backward(leaf.pow(2).mean())  # reaches no parameter at all
    step(net, engine)


def gan(net: Net, engine: Any, x: Tensor) -> None:
    generator, critic = engine.optimizers
    for index, optimizer in enumerate((generator, critic)):
        with engine.toggled(optimizer):
            engine.backward(net.losses(x)[index])
            net.note()
            optimizer.step()
            if index == 1:
                zero(engine)


def accumulating_gan(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    generator, critic = engine.optimizers
    for index, optimizer in enumerate((critic, generator)):
        with engine.toggled(optimizer, sync_grad=False):
            engine.backward(net.losses(x)[index])
        with engine.toggled(optimizer):
            net.losses(2 * x)[index].backward()
            net.note()
            optimizer.step()


def clipped(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    engine.backward(sum(net.losses(x)))
    net.seen.append({"norm": engine.clip(0.05)})
    net.note()
    net.seen.append({"norm": engine.clip(0.02, engine.optimizers[1])})
    engine.clip_value(0.001, engine.optimizers[0])
    step(net, engine)


def gradient_penalty(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    leaf = x.clone().requires_grad_()
    slope = torch.autograd.grad(net.generator(leaf).tanh().sum(), leaf, create_graph=True)[0]
    engine.backward(net.losses(x)[0] + slope.pow(2).mean(), create_graph=True)
    net.note()
    assert all(p.grad is None or not p.grad.requires_grad or isinstance(engine, Plain) for p in net.parameters())
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad.detach()
    engine.backward(net.losses(x)[1], create_graph=False)
    step(net, engine)


def gradients_looked_at(net: Net, engine: Any, x: Tensor) -> None:
    zero(engine)
    engine.backward(net.losses(x)[1])
    # as gradient surgery and monitors do: nothing is added to .grad
    torch.autograd.grad(net.losses(x)[1], list(net.critic.parameters()))
    net.note()
    engine.backward(net.losses(2 * x)[0])
    step(net, engine)


class Planted(Exception):
    pass


def fail(_: Tensor) -> None:
    raise Planted


def backward_given_up(net: Net, engine: Any, x: Tensor) -> None:
    for backward in (engine.backward, Tensor.backward):
        zero(engine)
        fake = net.generator(x).tanh()
        loss = net.critic(fake).pow(2).mean()
        fake.register_hook(fail)  # when the critic's gradients have come
        with suppress(Planted):
            engine.backward(loss)
        zero(engine)
        backward(net.losses(x)[1])
        net.note()
    step(net, engine)


SCRIPTS = [
    gradients_looked_at,
    backward_given_up,
    several_synchronised_backwards,
    never_zeroed,
    raw_and_manual,
    paused_before_and_after,
    zeroed_in_place,
    gradients_set_by_the_user,
    adversarial_input,
    gan,
    accumulating_gan,
    clipped,
    gradient_penalty,
]


def in_plain_torch(script: Callable[..., None]) -> Net:
    net = Net()
    engine = Plain(net, net.configure_optimizers())
    for batch in BATCHES:
        script(net, engine, batch)
    return net


def own(values: dict[str, Tensor | None], rank: Rank, size: int) -> dict[str, Tensor | None]:
    """Of what one process has, what a rank of two holds."""
    place = rank.index % size
    return {n: v.chunk(size)[place] if v is not None and n == "critic.1.weight" else v for n, v in values.items()}


def check_script(script: Callable[..., None], rank: Rank, size: int) -> None:
    net = Net(script)
    loader = share_of(BATCHES, rank)
    trainer(strategy=MoEClipStrategy(expert_parallel_size=size, bucket_size_mb=2e-4)).fit(net, loader)
    true = in_plain_torch(script)
    assert len(net.seen) == len(true.seen) > 0
    for k, (got, want) in enumerate(zip(net.seen, true.seen, strict=True)):
        assert worst_error(got, own(want, rank, size)) < TOLERANCE, f"{script.__name__}, note {k}, ep {size}"
    got, want = ({n: p.data for n, p in m.named_parameters()} for m in (net, true))
    assert worst_error(got, want) < TOLERANCE, f"{script.__name__}: parameters, ep {size}"


@on_ranks(2)
def test_manual_optimization_equals_one_process(rank: Rank) -> None:
    for script in SCRIPTS:
        for size in (1, 2):
            check_script(script, rank, size)


@on_ranks(2, timeout_s=20)
def skip_a_backward_on_rank_1(rank: Rank) -> None:
    def script(net: Net, engine: Any, x: Tensor) -> None:
        zero(engine)
        if rank.index == 0 or len(net.seen) != 1:
            engine.backward(net.generator(x).pow(2).mean())
        step(net, engine)

    trainer().fit(Net(script), share_of(BATCHES, rank))


def test_a_backward_that_one_rank_leaves_out_is_an_error_on_all() -> None:
    with pytest.raises(RanksFailed) as caught:
        skip_a_backward_on_rank_1()
    assert any("The ranks reduce gradients of different steps" in text for text in caught.value.failures.values())


class InHalf(Net):
    """SGD alone, in which an error of a gradient is an error of the step and no more."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(half.parameters(), lr=1e-1) for half in (self.generator, self.critic)]


@on_ranks(2)
def test_clipping_before_the_step_sees_unscaled_gradients(rank: Rank) -> None:
    norms: dict[bool, list[float]] = {True: [], False: []}
    path = 0.0

    def script(net: Net, engine: Any, x: Tensor) -> None:
        nonlocal path
        zero(engine)
        engine.backward(sum(net.losses(x)))
        for optimizer, max_norm in zip(engine.optimizers, (0.05, 0.5), strict=True):
            norms[isinstance(engine, Plain)].append(float(engine.clip(max_norm, optimizer)))
            if optimizer is engine.optimizers[0]:
                engine.clip_value(0.02, optimizer)
            optimizer.step()
        if isinstance(engine, Plain):
            path += 0.1 * float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())

    net = InHalf(script).float()
    # half precision holds every gradient then
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
    trainer(plugins=[precision]).fit(net, share_of(BATCHES.float(), rank))

    true = InHalf()
    engine = Plain(true, true.configure_optimizers())
    for batch in BATCHES:
        script(true, engine, batch)
    # eleven bits of mantissa, and at most sixteen roundings between an input and a gradient: four products, their
    # operands and three tanh, and half as many on the way back
    bound = 16 * 2.0**-11
    assert len(norms[False]) == 6
    for got, want in zip(norms[False], norms[True], strict=True):
        assert abs(got / want - 1) < bound, norms
    error = torch.cat([(p - q).flatten() for p, q in zip(net.parameters(), true.parameters(), strict=True)]).norm()
    assert float(error) < bound * path


@on_ranks(2)
def test_one_clip_over_two_scaled_optimizers_leaves_unscaled_gradients_to_both_steps(rank: Rank) -> None:
    def script(net: Net, engine: Any, x: Tensor) -> None:
        zero(engine)
        engine.backward(sum(net.losses(x)))
        engine.clip(0.5)
        for optimizer in engine.optimizers:
            optimizer.step()

    net = InHalf(script).float()
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
    trainer(plugins=[precision]).fit(net, share_of(BATCHES.float(), rank))
    true = InHalf()
    engine = Plain(true, true.configure_optimizers())
    for batch in BATCHES:
        script(true, engine, batch)
    error = torch.cat([(p - q).flatten() for p, q in zip(net.parameters(), true.parameters(), strict=True)]).norm()
    # the norm of each of three steps is at most that of the clip; the roundings are those of the test above
    assert float(error) < 16 * 2.0**-11 * 3 * 0.1 * 0.5
