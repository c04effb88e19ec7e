"""The rules for the scale of the logits: float32, bounded after the step, never decayed."""

import copy
import functools
import gc
import io
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.modules import ContrastiveLoss, SigmoidLoss, logit_scale
from lightning_moeclip.testing import Rank, on_ranks

LOSSES = [ContrastiveLoss, SigmoidLoss]
BOUND = math.log(100)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, **kw: torch.optim.SGD(params, lr=0.1, momentum=0.9, **kw),
    "sgd_fused": lambda params, **kw: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True, **kw),
    "adam": lambda params, **kw: torch.optim.Adam(params, lr=0.1, **kw),
    "adamw": lambda params, **kw: torch.optim.AdamW(params, lr=0.1, **kw),
    "adamw_foreach": lambda params, **kw: torch.optim.AdamW(params, lr=0.1, foreach=True, **kw),
    "adamw_fused": lambda params, **kw: torch.optim.AdamW(params, lr=0.1, fused=True, **kw),
    "adafactor": lambda params, **kw: torch.optim.Adafactor(params, lr=0.1, **kw),
    "rmsprop": lambda params, **kw: torch.optim.RMSprop(params, lr=0.1, **kw),
}


def reloaded(loss: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(loss, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 3)
        self.loss = SigmoidLoss()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def give_gradients(module: nn.Module, step: int) -> None:
    for index, p in enumerate(module.parameters()):
        p.grad = torch.full_like(p, 0.3 - 0.1 * index + 0.05 * step)


def scalars_after_steps(make: Callable[..., torch.optim.Optimizer], weight_decay: float, closure: bool) -> Model:
    net = model()
    optimizer = make(net.parameters(), weight_decay=weight_decay)

    def run_model(step: int) -> None:
        assert len(optimizer.param_groups) == 1
        give_gradients(net, step)

    for step in range(4):
        if closure:
            optimizer.step(functools.partial(run_model, step))
        else:
            run_model(step)
            optimizer.step()
    return net


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scale_and_bias_step_as_without_decay_and_the_rest_as_with_it(name: str, closure: bool) -> None:
    make = OPTIMIZERS[name]
    plain, decayed = (scalars_after_steps(make, decay, closure) for decay in (0.0, 0.1))
    assert torch.equal(decayed.loss.logit_scale, plain.loss.logit_scale)
    assert torch.equal(decayed.loss.logit_bias, plain.loss.logit_bias)
    # and a layer of the same values, alone in its optimizer, is the truth for what is decayed
    net = model()
    optimizer = make(net.tower.parameters(), weight_decay=0.1)
    for step in range(4):
        give_gradients(net, step)
        optimizer.step()
    assert torch.equal(decayed.tower.weight, net.tower.weight)
    assert not torch.equal(decayed.tower.weight, plain.tower.weight)


def test_plain_adamw_would_decay_a_scale_of_the_users_own() -> None:
    ours, users = ContrastiveLoss(), nn.Parameter(ContrastiveLoss().logit_scale.detach().clone())
    optimizer = torch.optim.AdamW([ours.logit_scale, users], lr=0.1, weight_decay=0.1)
    before = users.item()
    for p in (ours.logit_scale, users):
        p.grad = torch.zeros(())
    optimizer.step()
    assert users.item() == pytest.approx(before * (1 - 0.1 * 0.1))
    assert ours.logit_scale.item() == pytest.approx(before, rel=1e-7)


def test_optimizer_looks_the_same_before_and_after_the_step_and_resumes() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    group, params = optimizer.param_groups[0], optimizer.param_groups[0]["params"]
    give_gradients(net, 0)
    optimizer.step()
    assert optimizer.param_groups == [group]
    assert group["params"] is params
    assert group["weight_decay"] == 0.1
    state = optimizer.state_dict()
    assert [g["params"] for g in state["param_groups"]] == [[0, 1, 2, 3]]
    other = model()
    torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.1).load_state_dict(state)


def test_group_of_scalars_alone_keeps_its_decay_setting() -> None:
    net = model()
    groups = [{"params": net.tower.parameters()}, {"params": net.loss.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    give_gradients(net, 0)
    for p in net.loss.parameters():
        p.grad.zero_()
    optimizer.step()
    assert net.loss.logit_bias.item() == -10
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1]


def test_closure_that_raises_leaves_the_groups_whole() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)

    def fail() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        optimizer.step(closure=fail)
    assert len(optimizer.param_groups) == 1


class Breaks(torch.optim.SGD):
    def step(self, closure: Callable | None = None) -> None:
        raise MemoryError("planted")


def test_update_that_raises_leaves_whole_groups_in_the_state_dict() -> None:
    net = model()
    optimizer = Breaks(net.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.raises(MemoryError, match="planted"):
        optimizer.step()
    assert len(optimizer.state_dict()["param_groups"]) == 1
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_scale_beyond_the_bound_has_a_gradient_and_is_at_the_bound_after_the_step(rank: Rank) -> None:
    loss = ContrastiveLoss()
    with torch.no_grad():
        loss.logit_scale.fill_(5.0)
    image, text = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(rank.index))
    value = loss(image, text)
    value.backward()
    assert value.isfinite()
    assert loss.logit_scale.grad.abs() > 1e-3
    loss.logit_scale.grad.fill_(-1.0)  # a pull upwards
    torch.optim.AdamW(loss.parameters(), lr=0.1).step()
    assert loss.logit_scale.item() == pytest.approx(BOUND, rel=1e-7)


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, reloaded], ids=["same", "deepcopy", "pickle"])
def test_bound_holds_for_copies_in_the_stepped_optimizer_and_nowhere_else(copied: Callable) -> None:
    loss, other = copied(ContrastiveLoss(max_scale=50.0)), ContrastiveLoss()
    for module, value in ((loss, 4.2), (other, 9.0)):
        nn.init.constant_(module.logit_scale, value)
    loss.logit_scale.grad = torch.tensor(0.0)
    torch.optim.SGD(loss.parameters(), lr=0.1).step()
    assert loss.logit_scale.item() == pytest.approx(math.log(50))
    assert other.logit_scale.item() == 9.0
    nn.init.constant_(loss.logit_scale, -0.5)
    loss.after_step()
    assert loss.logit_scale.item() == 0.0


def test_nan_passes_the_bound() -> None:
    loss = ContrastiveLoss()
    nn.init.constant_(loss.logit_scale, math.nan)
    loss.after_step()
    assert loss.logit_scale.isnan()


def test_losses_and_optimizers_are_not_kept_alive() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    give_gradients(net, 0)
    optimizer.step()
    gone = [weakref.ref(x) for x in (net.loss, optimizer)]
    del net, optimizer
    gc.collect()
    assert [x() for x in gone] == [None, None]
    assert not any(undo for undo in logit_scale._splits.values())


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scalars_stay_float32_with_all_their_digits_in_a_narrower_model(kind: type, dtype: torch.dtype) -> None:
    net = nn.Sequential(nn.Linear(2, 2), kind(init_temperature=0.07))
    before = [p.detach().clone() for p in net[1].parameters()]
    assert net.to(dtype) is net
    expected = torch.promote_types(dtype, torch.float32)
    assert net[0].weight.dtype == dtype
    for p, old in zip(net[1].parameters(), before, strict=True):
        assert p.dtype == expected
        assert torch.equal(p, old.to(expected))
        assert p.ndim == 0


@pytest.mark.parametrize("kind", LOSSES)
def test_scalars_are_float32_under_a_narrow_default_dtype(kind: type) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = kind(init_temperature=0.07)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in loss.parameters()} == {torch.float32}
    assert loss.logit_scale.item() == pytest.approx(math.log(1 / 0.07), rel=1e-7)


@pytest.mark.parametrize("kind", LOSSES)
def test_meta_loss_is_filled_by_reset_parameters(kind: type) -> None:
    with torch.device("meta"):
        loss = kind()
    loss.to_empty(device="cpu")
    loss.reset_parameters()
    expected: list[Tensor] = list(kind().parameters())
    assert all(torch.equal(p, q) for p, q in zip(loss.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_temperature": 0.0}, r"init_temperature=0.0 must lie in .*\[0.01, 1\].* Use ContrastiveLoss"),
        ({"init_temperature": 0.001}, r"init_temperature=0.001 must lie in"),
        ({"init_temperature": 2.0}, r"init_temperature=2.0 must lie in"),
        ({"init_temperature": math.nan}, r"init_temperature=nan must lie in"),
        ({"max_scale": 1.0}, r"max_scale=1.0 must be a number above 1"),
        ({"max_scale": math.inf}, r"max_scale=inf must be a number above 1"),
        ({"chunk_size": 0}, r"chunk_size=0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContrastiveLoss(**arguments)


def test_bad_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"init_bias=nan must be finite. Use SigmoidLoss"):
        SigmoidLoss(init_bias=math.nan)
