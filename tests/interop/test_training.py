"""Models of other libraries trained on two ranks in float64 equal one process, with their own scale in our losses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import contrastive_loss, paired_features, sigmoid_loss
from lightning_moeclip.testing import Rank, on_ranks
from tests.interop.live_models import (
    moe_clip,
    open_clip_roberta,
    open_clip_vit,
    transformers_clip,
    transformers_siglip,
)
from tests.models import gradient_errors, gradients_of, loader, quiet_trainer

BOUND = 1e-10
ROWS = [5, 3]
NUM_STEPS = 2


def open_clip_dict() -> nn.Module:
    model = open_clip_vit()
    model.output_dict = True
    return model


# model, and whether its inputs are named
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "open_clip": (open_clip_vit, False),
    "open_clip, a dict": (open_clip_dict, False),
    "open_clip with a bias": (open_clip_roberta, False),
    "transformers CLIP": (transformers_clip, True),
    "transformers SigLIP": (transformers_siglip, True),
    "transformers CLIP with experts": (moe_clip, True),
}


class Adapted(LightningModule):
    """What a user writes around a model of another library."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        build, self.is_named = MODELS[name]
        self.model = build().double()
        self.gradients: list[dict[str, Tensor | None]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, tokens = batch
        output = self.model(pixel_values=images, input_ids=tokens) if self.is_named else self.model(images, tokens)
        image, text = paired_features(output)
        if getattr(self.model, "logit_bias", None) is not None:
            return sigmoid_loss(image, text, self.model.logit_scale, self.model.logit_bias)
        return contrastive_loss(image, text, self.model.logit_scale)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    found = []
    for _ in range(NUM_STEPS):
        images = torch.randn(sum(ROWS), 3, 16, 16, generator=generator, dtype=torch.float64)
        tokens = torch.randint(3, 98, (sum(ROWS), 8), generator=generator)
        tokens[:, -1] = 2  # where transformers' CLIP pools
        found.append((images, tokens))
    return found


@on_ranks(2, timeout_s=180.0)
def fit(rank: Rank, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        module = Adapted(name)
        own = [tuple(x.split(ROWS)[rank.index] for x in batch) for batch in batches()]
        quiet_trainer(2).fit(module, loader(own))
        found[name] = module.gradients, module.state_dict()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return fit.launch(names=list(MODELS))


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_one_process(name: str, two_ranks: list[dict[str, Any]]) -> None:
    module = Adapted(name)
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        wanted = gradients_of(module)
        assert wanted["model.logit_scale"] is not None
        if getattr(module.model, "logit_bias", None) is not None:
            assert wanted["model.logit_bias"] is not None
        optimizer.step()
        for found in two_ranks:
            errors = gradient_errors(found[name][0][step], wanted, 0)
            assert max(errors.values()) < BOUND, max(errors, key=lambda key: errors[key])
    for found in two_ranks:
        for key, value in module.state_dict().items():
            torch.testing.assert_close(found[name][1][key], value, rtol=BOUND, atol=BOUND, msg=key)
