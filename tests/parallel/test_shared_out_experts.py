"""Experts that another library has shared out over ranks train as in one process, which can load what they save."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.parallel.interop import check_expert_lists, check_expert_order, expert_lists
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.roles import read_roles
from lightning_moeclip.state.canonical import own_expert_names
from lightning_moeclip.state.rank_experts import RankExperts
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import OneProcess, batches, gradient_errors, gradients_of, loader, quiet_trainer, share
from tests.shared_out import IDLE_EXPERT, NUM_EXPERTS, SharedOutTowers

BOUND = 1e-10
CLIP = 0.05
NUM_STEPS = 3
LIST = re.compile(r"(?<=deepspeed_experts\.)\d+")


def global_name(name: str, share_of_rank: int, rank: int) -> str:
    return LIST.sub(lambda found: str(int(found[0]) + rank * share_of_rank), name)


def train_one_process() -> OneProcess:
    module = SharedOutTowers(1)
    done = OneProcess(module)
    optimizer = module.configure_optimizers()
    (batch,) = batches(1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        module.compute_loss(batch).backward()
        done.gradients.append(gradients_of(module))
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
    done.optimizer = optimizer  # type: ignore[attr-defined]
    return done


@pytest.fixture(scope="module")
def one_process() -> OneProcess:
    return train_one_process()


def run(rank: Rank, module: SharedOutTowers, *, ep: int, epochs: int, ckpt: str | None = None) -> Any:
    trainer = quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        max_epochs=epochs,
        gradient_clip_val=CLIP,
    )
    rows = [8 // rank.world_size] * rank.world_size
    trainer.fit(module, loader(share(batches(1), rows, rank.index)), ckpt_path=ckpt, weights_only=False)
    return trainer


def told(module: SharedOutTowers) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    return module.gradients, {name: value.clone() for name, value in module.state_dict().items()}


@on_ranks(2)
def on_two_ranks(rank: Rank, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    replicated = SharedOutTowers(1, rank.index)
    run(rank, replicated, ep=1, epochs=2)
    found["replicated"] = told(replicated)
    module = SharedOutTowers(2, rank.index)
    trainer = run(rank, module, ep=2, epochs=2)
    found["shared out"] = told(module)
    found["axes"] = {p.name: p.axis for p in trainer.strategy.plan.parameters}
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    found["state"] = trainer.strategy.lightning_module_state_dict()
    # a step in which one rank has no loss still meets the others in backward
    for gives_none in (True, False):
        stray = SharedOutTowers(2, rank.index, stray_rank=1, gives_none=gives_none)
        run(rank, stray, ep=2, epochs=1)
        found[f"stray {gives_none}"] = told(stray)
    return found


@on_ranks(4)
def on_four_ranks(rank: Rank, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    module = SharedOutTowers(2, rank.index)
    if rank.index >= 2:  # what the first of those that hold the same experts has goes to the others, and no further
        for value in (*module.parameters(), *(b for b in module.buffers())):
            nn.init.zeros_(value)
    trainer = run(rank, module, ep=2, epochs=2)
    found["shared out"] = told(module)
    found["comparison"] = trainer.strategy.compare({"parameters", "optimizer", "gradients"})
    with torch.no_grad():
        if rank.index == 3:
            next(iter(module.visual_moe.deepspeed_moe.experts.parameters())).add_(1.0)
    different = trainer.strategy.compare({"parameters"})
    found["different"] = [(d.name, d.replicas, d.ranks) for d in different.differences]
    resumed = SharedOutTowers(4, rank.index)
    run(rank, resumed, ep=4, epochs=NUM_STEPS, ckpt=f"{folder}/two.ckpt")
    found["resumed"] = told(resumed)
    strided = SharedOutTowers(2, rank.index)
    mesh = Mesh.build(2)
    strided.visual_second.deepspeed_moe.ep_group = mesh.gradient_groups["edp"]
    found["no group"] = refusal(strided.visual_moe, mesh)
    found["other group"] = refusal(strided.visual_second, mesh)
    return found


def refusal(module: nn.Module, mesh: Mesh) -> str:
    with pytest.raises(RuntimeError) as raised:
        check_expert_lists(module, mesh)
    return str(raised.value)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("shared_out")
    return on_two_ranks.launch(folder=str(folder)), folder


@pytest.fixture(scope="module")
def four_ranks(two_ranks: tuple[list[dict[str, Any]], Path]) -> list[dict[str, Any]]:
    return on_four_ranks.launch(folder=str(two_ranks[1]))


def assert_equal(found: Any, wanted: OneProcess, *, ep: int, rank: int, steps: range) -> None:
    """Gradients of ``steps`` and, where these are the last ones of the reference, parameters."""
    gradients, state = found
    share_of_rank, place = NUM_EXPERTS // ep, rank % ep
    for own, step in zip(gradients, steps, strict=True):
        renamed = {global_name(name, share_of_rank, place): g for name, g in own.items()}
        reference = wanted.gradients[step]
        floor = {name: g for name, g in reference.items() if name in renamed}
        errors = gradient_errors(renamed, floor, 0)
        assert len(errors) == len(own)
        assert max(errors.values()) < BOUND, max(errors, key=lambda name: errors[name])
    if steps.stop == NUM_STEPS:
        reference_state = wanted.module.state_dict()
        for name, value in state.items():
            torch.testing.assert_close(
                value, reference_state[global_name(name, share_of_rank, place)], rtol=BOUND, atol=BOUND
            )


@pytest.mark.parametrize(("which", "ep"), [("replicated", 1), ("shared out", 2)])
def test_gradients_of_two_ranks_equal_one_process(two_ranks: Any, one_process: OneProcess, which: str, ep: int) -> None:
    for rank, found in enumerate(two_ranks[0]):
        assert_equal(found[which], one_process, ep=ep, rank=rank, steps=range(2))


def test_an_idle_expert_has_no_gradient_and_is_part_of_the_comparison(one_process: OneProcess) -> None:
    name = f"visual_moe.deepspeed_moe.experts.deepspeed_experts.{IDLE_EXPERT}.fc.weight"
    assert all(gradients[name] is None for gradients in one_process.gradients)


def test_gradients_of_four_ranks_in_pairs_equal_one_process(four_ranks: Any, one_process: OneProcess) -> None:
    for rank, found in enumerate(four_ranks):
        assert_equal(found["shared out"], one_process, ep=2, rank=rank, steps=range(2))


def test_experts_are_reduced_over_their_replicas_and_the_rest_over_all(two_ranks: Any) -> None:
    axes = two_ranks[0][0]["axes"]
    experts = {name for name in axes if "deepspeed_experts" in name}
    assert len(experts) == 8
    assert {axes[name] for name in experts} == {"edp"}
    assert {axes[name] for name in axes.keys() - experts} == {"dp"}


def test_replicas_are_compared_over_ranks_with_the_same_experts(four_ranks: Any) -> None:
    for found in four_ranks:
        assert found["comparison"].differences == ()
        (difference,) = found["different"]
        assert difference == ("visual_moe.deepspeed_moe.experts.deepspeed_experts.0.fc.weight", (1, 3), (3,))


def test_a_checkpoint_is_that_of_one_process_with_all_experts(two_ranks: Any, one_process: OneProcess) -> None:
    found, folder = two_ranks
    checkpoint = torch.load(folder / "two.ckpt", weights_only=False)
    module = SharedOutTowers(1)
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    assert found[0]["state"].keys() == checkpoint["state_dict"].keys()
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    idle = [p for name, p in module.named_parameters() if f"experts.{IDLE_EXPERT}." in name and "visual_moe" in name]
    assert len(idle) == 2
    assert not any(p in optimizer.state for p in idle)
    module.compute_loss(batches(1)[0]).backward()
    nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, one_process.module.state_dict()[name], rtol=BOUND, atol=BOUND)
    wanted = one_process.optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    assert optimizer.state_dict()["state"].keys() == wanted.keys()
    for index, moments in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(moments, wanted[index], rtol=BOUND, atol=BOUND)


def test_another_number_of_ranks_goes_on_from_that_checkpoint(four_ranks: Any, one_process: OneProcess) -> None:
    for rank, found in enumerate(four_ranks):
        assert_equal(found["resumed"], one_process, ep=4, rank=rank, steps=range(2, 3))


def test_a_step_without_a_loss_on_one_rank_is_one_with_zero(two_ranks: Any) -> None:
    for found in two_ranks[0]:
        (none,), (zero,) = found["stray True"][0], found["stray False"][0]
        assert none.keys() == zero.keys()
        for name, gradient in zero.items():
            if none[name] is None:  # of an expert that no other rank's token wanted
                assert gradient is None or not gradient.any()
            else:
                torch.testing.assert_close(none[name], gradient, rtol=BOUND, atol=1e-14)
        dense = {name for name in none if "experts" not in name} - {"logit_scale"}
        assert len(dense) == 6
        assert all(none[name] is not None and none[name].any() for name in dense)
    assert any(g is not None for found in two_ranks[0] for n, g in found["stray True"][0][0].items() if "experts" in n)


def test_a_layer_without_its_group_or_with_another_is_refused(four_ranks: Any) -> None:
    assert "the layer has no process group yet" in four_ranks[0]["no group"]
    assert "layer.set_deepspeed_parallelism() in configure_model()" in four_ranks[0]["no group"]
    expected = "exchanges tokens with ranks [1, 3], and MoEClipStrategy shares experts out over [2, 3]"
    assert expected in four_ranks[3]["other group"]


def alone(expert_parallel_size: int) -> Mesh:
    return Mesh(8, 0, expert_parallel_size, None, {"dp": None, "edp": None})


def test_another_expert_parallel_size_is_refused_also_the_default() -> None:
    module = SharedOutTowers(2)
    message = (
        r"visual_moe\.deepspeed_moe\.experts\.deepspeed_experts: ep_size=2 .* expert_parallel_size=4 would average .* "
        r"Write MoEClipStrategy\(expert_parallel_size=2\)\."
    )
    with pytest.raises(ValueError, match=message):
        check_expert_lists(module, alone(4))
    module.configure_model = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"expert_parallel_size=1 would average"):
        quiet_trainer(1, max_epochs=1).fit(module, loader(batches(1)))


def test_layers_over_different_numbers_of_ranks_are_refused() -> None:
    module = nn.ModuleList([SharedOutTowers(2), SharedOutTowers(4)])
    with pytest.raises(ValueError, match=r"over 2, .* over 4\. Write one ep_size for all"):
        check_expert_lists(module, alone(2))


def test_a_copy_without_tags_is_known_by_its_layer() -> None:
    module = SharedOutTowers(2)
    for parameter in module.parameters():
        vars(parameter).clear()
    assert [(e.path, e.num_local, e.size) for e in expert_lists(module)] == [
        ("visual_moe.deepspeed_moe.experts.deepspeed_experts", 2, 2),
        ("visual_second.deepspeed_moe.experts.deepspeed_experts", 2, 2),
    ]
    assert len(own_expert_names(module)) == 2 * 2 * 3  # of each expert: weight, bias and a buffer


class Tagged(nn.Module):
    """Experts that only their tags tell of."""

    def __init__(self, group_name: str | None = "ep_size_2", *, fused: bool = False) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.fused = nn.Parameter(torch.zeros(3, 2)) if fused else None
        for parameter in [self.fused] if fused else self.mlps.parameters():
            parameter.allreduce, parameter.group_name = False, group_name  # type: ignore[union-attr]


def test_tags_alone_make_an_expert_whatever_its_name() -> None:
    module = Tagged()
    assert [(e.path, e.num_local, e.size) for e in expert_lists(module)] == [("mlps", 3, 2)]
    assert {role.kind for role in read_roles(module).values()} == {"expert"}


def test_tags_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group_name=None, which does not say how many .* group_name='ep_size_2'"):
        expert_lists(Tagged(None))
    with pytest.raises(ValueError, match=r"fused is tagged allreduce=False for 2 ranks and lies in no nn\.ModuleList"):
        expert_lists(Tagged(fused=True))


def test_parameters_in_another_order_than_the_modules_are_refused() -> None:
    module = SharedOutTowers(2)
    names = {id(p): name for name, p in module.named_parameters()}
    check_expert_order(module, [module.configure_optimizers()], names)
    backwards = torch.optim.SGD(reversed(list(module.parameters())), lr=0.1)
    with pytest.raises(ValueError, match=r"Group 0 of optimizer 0 .* one pass over module\.named_parameters\(\)"):
        check_expert_order(module, [backwards], names)
    check_expert_order(SharedOutTowers(1), [backwards], names)


def test_a_main_process_that_gets_nothing_back_is_refused() -> None:
    strategy = MoEClipStrategy(expert_parallel_size=2, start_method="spawn")
    with pytest.raises(ValueError, match=r"'w' \(1 in all\) is of an expert .* Leave out start_method"):
        strategy.refuse_lost_parameters(["w"], why="is of an expert that one rank has", can_be_made_before=False)


def pair(rank: int) -> RankExperts:
    """Of two ranks that hold the same values, without a process group."""
    return RankExperts(rank, lambda part: [part, part], lambda value: [value, value])


def test_a_state_with_some_of_the_experts_is_refused() -> None:
    module = SharedOutTowers(2)
    message = r"has 2 experts of visual_moe\.\S+ and the layer has 4 on 2 ranks: it may be that of one rank, .* all of"
    with pytest.raises(ValueError, match=message):
        pair(0).own_model_state(module.state_dict(), module)
    whole = pair(0).whole_model_state(module.state_dict(), module)
    assert pair(0).whole_model_state(whole, module) == whole
    name = "visual_moe.deepspeed_moe.experts.deepspeed_experts.3.fc.weight"
    assert whole[name] is not None
    assert pair(1).own_model_state(whole, module).keys() == module.state_dict().keys()


def test_what_is_no_tensor_in_a_state_goes_along() -> None:
    module = SharedOutTowers(2)
    name = "visual_moe.deepspeed_moe.experts.deepspeed_experts.{}._extra_state"
    whole = pair(0).whole_model_state({name.format(0): "a", name.format(1): "b"}, module)
    assert whole == {name.format(0): "a", name.format(1): "b", name.format(2): "a", name.format(3): "b"}


def test_moments_of_another_number_of_experts_are_refused() -> None:
    module = SharedOutTowers(2)
    experts = pair(1)
    experts.learn(module)
    optimizer = module.configure_optimizers()
    with pytest.raises(ValueError, match=r"The saved group 0 has 8 parameters, and this optimizer's has 12 with"):
        experts.own_optimizer_state(optimizer, optimizer.state_dict())
    whole = SharedOutTowers(1).configure_optimizers().state_dict()
    own = experts.own_optimizer_state(optimizer, whole)
    assert own["param_groups"] == optimizer.state_dict()["param_groups"]
