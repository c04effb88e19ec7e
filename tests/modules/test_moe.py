"""The layer on one process: truth, paths of multiplication, precision, copies and errors."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from lightning_moeclip.kernels.reference import moe_layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moeclip.modules import MoE
from lightning_moeclip.modules.experts import ACTIVATIONS, Path, Segments, choose_path, expert_mlp
from lightning_moeclip.parallel.mesh import ExpertAxis, Mesh
from lightning_moeclip.testing import Rank, on_ranks

DIM, HIDDEN, EXPERTS = 8, 12, 4


def build(**options: object) -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, HIDDEN, EXPERTS, **options).double()  # type: ignore[arg-type]


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, DIM, dtype=dtype)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("shape", [(9,), (2, 5), (0,), (3, 0), ()])
def test_output_and_gradients_equal_the_reference(top_k: int, shape: tuple[int, ...]) -> None:
    moe, x = build(top_k=top_k), tokens(*shape).requires_grad_()
    y = moe(x)
    assert y.shape == x.shape
    truth = moe_layer(x.view(-1, DIM), moe.router.weight, moe.w_in, moe.w_out, top_k, normalize_topk=top_k > 1)
    assert torch.allclose(y, truth.view_as(x), rtol=1e-12, atol=1e-14)
    inputs = [x, *moe.parameters()]
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad((y * cotangent).sum(), inputs)
    expected = torch.autograd.grad((truth.view_as(x) * cotangent).sum(), inputs)
    scale = max(float(g.norm()) for g in expected)
    assert all((f - e).norm() <= 1e-12 * max(scale, 1e-6) for f, e in zip(found, expected, strict=True))


def test_first_and_second_derivatives_pass_gradcheck() -> None:
    moe, x = build(), tokens(4).requires_grad_()
    names = [name for name, _ in moe.named_parameters()]

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), (x,))

    torch.autograd.gradcheck(layer, (x, *moe.parameters()), fast_mode=True)
    torch.autograd.gradgradcheck(layer, (x, *moe.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_written_in_place_has_the_derivative_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    h = torch.randn(50, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(50, dtype=torch.float64)
    (truth,) = torch.autograd.grad(ACTIVATIONS[name].forward(h), h, grad)
    assert torch.allclose(ACTIVATIONS[name].backward_(grad.clone(), h.detach()), truth, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("counts", [[3, 3, 3, 3], [0, 7, 1, 4], [0, 0, 12, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loop_bmm_and_grouped_paths_are_equal_and_idle_experts_get_exact_zeros(
    counts: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, DIM, dtype=dtype, requires_grad=True)
    w_in = torch.randn(EXPERTS, DIM, HIDDEN, dtype=dtype, requires_grad=True)
    w_out = torch.randn(EXPERTS, HIDDEN, DIM, dtype=dtype, requires_grad=True)
    segments = Segments.of(torch.tensor(counts))
    paths: list[Path] = ["loop", "bmm"] if dtype == torch.float64 else ["loop", "bmm", "grouped"]
    found = {}
    for path in paths:
        y = expert_mlp(x, w_in, w_out, segments, "gelu", path=path)
        # an expanded cotangent has zero strides
        found[path] = [y, *torch.autograd.grad(y, (x, w_in, w_out), torch.ones(1, dtype=dtype).expand_as(y))]
        for weight_grad in found[path][2:]:
            assert [bool(weight_grad[e].any()) for e in range(EXPERTS)] == [count > 0 for count in counts]
    # each number is a sum of at most max(HIDDEN, 12 rows) products of products
    bound = 4 * HIDDEN * torch.finfo(dtype).eps
    for path in paths[1:]:
        for mine, theirs in zip(found["loop"], found[path], strict=True):
            assert (mine - theirs).norm() <= bound * mine.norm()


def test_path_follows_dtype_strides_and_what_the_host_knows() -> None:
    def path(counts: list[int] | None, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> Path:
        w_in, w_out = torch.zeros(2, DIM, hidden, dtype=dtype), torch.zeros(2, hidden, DIM, dtype=dtype)
        segments = Segments(torch.tensor([5, 10], dtype=torch.int32), counts)
        return choose_path(0 if counts == [0, 0] else 10, w_in, w_out, segments)

    assert path([5, 5]) == path([6, 4]) == "bmm"
    assert path([9, 1]) == path(None) == "grouped"
    assert path([9, 1], torch.float64) == path(None, hidden=11) == path([0, 0]) == "loop"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_error_in_16_bits_is_at_most_twice_that_of_the_plain_composition(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = MoE(32, 64, 4).to(dtype)
    x = torch.randn(40, 32).to(dtype)
    exact = copy.deepcopy(layer).double()
    exact.router.double()
    routing = exact.router(x.double())
    cotangent = torch.randn(40, 32).to(dtype)

    def plain(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(4):
            token, slot = torch.where(routing.chosen == expert)
            out = nn.functional.gelu(x[token] @ w_in[expert]) @ w_out[expert]
            y = y.index_add(0, token, out * routing.weights[token, slot, None].detach().to(x.dtype))
        return y

    def results(run: object, x: Tensor, *weights: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = run(x, *weights)  # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, (*weights,), cotangent.to(y.dtype))]

    truth = results(plain, x.double(), exact.w_in, exact.w_out)
    theirs = results(plain, x, layer.w_in, layer.w_out)
    ours = results(lambda x, *_: layer(x), x, layer.w_in, layer.w_out)
    for expected, plain_result, result in zip(truth, theirs, ours, strict=True):
        assert (result.double() - expected).norm() <= 2 * (plain_result.double() - expected).norm()


def test_autocast_multiplies_in_bf16_and_gives_float32_gradients() -> None:
    torch.manual_seed(0)
    moe, x = MoE(DIM, HIDDEN, EXPERTS), tokens(6, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    truth = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    for tensor, expected in zip((x, *moe.parameters()), truth, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32
        # each value passes at most eight roundings to 8 bits
        assert (tensor.grad - expected).norm() < 8 * torch.finfo(torch.bfloat16).eps * expected.norm()


def test_experts_that_no_token_reaches_get_zero_gradients_not_none() -> None:
    moe = build(top_k=1)
    with torch.no_grad():
        moe.router.weight.zero_()[2] = 1.0
    moe(tokens(5).abs()).sum().backward()
    assert moe.tokens_per_expert.tolist() == [0, 0, 5, 0]
    for weight in moe.expert_parameters().values():
        assert weight.grad is not None
        assert [bool(weight.grad[e].any()) for e in range(EXPERTS)] == [False, False, True, False]


def test_nan_in_a_token_is_passed_on_and_stays_with_its_token() -> None:
    x = tokens(6)
    x[2, 0] = float("nan")
    assert build()(x).isnan().any(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("factor", [0.5, 1.0, 100.0])
def test_tokens_over_capacity_get_nothing_from_that_expert(factor: float) -> None:
    moe, x = build(capacity_factor=factor), tokens(10).requires_grad_()
    routing = moe.router(x)
    capacity = -(-int(factor * 20) // EXPERTS)
    y = moe(x)
    truth = torch.zeros_like(y)
    for expert in range(EXPERTS):
        token, slot = torch.where(routing.chosen == expert)
        kept = routing.weights[token, slot].argsort(descending=True, stable=True)[:capacity]
        out = nn.functional.gelu(x[token[kept]] @ moe.w_in[expert]) @ moe.w_out[expert]
        truth = truth.index_add(0, token[kept], out * routing.weights[token, slot][kept, None])
    assert torch.allclose(y, truth, rtol=1e-12, atol=1e-14)
    inputs = [x, *moe.parameters()]
    pairs = zip(*(torch.autograd.grad(t.square().sum(), inputs) for t in (y, truth)), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-13) for a, b in pairs)
    assert moe.tokens_per_expert.sum() == 20


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_loads_count_training_tokens_once_under_recomputation_validation_and_accumulation(use_reentrant: bool) -> None:
    moe = build()
    for num_tokens in (5, 3):
        x = tokens(num_tokens).requires_grad_()
        # the square needs y again, else recomputation would stop inside the layer
        checkpoint(lambda x: moe(x, tower="image").square(), x, use_reentrant=use_reentrant).sum().backward()
        moe(x, tower="text").sum().backward()
        moe.eval()(tokens(9), tower="image")
        moe.train()
    assert moe.tokens_per_expert.tolist() == moe.tokens_per_expert_by_tower["image"].tolist()
    assert moe.tokens_per_expert.sum() == 18
    assert moe.tokens_per_expert_by_tower["text"].sum() == 6
    load = moe.training_load
    assert {tower: int(counts.sum()) for tower, counts in load.items()} == {"image": 16, "text": 16}
    assert {tower: counts.tolist() for tower, counts in moe.training_drops.items()} == {
        "image": [0] * EXPERTS,
        "text": [0] * EXPERTS,
    }
    truth = sum((tokens(n) @ moe.router.weight.T).topk(2).indices.flatten().bincount(minlength=4) for n in (5, 3))
    assert torch.equal(load["image"], truth)
    assert {counts.dtype for counts in (*load.values(), *moe.training_drops.values())} == {torch.int64}


def test_load_only_grows_and_what_was_read_stays() -> None:
    moe = build()
    moe(tokens(5))
    read = moe.training_load[None]
    kept = read.clone()
    moe(tokens(5))
    assert torch.equal(read, kept)
    assert torch.equal(moe.training_load[None], 2 * kept)
    with pytest.raises(TypeError):
        moe.training_load[None] = kept  # type: ignore[index]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda moe: pickle.loads(pickle.dumps(moe))])
def test_copies_of_a_layer_start_with_no_load(copy_of: Callable[[MoE], MoE]) -> None:
    moe = build()
    moe(tokens(5).requires_grad_()).sum().backward()
    other = copy_of(moe)
    assert (dict(other.training_load), dict(other.training_drops)) == ({}, {})
    other(tokens(3))
    assert (other.training_load[None].sum(), moe.training_load[None].sum()) == (6, 10)


def test_drops_are_counted_per_expert_and_tower() -> None:
    moe = build(top_k=1, capacity_factor=1.0)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[1, 0] = moe.router.weight[2, 1] = 1.0
    x = torch.zeros(8, moe.dim, dtype=torch.float64)
    x[:6, 0] = x[6:, 1] = 1.0  # six choose expert 1, two expert 2; each takes 8 / 4
    moe(x, tower="image")
    moe(x.flip(0), tower="image")
    moe(x[:1], tower="text")
    moe.eval()(x, tower="image")
    assert {tower: counts.tolist() for tower, counts in moe.training_load.items()} == {
        "image": [0, 12, 4, 0],
        "text": [0, 1, 0, 0],
    }
    assert {tower: counts.tolist() for tower, counts in moe.training_drops.items()} == {
        "image": [0, 8, 0, 0],
        "text": [0, 0, 0, 0],
    }


def test_checkpointed_gradients_are_bit_equal() -> None:
    moe, x = build(), tokens(7).requires_grad_()
    plain = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    again = torch.autograd.grad(checkpoint(moe, x, use_reentrant=False).square().sum(), [x, *moe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# torch looks at .grad of every tensor that crosses a graph break, and hides the warning only from print
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layer_equals_eager() -> None:
    moe, x = build(), tokens(7).requires_grad_()
    truth = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    compiled = torch.compile(moe, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *moe.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(truth, found, strict=True))


def fake_axis(rank: int = 0, size: int = 2) -> ExpertAxis:
    return ExpertAxis(group=object(), rank=rank, size=size)  # type: ignore[arg-type]


def test_sharding_keeps_the_parameter_objects_and_restoring_gives_the_weights_back() -> None:
    moe = build()
    whole = {name: p.detach().clone() for name, p in moe.expert_parameters().items()}
    before = list(moe.parameters())
    axis = fake_axis(rank=1)
    moe.shard_experts(axis)
    moe.shard_experts(axis)
    assert [id(p) for p in moe.parameters()] == [id(p) for p in before]
    assert moe.expert_axis is axis
    assert (moe.num_experts, len(moe.tokens_per_expert)) == (EXPERTS, EXPERTS)
    for name, parameter in moe.expert_parameters().items():
        assert torch.equal(parameter, whole[name][2:])
        assert parameter.data.untyped_storage().nbytes() == whole[name].nbytes // 2
    with pytest.raises(RuntimeError, match=r"already spread over 2 ranks. Call restore_experts"):
        moe.shard_experts(fake_axis())
    moe.restore_experts(whole)
    assert moe.expert_axis is None
    assert [id(p) for p in moe.parameters()] == [id(p) for p in before]
    assert all(torch.equal(p, whole[name]) for name, p in moe.expert_parameters().items())


@pytest.mark.parametrize("is_spread", [True, False])
def test_copies_share_the_axis_and_pickles_forget_it(is_spread: bool) -> None:
    moe, x = build(), tokens(5)
    moe(x, tower="image")
    if is_spread:
        moe.shard_experts(fake_axis())
    twin = copy.deepcopy(moe)
    assert twin.expert_axis is moe.expert_axis
    assert twin.w_in is not moe.w_in
    assert torch.equal(twin.w_in, moe.w_in)
    assert twin.routing_record is not moe.routing_record
    thawed = pickle.loads(pickle.dumps(moe))
    assert thawed.expert_axis is None
    if is_spread:
        with pytest.raises(RuntimeError, match=r"holds 2 of its num_experts=4 experts and no axis.*restore_experts"):
            thawed(x)
    else:
        assert torch.equal(thawed(x), moe(x))


@on_ranks(2)
def test_copy_of_a_spread_layer_trains_on_the_same_process_group(rank: Rank) -> None:
    mesh = Mesh.build(2)
    assert mesh.experts is not None
    whole, x = build(), tokens(5)
    moe = build()
    moe.shard_experts(mesh.experts)
    twin = copy.deepcopy(moe)
    with mesh.experts.opened():
        assert torch.allclose(twin(x), whole(x), rtol=1e-12)


def test_bad_calls_say_what_to_write() -> None:
    moe = build()
    with pytest.raises(ValueError, match=r"num_experts=4 cannot be spread over expert_parallel_size=3. Use a multiple"):
        moe.shard_experts(fake_axis(size=3))
    with pytest.raises(ValueError, match=r"size=6. Use a multiple of 6, or MoEClipStrategy\(expert_parallel_size=2\)"):
        moe.shard_experts(fake_axis(size=6))
    with pytest.raises(ValueError, match=r"the last dimension must be 8. Project the tokens first.*Linear\(7, 8\)"):
        moe(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"got x in torch.float32 with experts in torch.float64.*Use x.to"):
        moe(torch.zeros(3, DIM))
    with pytest.raises(ValueError, match=r"restore_experts got .* needs exactly .* Gather all experts first"):
        moe.restore_experts({"w_in": moe.w_in.detach()})
    moe.shard_experts(fake_axis())
    with pytest.raises(
        RuntimeError, match=r"collective over the 2 ranks.*outside a step of the strategy.*Call it inside"
    ):
        moe(tokens(3))
