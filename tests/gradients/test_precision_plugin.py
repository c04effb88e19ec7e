"""Which precision plugins a strategy takes, and how a plugin is made."""

import inspect

import pytest
import torch

from lightning_moeclip.binding import DoublePrecision, HalfPrecision, LightningModule, MixedPrecision, Precision
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer


class Own(Precision):
    """A user's plugin, with an override that must not be lost without a word."""

    def convert_input(self, data: torch.Tensor) -> torch.Tensor:
        return data * 0


class OwnOnOurs(MoEClipPrecision):
    """The same on top of ours, as the refusal advises."""

    def convert_input(self, data: torch.Tensor) -> torch.Tensor:
        return data * 0


@pytest.mark.parametrize("kind", [Own, type("Scaled", (MixedPrecision,), {})])
def test_a_users_own_plugin_is_refused(kind: type[Precision]) -> None:
    plugin = kind() if kind is Own else kind("bf16-mixed", "cpu")  # type: ignore[call-arg]
    told = f"{kind.__qualname__} is a precision plugin that .* Derive the class from MoEClipPrecision, or write Trainer"
    with pytest.raises(TypeError, match=told):
        MoEClipStrategy(precision_plugin=plugin)


@pytest.mark.parametrize(
    "plugin", [Precision(), DoublePrecision(), HalfPrecision("bf16-true"), MixedPrecision("bf16-mixed", "cpu")]
)
def test_plugins_of_lightning_are_taken_over_with_their_precision(plugin: Precision) -> None:
    assert MoEClipStrategy(precision_plugin=plugin).precision_plugin.precision == plugin.precision


@on_ranks(1)
def test_a_plugin_derived_from_ours_keeps_its_overrides(rank: Rank) -> None:
    seen = []

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.append(batch.sum().item())
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet_trainer(1, plugins=[OwnOnOurs("32-true")]).fit(Net(), loader([torch.ones(2, 2)]))
    assert seen == [0.0]


def test_precision_is_given_and_the_rest_is_named() -> None:
    parameters = inspect.signature(MoEClipPrecision).parameters
    assert {n: (p.kind.name, p.default) for n, p in parameters.items()} == {
        "precision": ("POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        "device": ("KEYWORD_ONLY", "auto"),
        "loss_scaling": ("KEYWORD_ONLY", "unified"),
        "regions": ("KEYWORD_ONLY", None),
        "init_scale": ("KEYWORD_ONLY", 2**16),
        "growth_interval": ("KEYWORD_ONLY", 2000),
        "master_weights": ("KEYWORD_ONLY", False),
    }
