"""Regions with a loss scale of their own, in whole fits: they change no bit where nothing under- or overflows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Trainer
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.models import TwoTowers, batches, gradient_errors, loader, quiet_trainer, share, train_one_process

ROWS = [5, 3]
NUM_STEPS = 4


class Half(TwoTowers):
    """The two towers in float32, for autocast; keeps gradients as the optimizer sees them."""

    factor = 1.0

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.compute_loss((batch[0].float(), batch[1].float()))

    def on_train_batch_end(self, *args: object) -> None:
        pass

    def on_train_start(self) -> None:
        scales = self.trainer.precision_plugin.scaler.scales
        state = scales.state_dict()
        scales.load_state_dict(state | {"factor": state["factor"] * self.factor})


class Raised(Half):
    factor = 8.0


class Checkpointed(Raised):
    """Activation checkpointing inside one region and around another."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, text = (x.clone().requires_grad_() for x in batch)
        around = checkpoint(self.text, text, use_reentrant=self.is_reentrant)
        return self.loss(self.image(image), around)


class Uncheckpointed(Raised):
    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(self.image(batch[0]), self.text(batch[1]))


def fit(
    module: TwoTowers,
    rank: Rank,
    *,
    ep: int = 1,
    compiled: bool = False,
    precision: str = "16-mixed",
    **settings: Any,
) -> Trainer:
    arguments = {k: settings.pop(k) for k in ("accumulate_grad_batches", "gradient_clip_val") if k in settings}
    plugin = MoEClipPrecision(precision, device="cpu", init_scale=2.0**8, **settings)
    trainer = quiet_trainer(
        rank.world_size, strategy=MoEClipStrategy(expert_parallel_size=ep), plugins=[plugin], **arguments
    )
    data = loader(share(batches(NUM_STEPS), ROWS if rank.world_size == 2 else [8], rank.index))
    trainer.fit(torch.compile(module, backend="aot_eager") if compiled else module, data)
    return trainer


def bits(module: TwoTowers) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


@on_ranks(2, timeout_s=120)
def equal_fits(rank: Rank, has_own_moe: bool, ep: int) -> tuple[bool, float, float]:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    plain, own = Half(has_own_moe=has_own_moe), Raised(has_own_moe=has_own_moe)
    fit(plain, rank, ep=ep, **options)
    trainer = fit(own, rank, ep=ep, loss_scaling="local", **options)
    factors = trainer.precision_plugin.scaler.scales.factor
    assert factors.tolist() == [8.0, 8.0]
    one = train_one_process(TwoTowers(has_own_moe=has_own_moe), batches(NUM_STEPS), accumulate=2, clip=0.05)
    errors = [max(gradient_errors(doubled(m), one.gradients[0], rank.index).values()) for m in (own, plain)]
    return bits(plain) == bits(own), *errors


def doubled(module: TwoTowers) -> dict[str, Tensor | None]:
    """Gradients of the first step, in float64; those of experts that no token wants are None or zeros."""
    return {n: None if g is None else g.double() for n, g in module.gradients[0].items()}


@pytest.mark.parametrize(("has_own_moe", "ep"), [(True, 2), (True, 1), (False, 1)])
def test_local_scaling_equals_one_scale_and_one_process(has_own_moe: bool, ep: int) -> None:
    for is_equal, error, plain_error in equal_fits.launch(has_own_moe=has_own_moe, ep=ep):
        assert error <= 2 * plain_error
        assert is_equal


@on_ranks(1, timeout_s=120)
def test_one_process_checkpointed_and_compiled_regions_change_no_bit(rank: Rank) -> None:
    for compiled in (False, True):  # a compiler rounds otherwise, with and without regions
        plain, own = Half(), Raised()
        fit(plain, rank, compiled=compiled)
        fit(own, rank, compiled=compiled, loss_scaling="local")
        assert bits(own) == bits(plain)
    without = Uncheckpointed()
    fit(without, rank, loss_scaling="local")
    for is_reentrant in (False, True):
        module = Checkpointed(is_reentrant=is_reentrant)
        fit(module, rank, loss_scaling="local")
        assert bits(module) == bits(without)


class Narrow(Raised):
    """Weights in float16."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.compute_loss(batch)


class NarrowPlain(Narrow):
    factor = 1.0


@on_ranks(2, timeout_s=120)
def test_regions_and_float32_masters_go_together(rank: Rank) -> None:
    for ep in (1, 2):
        plain, own = NarrowPlain(), Narrow()
        for module, how in ((plain, "unified"), (own, "local")):
            fit(module, rank, ep=ep, precision="16-true", master_weights=True, loss_scaling=how)
        assert plain.image.head.weight.dtype == own.image.head.weight.dtype == torch.float16
        assert bits(plain) == bits(own) != bits(Narrow())


class GoesAround(Half):
    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        head = self.image.head
        return super().compute_loss(batch) + nn.functional.linear(batch[0][:, :6], head.weight).float().mean()


class GoesAroundCompiled(GoesAround):
    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.linear(batch[0][:, :6], self.image.head.weight).float().mean()


FAULTS: dict[str, tuple[type[Half], dict[str, Any], str]] = {
    "around": (GoesAround, {"regions": ["image.head"]}, r"image\.head\.weight: used past the output of the region"),
    "compiled": (
        GoesAroundCompiled,
        {"regions": ["image.head"], "compiled": True},
        "no forward of the module was seen",
    ),
    "missing": (Half, {"regions": ["image.haed"]}, r"'image' has no module 'haed'\. Write .* image\.head"),
    "crossing": (Half, {"regions": ["image.head", "image.head"]}, "names 'image.head' twice"),
}


@on_ranks(2, timeout_s=120)
def faulty_fit(rank: Rank, name: str) -> None:
    kind, settings, _ = FAULTS[name]
    fit(kind(), rank, loss_scaling="local", **settings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_region_that_cannot_be_bounded_is_refused_on_every_rank(name: str) -> None:
    with pytest.raises(RanksFailed, match=FAULTS[name][2]) as caught:
        faulty_fit.launch(name=name)
    assert set(caught.value.failures) == {0, 1}


class TwoBackwards(Raised):
    """Reduces two losses before the step without zero_grad between: one is added to a reduced gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (batch, (batch[0].flip(0), batch[1].flip(0))):
            self.manual_backward(super().training_step(half, batch_idx))
        optimizer.step()


class TwoBackwardsPlain(TwoBackwards):
    factor = 1.0


@on_ranks(2, timeout_s=120)
def test_a_second_backward_is_added_to_a_reduced_gradient_of_a_region(rank: Rank) -> None:
    for ep in (1, 2):
        plain, own = TwoBackwardsPlain(), TwoBackwards()
        fit(plain, rank, ep=ep)
        fit(own, rank, ep=ep, loss_scaling="local")
        assert bits(plain) == bits(own)


def test_factors_are_saved_and_restored_by_the_names_of_regions(tmp_path: Path) -> None:
    resumed.launch(folder=str(tmp_path))


@on_ranks(2, timeout_s=120)
def resumed(rank: Rank, folder: str) -> None:
    trainer = fit(Raised(), rank, ep=2, loss_scaling="local", growth_interval=3)
    before = trainer.precision_plugin.scaler.state_dict()
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    precision = MoEClipPrecision("16-mixed", device="cpu", loss_scaling="local", regions=["text.moe", "image"])
    again = quiet_trainer(2, plugins=[precision], max_steps=NUM_STEPS)
    again.fit(Half(), loader(share(batches(NUM_STEPS), ROWS, rank.index)), ckpt_path=f"{folder}/last.ckpt")
    after = precision.scaler.state_dict()
    assert after["scale"] == before["scale"] == 2.0**9
    saved, restored = before["regions"], after["regions"]
    assert restored["names"] == ["text.moe", "image"]
    assert float(restored["factor"][0]) == float(saved["factor"][saved["names"].index("text.moe")]) == 8.0
    assert float(restored["factor"][1]) == 1.0
    assert restored["num_steps"] == saved["num_steps"] == NUM_STEPS
