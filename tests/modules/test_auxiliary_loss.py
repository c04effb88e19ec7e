"""The auxiliary loss counts the tokens of all ranks, tower by tower, and forgets each step."""

import weakref

import pytest
import torch
import torch.distributed as dist
from lightning_moeclip.kernels.reference import load_balance_loss, router_z_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.modules import MoE, auxiliary_loss
from lightning_moeclip.testing import Rank, on_ranks

DIM, EXPERTS = 5, 4
ROWS = {1: [12], 2: [12, 0], 4: [5, 1, 0, 6]}


class Towers(nn.Module):
    """A layer that both towers share, and one of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = MoE(DIM, 6, EXPERTS)
        self.image = MoE(DIM, 6, EXPERTS, top_k=1)
        self.text = MoE(DIM, 6, EXPERTS, top_k=3)
        self.double()

    def forward(self, x: Tensor, caption: Tensor, *, names: tuple[str, str] = ("image", "text")) -> Tensor:
        image = self.image(self.shared(x, tower=names[0]), tower=names[0])
        text = self.text(self.shared(caption, tower=names[1]), tower=names[1])
        return image.sum() + text.sum()


def expected(model: Towers, x: Tensor, caption: Tensor, balance: float, z: float) -> Tensor:
    """By the reference, from all tokens: towers of a layer averaged, layers summed."""

    def both(moe: MoE, tokens: Tensor) -> Tensor:
        logits = tokens @ moe.router.weight.T
        return balance * load_balance_loss(logits, moe.top_k) + z * router_z_loss(logits)

    model.eval()
    shared = (both(model.shared, x) + both(model.shared, caption)) / 2
    return shared + both(model.image, model.shared(x)) + both(model.text, model.shared(caption))


def tokens() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(12, DIM, dtype=torch.float64), torch.randn(12, DIM, dtype=torch.float64)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True) if g is not None}


def check_world(rank: Rank, names: tuple[str, str]) -> None:
    x, caption = tokens()
    truth_model, model = Towers(), Towers()
    truth = expected(truth_model, x, caption, 0.3, 0.2)
    truth_grads = gradients(truth, truth_model)
    mine = (part.split(ROWS[rank.world_size])[rank.index] for part in (x, caption))
    model(*mine, names=names)
    loss = auxiliary_loss(model, balance=0.3, z=0.2)
    grads = gradients(loss, model)
    assert grads.keys() == truth_grads.keys()
    total = loss.detach().clone()
    if rank.world_size > 1:
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
    assert abs(total / rank.world_size - truth) < 1e-12
    for name, gradient in truth_grads.items():
        assert (grads[name] / rank.world_size - gradient).norm() < 1e-10 * gradient.norm(), name


def test_one_process_gives_the_reference() -> None:
    check_world(Rank(0, 1), ("image", "text"))


@on_ranks(2)
def test_2_ranks_give_the_loss_and_gradients_of_one_process_also_with_an_empty_rank(rank: Rank) -> None:
    check_world(rank, ("image", "text"))
    check_world(rank, ("depth", "audio"))


@on_ranks(4)
def test_4_ranks_give_the_loss_and_gradients_of_one_process(rank: Rank) -> None:
    check_world(rank, ("image", "text"))


@pytest.mark.parametrize("name", ["text", "depth"])
@on_ranks(2)
def test_a_tower_that_one_rank_never_calls_hangs_nothing(rank: Rank, name: str) -> None:
    x, caption = tokens()
    moe = MoE(DIM, 6, EXPERTS).double()
    logits = [part @ moe.router.weight.detach().T for part in (x, caption)]
    truth = sum(load_balance_loss(part, 2) for part in logits) / 2
    for _ in range(2):
        if rank.index == 0:
            moe(x, tower="image")
        else:
            moe(caption, tower=name)
        total = auxiliary_loss(moe, balance=1.0).detach()
        dist.all_reduce(total)
        assert abs(total / 2 - truth) < 1e-12


@on_ranks(2)
def test_one_all_reduce_serves_all_layers_and_towers(rank: Rank) -> None:
    model = Towers()
    model(*tokens())
    calls = []
    original, original_objects = dist.all_reduce, dist.all_gather_object
    dist.all_reduce = lambda *args, **kwargs: (calls.append("all_reduce"), original(*args, **kwargs))[1]
    dist.all_gather_object = lambda *args, **kwargs: calls.append("all_gather_object")
    try:
        auxiliary_loss(model).backward()
    finally:
        dist.all_reduce, dist.all_gather_object = original, original_objects
    assert calls == ["all_reduce"]


def test_router_gradient_changes_with_the_coefficient() -> None:
    """An auxiliary loss that is computed and dropped would not: huggingface's and Automodel's fault."""
    found = []
    for balance in (0.0, 0.1, 0.2):
        model = Towers()
        loss = model(*tokens())
        found.append(gradients(loss + auxiliary_loss(model, balance=balance), model)["shared.router.weight"])
    first, second = found[1] - found[0], found[2] - found[0]
    assert first.norm() > 1e-6
    assert (second - 2 * first).norm() < 1e-12


def test_starved_experts_of_one_tower_show_though_the_total_is_balanced() -> None:
    """Image tokens go to expert 0, text tokens to expert 1: balanced in all, starved in each."""
    moe = MoE(2, 4, 2, top_k=1).double()
    with torch.no_grad():
        moe.router.weight.copy_(10 * torch.eye(2))
    image, text = torch.eye(2, dtype=torch.float64).repeat_interleave(3, 0).split(3)
    moe(torch.cat([image, text]))
    together = auxiliary_loss(moe, balance=1.0).item()
    moe(image, tower="image")
    moe(text, tower="text")
    apart = auxiliary_loss(moe, balance=1.0).item()
    assert abs(together - 1.0) < 1e-12
    assert abs(apart - 2.0) < 1e-3


def test_calls_of_a_shared_block_in_one_step_add_up() -> None:
    x, more = tokens()
    moe = MoE(DIM, 6, EXPERTS).double()
    y = moe(x), moe(more)
    found = auxiliary_loss(moe, balance=1.0, z=1.0)
    logits = torch.cat([x, more]) @ moe.router.weight.T
    assert abs(found - load_balance_loss(logits, 2) - router_z_loss(logits)) < 1e-12
    assert len(y) == 2
    assert auxiliary_loss(moe).item() == 0.0


def test_forwards_whose_loss_was_never_asked_do_not_add_up() -> None:
    x, more = tokens()
    moe = MoE(DIM, 6, EXPERTS).double()
    truth = load_balance_loss(more @ moe.router.weight.T, 2)
    y = moe(x)
    y.sum().backward()
    kept = moe(more)
    assert abs(auxiliary_loss(moe, balance=1.0) - truth) < 1e-12
    moe(x)  # its graph is gone at once
    kept = moe(more)
    assert abs(auxiliary_loss(moe, balance=1.0) - truth) < 1e-12
    moe.eval()
    with torch.no_grad():
        for _ in range(3):
            moe(x)
        assert auxiliary_loss(moe, balance=1.0).item() == pytest.approx(load_balance_loss(x @ moe.router.weight.T, 2))
        moe(x, tower="text")
    moe.train()
    kept = moe(more)
    assert abs(auxiliary_loss(moe, balance=1.0) - truth) < 1e-12
    assert kept is not None


def test_a_tower_without_gradients_counts_beside_one_that_trains() -> None:
    x, more = tokens()
    moe = MoE(DIM, 6, EXPERTS).double()
    y = moe(x, tower="text")
    with torch.no_grad():
        moe(more, tower="image")
    truth = [load_balance_loss(part @ moe.router.weight.T, 2) for part in (x, more)]
    loss = auxiliary_loss(moe, balance=1.0)
    assert abs(loss - sum(truth) / 2) < 1e-12
    mine, expected = (torch.autograd.grad(v, moe.router.weight)[0] for v in (loss, truth[0] / 2))
    assert (mine - expected).norm() < 1e-12
    assert y is not None


def test_no_graph_outlives_the_reading() -> None:
    moe = MoE(DIM, 6, EXPERTS).double()
    x = (tokens()[0].requires_grad_() * 2).clone()
    ghost = weakref.ref(x)
    y = moe(x)
    auxiliary_loss(moe)
    del x, y
    assert ghost() is None


def test_recomputation_adds_nothing() -> None:
    x, _ = tokens()
    x.requires_grad_()
    found = {}
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        moe = MoE(DIM, 6, EXPERTS).double()

        def block(x: Tensor, moe: MoE = moe) -> Tensor:
            return moe(x).square()  # needs y again, else recomputation would stop inside the layer

        y = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
        loss = y.sum() + auxiliary_loss(moe, balance=0.5)
        loss.backward()
        assert moe.training_load[None].sum() == 2 * len(x)
        assert auxiliary_loss(moe).item() == 0.0
        found[is_checkpointed] = moe.router.weight.grad
    assert torch.equal(found[False], found[True])  # type: ignore[arg-type]


def test_reentrant_checkpointing_says_that_the_gradient_is_lost() -> None:
    x, _ = tokens()
    x.requires_grad_()
    moe = MoE(DIM, 6, EXPERTS).double()
    y = checkpoint(moe, x, use_reentrant=True)
    loss = y.sum() + auxiliary_loss(moe)
    with pytest.raises(RuntimeError, match=r"its gradient is lost. Use .*use_reentrant=False"):
        loss.backward()


def test_a_module_without_moe_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"auxiliary_loss\(Linear\) found no MoE layer in it. Pass the module"):
        auxiliary_loss(nn.Linear(2, 2))
