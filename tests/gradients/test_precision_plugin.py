"""Which precision plugins a strategy takes, and how a plugin is made."""

import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch

from lightning_moeclip.binding import DoublePrecision, HalfPrecision, LightningModule, MixedPrecision, Precision
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.strategy import MoEClipStrategy
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import loader, quiet_trainer

FLOAT, HALF, BFLOAT, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
# by the string given: the precision that runs, and the dtypes of weights, of a 0-d parameter and of what is computed
STRINGS = {
    "32-true": ("32-true", FLOAT, FLOAT, FLOAT),
    "64-true": ("64-true", DOUBLE, DOUBLE, DOUBLE),
    "16-mixed": ("bf16-mixed", FLOAT, FLOAT, BFLOAT),  # Lightning runs it so on CPU, with a warning of its own
    "bf16-mixed": ("bf16-mixed", FLOAT, FLOAT, BFLOAT),
    "16-true": ("16-true", HALF, FLOAT, HALF),
    "bf16-true": ("bf16-true", BFLOAT, FLOAT, BFLOAT),
}


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


class Scalars(LightningModule):
    """Scalars of a user's own beside tensors, of each a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("count", torch.tensor(3.0))
        self.register_buffer("row", torch.ones(2))
        self.register_buffer("index", torch.tensor([1]))
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = self.layer(batch) * self.gain
        self.seen = [self.layer.weight.dtype, self.gain.dtype, out.dtype]
        self.buffers_seen = {name: buffer.dtype for name, buffer in self.named_buffers()}
        return out.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@on_ranks(1)
def test_every_string_of_a_trainer_becomes_our_plugin_and_trains_in_its_dtypes(rank: Rank) -> None:
    for given, (runs, *dtypes) in STRINGS.items():
        module = Scalars()
        before = module.gain.item()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = quiet_trainer(1, precision=given)
            trainer.fit(module, loader([torch.ones(2, 2)]))
        plugin: Any = trainer.precision_plugin
        assert type(plugin) is MoEClipPrecision
        assert (plugin.precision, plugin.scaler) == (runs, None)
        assert module.seen == dtypes, given
        assert module.buffers_seen == {"count": dtypes[1], "row": dtypes[0], "index": torch.int64}, given
        assert module.gain.item() != before, "a step was taken"
        texts = [str(w.message) for w in caught]
        about = [text for text in texts if "bfloat16" in text or "precision=" in text]
        assert len(about) == (given == "16-mixed"), about
        assert all("using `bfloat16`" in text or "precision='bf16-mixed'" in text for text in about), about


def test_16_mixed_as_an_instance_runs_float16_on_cpu() -> None:
    module = Scalars()
    trainer = quiet_trainer(1, plugins=[MoEClipPrecision("16-mixed", device="cpu", init_scale=64.0)])
    trainer.fit(module, loader([torch.ones(2, 2)]))
    assert module.seen == [FLOAT, FLOAT, HALF]
    assert trainer.precision_plugin.scaler.get_scale() == 64.0


def test_scale_and_interval_are_those_that_were_given() -> None:
    scaler = MoEClipPrecision("16-mixed", device="cpu", init_scale=96, growth_interval=7).scaler
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (96.0, 7)
    default = MoEClipPrecision("16-mixed", device="cpu").scaler
    assert (default.get_scale(), default.get_growth_interval()) == (2.0**16, 2000)
    for precision in ("32-true", "64-true", "bf16-mixed", "16-true", "bf16-true"):
        assert MoEClipPrecision(precision, device="cpu").scaler is None


@pytest.mark.parametrize(
    "settings", [{}, {"loss_scaling": "local", "regions": ["layer"]}, {"precision": "16-true", "master_weights": True}]
)
def test_a_strategy_with_its_plugin_goes_to_processes_that_are_spawned(settings: dict) -> None:
    plugin = MoEClipPrecision(**{"precision": "16-mixed", "device": "cpu", "init_scale": 2.0**5, **settings})
    strategy = pickle.loads(pickle.dumps(MoEClipStrategy(precision_plugin=plugin)))
    assert strategy.precision_plugin.scaler.get_scale() == 2.0**5
