"""What cannot work ends in an error that names it, on every rank, and never in a hang."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.gradients.corridor import CorridorSettings
from lightning_moeclip.parallel.checks import _DDP_ARGUMENTS
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import share_of, trainer
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(LightningModule):
    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.visual = nn.Linear(DIM, DIM).double()
        self.text = nn.Linear(DIM, DIM).double()
        self.build(rank)

    def build(self, rank: int) -> None:
        self.head = nn.Linear(DIM, DIM).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.text(self.visual(batch))).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class AnotherShape(Net):
    def build(self, rank: int) -> None:
        self.head = nn.Linear(DIM, DIM + rank).double()


class AnotherType(Net):
    def build(self, rank: int) -> None:
        self.head = nn.Linear(DIM, DIM).to(torch.float64 if rank == 0 else torch.float32)


class AnotherOrder(Net):
    def build(self, rank: int) -> None:
        for name in ("head", "tail") if rank == 0 else ("tail", "head"):
            setattr(self, name, nn.Linear(DIM, DIM).double())


class OneMore(Net):
    def build(self, rank: int) -> None:
        super().build(rank)
        if rank == 1:
            self.extra = nn.Linear(DIM, DIM).double()


class FrozenOnOneRank(Net):
    def build(self, rank: int) -> None:
        super().build(rank)
        self.head.weight.requires_grad_(rank == 0)


class ThawsOnOneRank(Net):
    """Within the first epoch, where nothing but the roll call of a backward can tell."""

    def build(self, rank: int) -> None:
        super().build(rank)
        self.head.weight.requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == 1:
            self.head.weight.requires_grad_(True)


class ThawsOnOneRankInManual(ThawsOnOneRank):
    def build(self, rank: int) -> None:
        super().build(rank)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1.0), torch.optim.SGD(self.text.parameters(), lr=1.0)], []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        raise AssertionError("training began")

    def build(self, rank: int) -> None:
        super().build(rank)
        self.automatic_optimization = False


class FiveExperts(Net):
    def build(self, rank: int) -> None:
        self.head = TinyExperts(DIM, 5)


class GradientFromBefore(Net):
    def build(self, rank: int) -> None:
        self.head = TinyExperts(DIM, 4)
        if rank == 1:
            self.head.weight.grad = torch.zeros_like(self.head.weight)


class AnotherBuffer(Net):
    def build(self, rank: int) -> None:
        super().build(rank)
        self.register_buffer("seen", torch.zeros(2 + rank))


FAULTS: dict[str, tuple[Callable[[int], Net], dict, str, str]] = {
    "shape": (
        AnotherShape,
        {},
        "RuntimeError",
        r"first at entry 4: rank 0 has 'head\.weight \[4, 4\].*rank 1 has 'head",
    ),
    "dtype": (AnotherType, {}, "RuntimeError", r"rank 1 has 'head\.weight \[4, 4\] torch\.float32'"),
    "order": (AnotherOrder, {}, "RuntimeError", r"rank 0 has 'head\.weight.*rank 1 has 'tail\.weight"),
    "one more": (OneMore, {}, "RuntimeError", r"rank 0 has 'nothing', rank 1 has 'extra\.weight"),
    "buffer": (AnotherBuffer, {}, "RuntimeError", r"rank 0 has 'seen \[2\].*rank 1 has 'seen \[3\]"),
    "frozen": (FrozenOnOneRank, {}, "RuntimeError", r"set of trainable parameters differs.*head\.weight"),
    "thaws": (ThawsOnOneRank, {}, "RuntimeError", r"set of trainable parameters differs.*head\.weight"),
    "thaws in manual": (
        ThawsOnOneRankInManual,
        {},
        "RuntimeError",
        r"set of trainable parameters differs.*head\.weight",
    ),
    "two optimizers": (TwoOptimizers, {}, "ValueError", r"text\.weight is in optimizer 0 and in optimizer 1"),
    "five experts": (FiveExperts, {"expert_parallel_size": 2}, "ValueError", r"num_experts=5 cannot be spread over"),
    "old gradient": (
        GradientFromBefore,
        {"expert_parallel_size": 2},
        "ValueError",
        r"weight has a gradient from before",
    ),
    "no such tower": (Net, {"towers": {"image": "vision"}}, "ValueError", r"no 'vision'.*visual, text, head"),
    "overlap": (Net, {"towers": {"image": "text", "text": ["text.weight"]}}, "ValueError", "towers overlap"),
    "world": (
        Net,
        {"expert_parallel_size": 3},
        "ValueError",
        r"expert_parallel_size=3 does not divide .* one of \[1, 2\]",
    ),
}


@on_ranks(2)
def told(rank: Rank) -> dict[str, str]:
    """What each faulty run ends with on this rank."""
    errors = {}
    for name, (kind, strategy, _, _) in FAULTS.items():
        try:
            trainer(strategy=MoEClipStrategy(**strategy)).fit(kind(rank.index), share_of(BATCHES, rank))
        except (RuntimeError, TypeError, ValueError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


@on_ranks(2)
def told_in_validation(rank: Rank) -> str:
    net = AnotherShape(rank.index)
    net.validation_step = net.training_step
    try:
        trainer().validate(net, share_of(BATCHES, rank), verbose=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_models_that_differ_are_refused_outside_fit_too() -> None:
    for error in told_in_validation.launch():
        assert re.search(r"The model differs between ranks.*rank 0 has 'head\.weight \[4, 4\]", error), error


@functools.cache
def told_on_both_ranks() -> list[dict[str, str]]:
    return told.launch()


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_run_ends_with_its_reason_on_every_rank(fault: str) -> None:
    _, _, error, message = FAULTS[fault]
    for errors in told_on_both_ranks():
        assert errors[fault].startswith(error)
        assert re.search(message, errors[fault]), errors[fault]


@pytest.mark.parametrize("name", [*_DDP_ARGUMENTS, "no_such_argument"])
def test_arguments_of_torch_ddp_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=rf"MoEClipStrategy\({name}=True\): .*(leave it out|write|see help|use)"):
        MoEClipStrategy(**{name: True})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_parallel_size": 0}, "expert_parallel_size=0 must be at least 1"),
        ({"bucket_size_mb": 0.0}, "bucket_size_mb=0.0 must be positive"),
        ({"bucket_size_mb": float("nan")}, "bucket_size_mb=nan must be positive"),
        ({"idle_expert": "none"}, "idle_expert='none' must be"),
        ({"gradient_dtype": "int8"}, "must be a floating-point dtype"),
        ({"gradient_dtype": "half16"}, "is not a dtype of torch"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEClipStrategy(**arguments)


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        CorridorSettings().bucket_size_mb = 1.0  # type: ignore[misc]


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="no such precision"):
        MoEClipPrecision("8-mixed")  # type: ignore[arg-type]
