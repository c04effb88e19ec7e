"""Checkpoints of 16-bit modules with masters hold float32, and a resumed run goes on bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule, pl
from lightning_moeclip.gradients.master_parameter import MasterParameter, model_parameter
from lightning_moeclip.modules import ContrastiveLoss, MoE
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

DIM, NUM_EXPERTS = 8, 4
EXPERTS = ("moe.w_in", "moe.w_out")


class Clip(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(DIM, DIM)
        self.moe = MoE(DIM, 16, NUM_EXPERTS, top_k=2)
        self.loss = ContrastiveLoss()
        self.at_start: dict[str, dict[str, Tensor]] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, text = (self.stem(x.to(self.stem.weight.dtype)) for x in batch)
        return self.loss(image + self.moe(image), text + self.moe(text))

    def on_train_start(self) -> None:
        self.at_start = snapshot(self)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def snapshot(module: LightningModule) -> dict[str, dict[str, Tensor]]:
    """Parameter, what the optimizer holds for it, and its moments, by name."""
    (optimizer,) = module.trainer.optimizers
    held = {id(model_parameter(p)): p for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for name, p in module.named_parameters():
        state = {k: v.clone() for k, v in optimizer.state.get(held[id(p)], {}).items()}
        found[name] = {"parameter": p.detach().clone(), "held": held[id(p)].detach().clone(), **state}
    return found


def assert_same(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].keys() == values.keys(), name
        for key, value in values.items():
            assert found[name][key].dtype is value.dtype
            assert torch.equal(found[name][key], value), (name, key)


def trainer_of(rank: Rank, epochs: int, *, ep: int = 1, precision: str = "bf16-true", **settings: Any) -> Any:
    plugin = MoEClipPrecision(precision, device="cpu", master_weights=True)
    strategy = MoEClipStrategy(expert_parallel_size=ep)
    return quiet_trainer(rank.world_size, max_epochs=epochs, strategy=strategy, plugins=[plugin], **settings)


def share(rank: Rank) -> Any:
    generator = torch.Generator().manual_seed(5)
    batches = [tuple(torch.randn(2, 8, DIM, generator=generator).unbind()) for _ in range(2)]
    return loader([tuple(x.chunk(rank.world_size)[rank.index] for x in batch) for batch in batches])


def made_in(dtype: torch.dtype) -> Clip:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Clip()
    finally:
        torch.set_default_dtype(before)


@on_ranks(1)
def resumes_bit_by_bit(rank: Rank, precision: str, path: str) -> None:
    straight = Clip()
    trainer_of(rank, 3, precision=precision).fit(straight, share(rank))
    first = Clip()
    trainer = trainer_of(rank, 1, precision=precision)
    trainer.fit(first, share(rank))
    trainer.save_checkpoint(path)
    left = snapshot(first)
    wide = torch.load(path, weights_only=False)["state_dict"]
    assert {v.dtype for v in wide.values()} == {torch.float32}
    for name, values in left.items():
        assert torch.equal(wide[name], values["held"])
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}[precision]
    assert any((v != v.to(dtype)).any() for v in wide.values())
    for module in (Clip(), made_in(dtype), first):
        trainer_of(rank, 3, precision=precision).fit(module, share(rank), ckpt_path=path)
        assert_same(module.at_start, left)
        assert_same(snapshot(module), snapshot(straight))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_resume_is_bit_exact_for_masters_moments_and_parameters(tmp_path: Path, precision: str) -> None:
    resumes_bit_by_bit.launch(precision=precision, path=str(tmp_path / "one.ckpt"))


def save_and_go_on(rank: Rank, ep: int, path: str) -> dict[str, Any]:
    """Save after the first epoch, inside and outside fit, and go on with the same module and another Trainer."""
    module = Clip()
    trainer = trainer_of(rank, 1, ep=ep)
    inside: dict[str, Tensor] = {}
    module.on_train_end = lambda: inside.update(
        {n: v.clone() for n, v in trainer.strategy.lightning_module_state_dict().items()}
    )
    trainer.fit(module, share(rank))
    trainer.save_checkpoint(path)
    after = {n: v.clone() for n, v in trainer.strategy.lightning_module_state_dict().items()}
    assert all(torch.equal(after[n], v) for n, v in inside.items())
    assert all(p.grad_dtype is p.dtype for p in module.parameters())
    trainer.fit_loop.max_epochs = 2  # a second fit of the same Trainer
    trainer.fit(module, share(rank))
    again = module.at_start
    return {"saved": after, "again": again, "end": snapshot(module)}


@on_ranks(2)
def save_on_2(rank: Rank, ep: int, path: str) -> dict[str, Any]:
    return save_and_go_on(rank, ep, path)


def load(rank: Rank, ep: int, path: str) -> dict[str, dict[str, Tensor]]:
    module = Clip()
    trainer_of(rank, 2, ep=ep).fit(module, share(rank), ckpt_path=path)
    return module.at_start


@on_ranks(1)
def load_on_1(rank: Rank, ep: int, path: str) -> dict[str, dict[str, Tensor]]:
    return load(rank, ep, path)


@on_ranks(2)
def load_on_2(rank: Rank, ep: int, path: str) -> dict[str, dict[str, Tensor]]:
    return load(rank, ep, path)


@on_ranks(4)
def load_on_4(rank: Rank, ep: int, path: str) -> dict[str, dict[str, Tensor]]:
    return load(rank, ep, path)


@pytest.fixture(scope="module")
def spread_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("masters") / "spread.ckpt")
    return path, save_on_2.launch(ep=2, path=path)


@pytest.mark.parametrize(("launch", "world_size", "ep"), [(load_on_1, 1, 1), (load_on_2, 2, 2), (load_on_4, 4, 4)])
def test_masters_and_moments_of_spread_experts_load_into_any_layout(
    launch: Any, world_size: int, ep: int, spread_run: tuple[str, list[dict[str, Any]]]
) -> None:
    path, ranks = spread_run
    checkpoint = torch.load(path, weights_only=False)
    (optimizer,) = checkpoint["optimizer_states"]
    assert {v.dtype for v in checkpoint["state_dict"].values()} == {torch.float32}
    for found in (run["saved"] for run in ranks):
        assert all(torch.equal(found[n], v) for n, v in checkpoint["state_dict"].items())
    for index, found in enumerate(launch.launch(ep=ep, path=path)):
        for place, (name, values) in enumerate(found.items()):
            state = optimizer["state"][place]
            wanted = {
                "held": checkpoint["state_dict"][name],
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
            }
            for key, value in wanted.items():
                own = value.chunk(ep)[index % ep] if name in EXPERTS else value
                assert values[key].dtype is torch.float32
                assert torch.equal(values[key], own), (name, key)
            assert torch.equal(values["parameter"], values["held"].to(values["parameter"].dtype))


def test_second_fit_starts_from_the_masters_of_the_first(spread_run: tuple[str, list[dict[str, Any]]]) -> None:
    _, ranks = spread_run
    for index, found in enumerate(ranks):
        for name, values in found["again"].items():
            whole = found["saved"][name]
            assert torch.equal(values["held"], whole.chunk(2)[index] if name in EXPERTS else whole), name
    for name in ranks[0]["end"]:
        assert torch.equal(ranks[0]["end"][name]["held"], ranks[1]["end"][name]["held"]), name


class Restoring(Clip):
    """Goes back to a state while it trains, through the strategy."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        if batch_idx == 0:
            self.kept = {n: v.clone() for n, v in strategy.lightning_module_state_dict().items()}
        else:
            strategy.load_model_state_dict({"state_dict": self.kept})
            self.found = snapshot(self)


@on_ranks(1)
def test_weights_loaded_while_training_reach_the_masters_with_all_digits(rank: Rank) -> None:
    module = Restoring()
    trainer_of(rank, 1).fit(module, share(rank))
    assert all(torch.equal(module.found[n]["held"], v) for n, v in module.kept.items())


class Outside(Clip):
    """A parameter that only the optimizer holds, made in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.outside = [nn.Parameter(torch.randn(DIM))]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.outside[0].float().square().sum()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW([*self.parameters(), *self.outside], lr=1e-3)

    def on_train_start(self) -> None:
        self.held_at_start = self.trainer.optimizers[0].param_groups[0]["params"][-1].detach().clone()


@on_ranks(1)
def test_masters_of_parameters_outside_the_module_are_saved_in_float32_and_loaded(rank: Rank, tmp_path: Path) -> None:
    module, resumed = Outside(), Outside()
    made = module.outside[0].detach().clone()
    trainer = trainer_of(rank, 1)
    with pytest.warns(UserWarning, match="are in an optimizer and not in the LightningModule"):
        trainer.fit(module, share(rank))
    assert torch.equal(module.held_at_start, made)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (value,) = torch.load(tmp_path / "x.ckpt", weights_only=False)["moeclip"]["optimizer_parameters"].values()
    master = trainer.optimizers[0].param_groups[0]["params"][-1]
    assert isinstance(master, MasterParameter)
    assert torch.equal(value, master)
    assert not torch.equal(value, module.outside[0].float())
    again = trainer_of(rank, 1)  # has no step left
    with pytest.warns(UserWarning, match="are in an optimizer and not in the LightningModule"):
        again.fit(resumed, share(rank), ckpt_path=str(tmp_path / "x.ckpt"))
    assert torch.equal(again.optimizers[0].param_groups[0]["params"][-1], value)
    assert torch.equal(resumed.outside[0], module.outside[0])


@on_ranks(1)
def test_weight_averaging_and_fast_dev_run_work(rank: Rank, tmp_path: Path) -> None:
    for callbacks, is_fast in (([pl.callbacks.WeightAveraging()], False), ([], True)):
        trainer = trainer_of(rank, 2, callbacks=callbacks, fast_dev_run=is_fast)
        module = Clip()
        trainer.fit(module, share(rank))
        trainer.save_checkpoint(tmp_path / "average.ckpt")
        saved = torch.load(tmp_path / "average.ckpt", weights_only=False)["state_dict"]
        assert {v.dtype for v in saved.values()} == {torch.float32}
        for name, p in module.named_parameters():
            assert torch.equal(saved[name].to(p.dtype), p), name
