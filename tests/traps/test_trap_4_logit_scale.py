"""Trap 4: ``logit_scale`` belongs to no layer and to all samples, and is easily reduced never, or K times, or apart."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from lightning_moeclip.binding import DDPStrategy, LightningModule
from lightning_moeclip.modules import contrastive_loss
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import batches, gradient_errors, gradients_of, loader, quiet_trainer, share

STEPS = 20


class Towers(LightningModule):
    """Two linear towers with a temperature that is a parameter of the module, as it should be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.image = nn.Linear(8, 5, dtype=torch.float64)
        self.text = nn.Linear(7, 5, dtype=torch.float64)
        self.logit_scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.gradients: list[dict[str, Tensor | None]] = []

    def features(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return normalize(self.image(batch[0]), dim=-1), normalize(self.text(batch[1]), dim=-1)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return contrastive_loss(*self.features(batch), self.logit_scale)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [*self.image.parameters(), *self.text.parameters()]
        return torch.optim.AdamW([{"params": weights}, {"params": [self.logit_scale], "weight_decay": 0.0}], lr=5e-2)


class BareScale(Towers):
    """The temperature lives in an object that is no module: only the optimizer holds it."""

    def __init__(self) -> None:
        super().__init__()
        outside = self.logit_scale
        del self.logit_scale
        object.__setattr__(self, "logit_scale", outside)


class OwnRows(Towers):
    """The mean over ranks of what each makes of its own rows alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return dense_loss(*self.features(batch), self.logit_scale)


class GatheredWithoutGradient(Towers):
    """All features on every rank, and the gradient through the rank's own alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        whole = []
        for mine in self.features(batch):
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine.detach())
            parts[dist.get_rank()] = mine
            whole.append(torch.cat(parts))
        return dense_loss(whole[0], whole[1], self.logit_scale)


def dense_loss(image: Tensor, text: Tensor, logit_scale: Tensor) -> Tensor:
    logits = logit_scale.exp() * image @ text.T
    partner = torch.arange(len(logits))
    return (cross_entropy(logits, partner) + cross_entropy(logits.T, partner)) / 2


def one_process(data: list[tuple[Tensor, Tensor]]) -> Towers:
    module = Towers()
    optimizer = module.configure_optimizers()
    for batch in data:
        optimizer.zero_grad()
        dense_loss(*module.features(batch), module.logit_scale).backward()
        module.gradients.append(gradients_of(module))
        optimizer.step()
    return module


@on_ranks(2)
def fit(rank: Rank, module: Any, strategy: Any, steps: int, rows: Any) -> tuple[list[dict], float, dict[str, Tensor]]:
    module = module()
    quiet_trainer(2, strategy=strategy).fit(module, loader(share(batches(steps), rows, rank.index)))
    weights = {n: p.detach() for n, p in module.named_parameters()}
    return module.gradients, module.logit_scale.item(), weights


def stock() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)


def worst_weight_error(found: dict[str, Tensor], one: Towers) -> float:
    wanted = dict(one.named_parameters())
    return max(((weight - wanted[name]).norm() / wanted[name].norm()).item() for name, weight in found.items())


def test_a_scale_outside_the_module_drifts_apart_under_stock_ddp_and_not_under_ours() -> None:
    one = one_process(batches(STEPS))
    true = one.logit_scale.item()
    arguments = {"module": BareScale, "steps": STEPS, "rows": (4, 4)}
    (_, first, weights), (_, second, _) = fit.launch(strategy=stock(), **arguments)
    assert (first, second, true) == pytest.approx((-0.0940, -0.2651, -0.2475), abs=1e-4)
    assert worst_weight_error(weights, one) == pytest.approx(0.0374, abs=1e-4)
    for _, ours, weights in fit.launch(strategy=MoEClipStrategy(), **arguments):
        assert ours == pytest.approx(true, rel=1e-10)
        assert worst_weight_error(weights, one) < 1e-10


def test_features_gathered_without_gradient_train_towers_at_a_wth_of_the_rate_of_the_scale() -> None:
    one = one_process(batches(1)).gradients[0]
    for gradients, *_ in fit.launch(module=GatheredWithoutGradient, strategy=stock(), steps=1, rows=(4, 4)):
        for name, wanted in one.items():
            assert wanted is not None
            factor = 1.0 if name == "logit_scale" else 0.5
            assert (gradients[0][name] - factor * wanted).norm() < 1e-10 * wanted.norm(), name
    for gradients, *_ in fit.launch(module=Towers, strategy=MoEClipStrategy(), steps=1, rows=(4, 4)):
        assert max(gradient_errors(gradients[0], one, 0).values()) < 1e-10


def test_mean_of_the_ranks_own_losses_is_another_loss_and_ours_is_exact_for_uneven_rows() -> None:
    one = one_process(batches(1)).gradients[0]
    for gradients, *_ in fit.launch(module=OwnRows, strategy=stock(), steps=1, rows=(6, 2)):
        assert (gradients[0]["logit_scale"] / one["logit_scale"]).item() == pytest.approx(0.601, abs=1e-3)
        assert gradient_errors(gradients[0], one, 0)["image.weight"] == pytest.approx(1.056, abs=1e-3)
    for gradients, *_ in fit.launch(module=Towers, strategy=MoEClipStrategy(), steps=1, rows=(6, 2)):
        assert max(gradient_errors(gradients[0], one, 0).values()) < 1e-10


def cached_accumulation(num_parts: int, *, is_scale_counted_once: bool) -> dict[str, Tensor | None]:
    """Gradients of one large batch in micro-batches: features without graph first, then each part again with it."""
    module = Towers()
    (batch,) = batches(1)
    parts = list(zip(batch[0].chunk(num_parts), batch[1].chunk(num_parts), strict=True))
    with torch.no_grad():
        whole = [torch.cat(side) for side in zip(*(module.features(part) for part in parts), strict=True)]
    if is_scale_counted_once:
        leaves = [side.requires_grad_() for side in whole]
        contrastive_loss(leaves[0], leaves[1], module.logit_scale).backward()
        cotangents = [leaf.grad.chunk(num_parts) for leaf in leaves if leaf.grad is not None]
        for part, *cotangent in zip(parts, *cotangents, strict=True):
            torch.autograd.backward(module.features(part), cotangent)
    else:
        for index, part in enumerate(parts):
            sides = [list(side.chunk(num_parts)) for side in whole]
            sides[0][index], sides[1][index] = module.features(part)
            dense_loss(torch.cat(sides[0]), torch.cat(sides[1]), module.logit_scale).backward()
    return gradients_of(module)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_accumulation_over_cached_features_counts_the_scale_once_per_part(num_parts: int) -> None:
    one = one_process(batches(1)).gradients[0]
    wrong = cached_accumulation(num_parts, is_scale_counted_once=False)
    errors = gradient_errors(wrong, one, 0)
    assert errors.pop("logit_scale") == pytest.approx(num_parts - 1, rel=1e-10)  # K times the true one
    assert max(errors.values()) < 1e-10
    right = cached_accumulation(num_parts, is_scale_counted_once=True)
    assert max(gradient_errors(right, one, 0).values()) < 1e-10
