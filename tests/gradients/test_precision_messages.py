"""What a precision cannot do is an error that says what to write, and what it ignores is one warning on rank 0."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.modules import ContrastiveLoss, MoE
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import ListMoE, loader, quiet_trainer

DIM = 8


class Net(LightningModule):
    """A layer between the batch and what a test puts behind it."""

    def __init__(self, behind: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(DIM, DIM)
        self.behind = behind

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        hidden = self.layer(batch.to(self.layer.weight.dtype))
        return (hidden if self.behind is None else self.behind(hidden)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)


class Scaled(nn.Module):
    """A user's temperature."""

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full(shape, 2.6592, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.logit_scale.exp()


class Ours(nn.Module):
    """Experts and loss of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.loss = MoE(DIM, DIM, 4), ContrastiveLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x, self.moe(x))


class DefaultEps(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class InConfigureModel(Net):
    """The temperature is made where Lightning has set the default dtype to that of the precision."""

    def configure_model(self) -> None:
        if self.behind is None:
            self.behind = Scaled()


def rows() -> Any:
    return loader([torch.randn(4, DIM, generator=torch.Generator().manual_seed(0)) for _ in range(2)])


def of(precision: str, **arguments: Any) -> dict[str, Any]:
    return {"plugins": [MoEClipPrecision(precision, device="cpu", **arguments)]}


PLAIN = "32-true"
REFUSED: dict[str, tuple[Callable[[], Net], str, str]] = {
    "half of a logit_scale": (
        lambda: Net(Scaled()).half(),
        PLAIN,
        r"behind\.logit_scale is torch\.float16: .*steps of 0\.4%, and Adam's eps vanishes in float16\. Keep it in "
        r"float32, nn\.Parameter\(torch\.tensor\(2\.6592, dtype=torch\.float32\)\), also where .* half\(\)",
    ),
    "half of a router": (
        lambda: Net(ListMoE(DIM, 4)).half(),
        PLAIN,
        r"behind\.router\.weight is a router in torch\.float16: .* Use lightning_moeclip\.modules\.MoE, .* or "
        r"MoEClipPrecision\(\.\.\., master_weights=True\)",
    ),
    "router cast by 16-true": (lambda: Net(ListMoE(DIM, 4)), "16-true", r"behind\.router\.weight is a router in torch"),
    "half under 16-mixed": (
        lambda: Net().half(),
        "16-mixed",
        r"layer\.weight is float16 while the loss is scaled: .* Leave out module\.half\(\), since .*'16-mixed' casts "
        r"what it computes, or write MoEClipPrecision\(\.\.\., master_weights=True\)",
    ),
    "eps that is zero in float16": (
        DefaultEps,
        "16-true",
        r"AdamW\(eps=1e-08\) steps layer\.weight in float16, .* become NaN\. .*master_weights=True.*, or eps=1e-4",
    ),
    "1-d logit_scale": (
        lambda: Net(Scaled(1)),
        "bf16-true",
        r"behind\.logit_scale is torch\.bfloat16: .*steps of 3\.1%.* Its shape is \[1\]: only a 0-d one stays float32",
    ),
    "logit_scale of configure_model": (
        InConfigureModel,
        "bf16-true",
        r"behind\.logit_scale is torch\.bfloat16: .* Keep it in float32, .*dtype=torch\.float32",
    ),
}
GOES_ON: dict[str, tuple[Callable[[], Net], str]] = {
    "0-d logit_scale under bf16-true": (lambda: Net(Scaled()), "bf16-true"),
    "0-d logit_scale under 16-true": (lambda: Net(Scaled()), "16-true"),
    "default eps in bfloat16": (lambda: DefaultEps(Scaled()), "bf16-true"),
    "float32 in configure_model": (lambda: Net(Scaled(dtype=torch.float32)), "bf16-true"),
    "half of our MoE and loss": (lambda: Net(Ours()).half(), PLAIN),
    "our MoE and loss under 16-true": (lambda: Net(Ours()), "16-true"),
    "our MoE and loss under bf16-true": (lambda: Net(Ours()), "bf16-true"),
}


@on_ranks(2)
def told(rank: Rank) -> dict[str, str]:
    """How each run ends on this rank."""
    ends = {}
    for name, (make, precision, *_) in {**REFUSED, **GOES_ON}.items():
        module = make()
        try:
            quiet_trainer(2, **of(precision)).fit(module, rows())
            finite = all(bool(p.isfinite().all()) for p in module.parameters())
            wide = sorted(n for n, p in module.named_parameters() if p.dtype is torch.float32)
            ends[name] = f"finite {finite}, float32 {' '.join(wide)}"
        except ValueError as error:
            ends[name] = f"ValueError: {error}"
    return ends


def test_case_16_half_with_adamw_is_refused_with_its_reason_for_scale_and_router_and_ours_trains() -> None:
    for ends in told.launch():
        for name, (_, _, message) in REFUSED.items():
            assert re.search(message, ends[name], re.DOTALL), f"{name}: {ends[name]}"
        for name in GOES_ON:
            wide = "behind.logit_scale"
            if "our" in name:
                wide = "behind.loss.logit_scale behind.moe.router.weight"
            assert ends[name] == f"finite True, float32 {wide}", name


WARNED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"local, {precision}": (
            of(precision, loss_scaling="local"),
            rf"MoEClipPrecision\('{precision}', loss_scaling='local'\): this precision has no loss scale, so that is "
            rf"ignored\. Leave it out, or use {instead}",
        )
        for precision, instead in (
            ("32-true", "precision='16-mixed'"),
            ("bf16-mixed", "precision='16-mixed'"),
            ("bf16-true", "precision='16-mixed'"),
            ("16-true", "master_weights=True"),
        )
    },
    "interval without a scale": (
        of("bf16-mixed", growth_interval=10, init_scale=8.0),
        r"MoEClipPrecision\('bf16-mixed', init_scale=8\.0, growth_interval=10\): this precision has no loss scale",
    ),
    "regions, unified": (
        of("16-mixed", regions=["layer"]),
        r"regions=\['layer'\] is ignored with loss_scaling='unified', which has one scale\. Write loss_scaling='local'",
    ),
    "two precisions": (
        {
            "precision": "bf16-mixed",
            "strategy": MoEClipStrategy(precision_plugin=MoEClipPrecision("16-mixed", device="cpu")),
        },
        r"Trainer\(precision='bf16-mixed'\) is ignored: .*precision_plugin of '16-mixed', and that one is used",
    ),
    "nothing to warn of": (of("16-mixed", init_scale=3000, growth_interval=10), r"$^"),
    "nor of the same twice": (
        {"precision": "bf16-mixed", "strategy": MoEClipStrategy(precision_plugin=MoEClipPrecision("bf16-mixed"))},
        r"$^",
    ),
}


@on_ranks(2)
def test_what_is_ignored_warns_once_on_rank_0(rank: Rank) -> None:
    for name, (arguments, message) in WARNED.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(2, **arguments).fit(Net(), rows())
        texts = [str(w.message) for w in caught if "ignored" in str(w.message) or "MoEClip" in str(w.message)]
        found = gather_objects(texts)
        if message == r"$^":
            assert found == [[], []], name
        else:
            assert [len(messages) for messages in found] == [1, 0], f"{name}: {found}"
            assert re.match(message, found[0][0]), f"{name}: {found}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_scaling": "both"}, r"loss_scaling='both' must be \"unified\" \(the default\) or \"local\""),
        ({"init_scale": 0.0}, r"init_scale=0\.0 must be a positive number\. The default is 2\.0\*\*16"),
        ({"init_scale": -2.0}, r"init_scale=-2\.0 must be a positive number"),
        ({"init_scale": float("inf")}, r"init_scale=inf must be a positive number"),
        ({"init_scale": float("nan")}, r"init_scale=nan must be a positive number"),
        ({"growth_interval": 0}, r"growth_interval=0 must be an integer from 1\. The default is 2000"),
        ({"growth_interval": 2.5}, r"growth_interval=2\.5 must be an integer"),
        (
            {"regions": "head"},
            r"regions='head' must be a list with a module path or more, such as regions=\['image\.head",
        ),
        (
            {"regions": []},
            r"regions=\[\] must be a list with a module path or more, .* Leave it out to take projection",
        ),
        (
            {"init_scale": 3000, "loss_scaling": "local"},
            r"init_scale=3000\.0 must be a power of two with loss_scaling='local': .* Use init_scale=4096, or loss_sc",
        ),
    ],
)
def test_settings_out_of_their_range_say_what_to_write(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEClipPrecision("16-mixed", device="cpu", **arguments)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize(
    ("precision", "arguments", "message"),
    [
        ("16-mixed", {"loss_scaling": "local"}, r"MoEClipPrecision\(loss_scaling='local'\) needs the gradient buckets"),
        ("bf16-true", {"master_weights": True}, r"\(master_weights=True\) .* Write Trainer\(strategy=MoEClipStrategy"),
    ],
)
def test_what_needs_our_buckets_is_refused_under_another_strategy(
    strategy: str, precision: str, arguments: dict[str, Any], message: str
) -> None:
    trainer = quiet_trainer(1, strategy=strategy, **of(precision, **arguments))
    with pytest.raises(ValueError, match=message):
        trainer.fit(Net(), rows())
