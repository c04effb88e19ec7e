"""Statistics of a step equal a float64 computation over all ranks, counts exactly."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback
from lightning_moeclip.gradients.report import GradStatistics, GradSums, LayerKey
from lightning_moeclip.gradients.squares import sum_of_squares
from lightning_moeclip.gradients.statistics import keys_of, layer_keys, sums_of
from lightning_moeclip.parallel.roles import ParamRole
from lightning_moeclip.testing import Rank, on_ranks
from tests.models import TwoTowers, batches, loader, quiet_trainer, share, train_one_process

FIELDS = ("size", "total", "square", "absolute", "maximum", "num_nonfinite", "num_zeros")
BOUND = 1e-10


class Validated(TwoTowers):
    """Runs its layers in evaluation between the steps."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.compute_loss(batch)


class Checkpointed(Validated):
    """Towers that run again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        image, text = (x.requires_grad_() for x in batch)
        features = [
            checkpoint(tower, x, use_reentrant=self.use_reentrant)
            for tower, x in ((self.image, image), (self.text, text))
        ]
        return self.loss(*features)


class Watch(Callback):
    """Keeps statistics of every step, and what autograd leaves on this rank for it."""

    def __init__(self, *, every_n_steps: int = 1) -> None:
        self.every_n_steps = every_n_steps
        self.statistics: list[GradStatistics | None] = []
        self.local: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
        self.sums: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda g, name=name: self.add(name, g))

    def add(self, name: str, gradient: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + gradient.detach().clone()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self.every_n_steps == 0:
            trainer.strategy.ask_for_statistics()

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.statistics.append(trainer.strategy.report.statistics)
        scale = trainer.precision_plugin.state_dict().get("scale", 1.0)
        self.local.append({name: value / scale for name, value in self.sums.items()})
        self.sums.clear()


def watch(rank: Rank, rows: list[int], *, ep: int, module: TwoTowers, accumulate: int = 1, **arguments: Any) -> Any:
    watch = Watch()
    data = share(batches(2 * accumulate), rows, rank.index)
    quiet_trainer(
        rank.world_size,
        strategy=MoEClipStrategy(expert_parallel_size=ep),
        callbacks=[watch],
        accumulate_grad_batches=accumulate,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        val_check_interval=accumulate,
        **arguments,
    ).fit(module, loader(data), loader(data))
    return watch.statistics, watch.local


@on_ranks(2)
def watch_2(rank: Rank, ep: int, accumulate: int, kind: str) -> Any:
    module = (
        Checkpointed(use_reentrant=kind == "reentrant") if "entrant" in kind else Validated(has_own_moe=kind == "own")
    )
    return watch(rank, [5, 3], ep=ep, module=module, accumulate=accumulate)


@on_ranks(4)
def watch_4(rank: Rank, ep: int, accumulate: int, kind: str) -> Any:
    return watch(rank, [4, 3, 0, 1], ep=ep, module=Validated(has_own_moe=kind == "own"), accumulate=accumulate)


@on_ranks(2)
def watch_scaled(rank: Rank) -> Any:
    # autocast leaves float64 layers alone
    precision = MoEClipPrecision("16-mixed", device="cpu", init_scale=2.0**6)
    return watch(rank, [5, 3], ep=1, module=Validated(has_own_moe=False), plugins=[precision])


def truth(gradients: list[tuple[LayerKey, Tensor]], keys: tuple[LayerKey, ...]) -> dict[LayerKey, list[float]]:
    """Fields of each row, one number after another in float64."""
    found = {}
    for key in keys:
        values = [g.double().flatten() for k, g in gradients if k == key]
        flat = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
        top = flat.abs().max().item() if len(flat) else 0.0
        zeros = float((flat == 0).sum())
        found[key] = [float(len(flat)), flat.sum().item(), flat @ flat, flat.abs().sum().item(), top, 0.0, zeros]
    return found


def assert_sums(found: GradSums, wanted: dict[LayerKey, list[float]], keys: tuple[LayerKey, ...]) -> None:
    for row, key in enumerate(keys):
        for name, value in zip(FIELDS, wanted[key], strict=True):
            number = getattr(found, name)[row].item()
            if name in ("size", "num_nonfinite", "num_zeros"):
                assert number == value, (key, name)
            else:
                # a sum may cancel: its rounding is that of the sum of absolutes
                scale = wanted[key][3] if name == "total" else value
                assert abs(number - value) <= BOUND * scale, (key, name, number, value)


def check(told: list[Any], kind: str, accumulate: int, ep: int) -> None:
    whole = TwoTowers(has_own_moe=kind != "list")
    key_of = keys_of(whole)
    step = (lambda m, b: m.loss(m.image(b[0]), m.text(b[1]))) if "entrant" in kind else (lambda m, b: m.compute_loss(b))
    reference = train_one_process(whole, batches(2 * accumulate), accumulate=accumulate, step=step)
    assert len(told[0][0]) == 2
    for index in range(2):
        statistics = told[0][0][index]
        keys = statistics.keys
        assert keys == tuple(dict.fromkeys(key_of.values()))
        for rank in range(1, len(told)):
            for which in ("local", "reduced"):
                mine, other = getattr(statistics, which), getattr(told[rank][0][index], which)
                assert all(torch.equal(getattr(mine, f), getattr(other, f)) for f in FIELDS)
        gradients = [(key_of[n], g) for n, g in reference.gradients[index].items() if g is not None]
        assert_sums(statistics.reduced, truth(gradients, keys), keys)
        # Lightning divides the loss by the number of micro-batches before backward
        local = [(key_of[n], g) for _, locals_of in told for n, g in locals_of[index].items()]
        assert_sums(statistics.local, truth(local, keys), keys)
        assert_noise(statistics, [r[1][index] for r in told], reference.gradients[index], key_of, ep)


def assert_noise(statistics: GradStatistics, local: list[Any], reduced: Any, key_of: Any, ep: int) -> None:
    world = len(local)
    for row, key in enumerate(statistics.keys):
        names = [n for n in reduced if key_of[n] == key and reduced[n] is not None]
        is_spread = key.kind == "expert" and ep > 1
        replicas = world // ep if is_spread else world
        if replicas == 1 or not names:
            assert statistics.noise[row].isnan()
            continue
        total = 0.0
        for name in names:
            for first in range(ep if is_spread else 1):
                holders = range(first, world, ep) if is_spread else range(world)
                mean = reduced[name] if not is_spread else reduced[name].chunk(ep)[first]
                own = [local[r].get(name, torch.zeros_like(mean)) * replicas / world for r in holders]
                deviation = sum(((h - mean) ** 2).sum() for h in own) / (replicas - 1)
                total += world / replicas * deviation.item()
        assert abs(statistics.noise[row].item() - total) <= 1e-9 * total, key


@pytest.mark.parametrize(
    ("kind", "ep", "accumulate"),
    [("own", 1, 1), ("own", 2, 2), ("list", 1, 2), ("reentrant", 1, 1), ("nonreentrant", 2, 1)],
)
def test_statistics_of_2_ranks_equal_float64_over_all_of_them(kind: str, ep: int, accumulate: int) -> None:
    check(watch_2.launch(ep=ep, accumulate=accumulate, kind=kind), kind, accumulate, ep)


@pytest.mark.parametrize(("kind", "ep", "accumulate"), [("own", 2, 1), ("own", 4, 1), ("list", 1, 1)])
def test_statistics_of_4_ranks_with_an_empty_one_equal_float64(kind: str, ep: int, accumulate: int) -> None:
    check(watch_4.launch(ep=ep, accumulate=accumulate, kind=kind), kind, accumulate, ep)


def test_loss_scale_is_divided_out_of_both() -> None:
    check(watch_scaled.launch(), "list", 1, 1)


def test_one_process_without_reduction_has_local_equal_to_reduced() -> None:
    watch = Watch(every_n_steps=2)
    trainer = quiet_trainer(1, strategy=MoEClipStrategy(), callbacks=[watch])
    trainer.fit(TwoTowers(), loader(batches(3)))
    first, second, third = watch.statistics
    assert second is None
    assert first is not None
    assert third is not None
    assert all(torch.equal(getattr(first.local, f), getattr(first.reduced, f)) for f in FIELDS)
    assert first.noise.isnan().all()


@on_ranks(2)
def plant(rank: Rank) -> Any:
    module = TwoTowers()

    class Plant(Watch):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            module.image.stem.weight.grad[0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
            module.text.stem.weight.grad.zero_()
            module.text.stem.bias.grad = None

    watch = Plant()
    trainer = quiet_trainer(2, callbacks=[watch])
    trainer.fit(module, loader(share(batches(1), [4, 4], rank.index)))
    return watch.statistics[0]


def test_planted_nan_zero_and_missing_gradients_are_counted_where_the_optimizer_sees_them() -> None:
    for found in plant.launch():
        row = found.keys.index(LayerKey("image", "stem", "dense"))
        assert found.reduced.num_nonfinite[row] == 2
        assert found.reduced.num_zeros[row] == 1
        assert found.local.num_nonfinite[row] == 0
        assert found.reduced.variance[row].isnan()
        assert found.reduced.square[row].isfinite()
        text = found.keys.index(LayerKey("text", "stem", "dense"))
        assert found.reduced.size[text] == 35
        assert found.reduced.num_zeros[text] == 35
        assert found.reduced.variance[text] == 0


class Unfreezing(TwoTowers):
    """Trains the text tower's stem from the second batch on, which the plan hears of when its gradients come."""

    def __init__(self) -> None:
        super().__init__()
        self.text.stem.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.text.stem.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def watch_unfreezing(rank: Rank) -> Any:
    watch = Watch()
    watch.on_fit_start = lambda *_: None  # type: ignore[method-assign]
    watch.sums = {}
    module = Unfreezing()
    quiet_trainer(2, callbacks=[watch]).fit(module, loader(share(batches(3), [4, 4], rank.index)))
    return watch.statistics, [gradients["text.stem.weight"] for gradients in module.gradients]


def test_a_step_whose_plan_is_made_anew_has_reduced_statistics_and_rows_keep_their_names() -> None:
    for statistics, stem in watch_unfreezing.launch():
        key = LayerKey("text", "stem", "dense")
        assert [key in found.keys for found in statistics] == [False, True, True]
        assert set(statistics[0].keys) == set(statistics[1].keys) - {key}
        assert stem[1] is not None
        for found in statistics[1:]:
            assert found.reduced.size[found.keys.index(key)] == 40
        # nobody read the packing of a plan that was not there
        assert statistics[1].local.square.isnan().all()
        assert statistics[2].local.square.isfinite().all()


class Silent(TwoTowers):
    """The second rank has no loss in the first batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 0 else loss

    def on_train_batch_end(self, *args: object) -> None:
        pass


@on_ranks(2)
def watch_silent(rank: Rank) -> Any:
    watch = Watch()
    module = Silent(has_own_moe=False)
    # a loss of each rank's own rows, so that the rank without one owes the other nothing
    module.compute_loss = lambda batch: module.image(batch[0]).square().mean() + module.text(batch[1]).square().mean()
    quiet_trainer(2, callbacks=[watch]).fit(module, loader(share(batches(1), [4, 4], rank.index)))
    return watch.statistics[0]


def test_zeros_that_stand_in_for_a_missing_loss_are_no_gradients_of_that_rank() -> None:
    for found in watch_silent.launch():
        row = found.keys.index(LayerKey("image", "stem", "dense"))
        assert found.reduced.size[row] == 45
        assert found.local.size[row] == 45


@on_ranks(2)
def watch_masters(rank: Rank) -> Any:
    watch = Watch()
    module = TwoTowers(has_own_moe=False).float()
    data = [(x.bfloat16(), y.bfloat16()) for x, y in share(batches(1), [4, 4], rank.index)]
    plugin = MoEClipPrecision("bf16-true", master_weights=True)
    quiet_trainer(2, callbacks=[watch], plugins=[plugin]).fit(module, loader(data))
    return watch.statistics[0], module.gradients[0]


def test_gradients_of_masters_are_those_of_the_parameters() -> None:
    for found, gradients in watch_masters.launch():
        wanted = sum(g.double().square().sum().item() for g in gradients.values() if g is not None)
        assert abs(found.reduced.square.sum().item() - wanted) <= 1e-6 * wanted


@on_ranks(2)
def watch_noise_of_nan(rank: Rank) -> Any:
    class Poisoned(Watch):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            super().on_train_batch_start(trainer)
            if trainer.global_rank == 1:
                module.image.stem.weight.register_hook(lambda g: torch.full_like(g, torch.nan))

    watch = Poisoned()
    quiet_trainer(2, callbacks=[watch]).fit(TwoTowers(), loader(share(batches(1), [4, 4], rank.index)))
    return watch.statistics[0]


def test_noise_is_unknown_where_a_rank_has_gradients_that_are_not_finite() -> None:
    for found in watch_noise_of_nan.launch():
        row = found.keys.index(LayerKey("image", "stem", "dense"))
        assert found.local.num_nonfinite[row] == 40
        assert found.noise[row].isnan()
        assert found.noise[found.keys.index(LayerKey("text", "stem", "dense"))] > 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning", r"ignore:.*\[MOE404:")
def test_without_a_loss_in_the_last_micro_batch_the_others_gradients_are_published(precision: str) -> None:
    class LeavesOut(TwoTowers):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
            return None if batch_idx == 1 else self.compute_loss(batch)

        def on_train_batch_end(self, *args: object) -> None:
            pass

    watch = Watch()
    settings = {"init_scale": 2.0**10} if precision == "16-mixed" else {}
    plugin = MoEClipPrecision(precision, device="cpu", **settings)
    trainer = quiet_trainer(
        1, strategy=MoEClipStrategy(), callbacks=[watch], plugins=[plugin], accumulate_grad_batches=2
    )
    trainer.fit(LeavesOut(has_own_moe=False), loader(batches(2)))
    (found,), (gradients,) = watch.statistics, watch.local
    wanted = sum(gradient.double().square().sum().item() for gradient in gradients.values())
    for sums in (found.local, found.reduced):
        assert sums.square.sum().item() == pytest.approx(wanted, rel=1e-6)


def test_square_of_a_large_float32_tensor_is_that_of_float64_and_does_not_overflow() -> None:
    generator = torch.Generator().manual_seed(0)
    key = LayerKey("image", "embedding", "dense")
    for values in (torch.randn(2**23 + 3, generator=generator), torch.full((2**23,), 0.1)):
        wanted = values.double().square().sum().item()
        # equal elements in rows of 4096, one rounded after the other: 5e-6
        assert abs(sums_of([(key, values)])[1].square.item() - wanted) <= 1e-5 * wanted
        found = sum_of_squares([values, values[:5], values[:0]], device=torch.device("cpu")).item()
        wanted += values[:5].double().square().sum().item()
        assert abs(found - wanted) <= 1e-5 * wanted
    huge = sums_of([(key, torch.full((3,), 1e30))])[1]
    assert abs(huge.square.item() - 3e60) <= 1e-6 * 3e60
    assert huge.num_nonfinite == 0


def test_a_complex_gradient_counts_its_real_and_imaginary_parts() -> None:
    value = torch.tensor([3 + 4j, 0 - 2j], dtype=torch.complex64)
    found = sums_of([(LayerKey(None, "filter", "dense"), value.conj())])[1]
    assert [found.size, found.total, found.num_zeros] == [4, 3 - 4 + 2, 1]
    epsilon = torch.finfo(torch.float32).eps
    for square in (found.square, sum_of_squares([value], device=torch.device("cpu"))):
        assert abs(square.item() - (9 + 16 + 4)) <= 29 * 4 * epsilon


def test_variance_is_that_of_torch_in_float64_and_nan_for_one_element() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, generator=generator) for n in (7, 5))
    key, single = LayerKey("image", "blocks.0", "dense"), LayerKey(None, "logit_scale", "logit_scale")
    keys, sums = sums_of([(key, a), (single, torch.tensor(2.0)), (key, b)])
    assert keys == (key, single)
    wanted = torch.cat([a, b]).double().var()
    assert abs(sums.variance[0] - wanted) <= 1e-6 * wanted
    assert sums.variance[1].isnan()
    assert sums.norm[1] == 2.0
    assert sums_of([])[0] == ()


def test_layers_are_blocks_inside_their_tower_and_modules_elsewhere() -> None:
    paths = {
        "model.visual.patches.weight": ("image", "dense"),
        "model.visual.position": ("image", "dense"),
        "model.visual.transformer.blocks.0.mlp.0.weight": ("image", "dense"),
        "model.visual.transformer.blocks.1.mlp.w_in": ("image", "expert"),
        "model.visual.transformer.blocks.1.mlp.router.weight": ("image", "router"),
        "model.text.layers.2.blocks.3.mlp.experts.7.weight": ("text", "expert"),
        "model.text.layers.2.blocks.4.attention.qkv.bias": ("text", "dense"),
        "model.moe.experts.0.weight": (None, "expert"),
        "loss.logit_scale": (None, "logit_scale"),
    }
    found = layer_keys({path: ParamRole(tower, kind) for path, (tower, kind) in paths.items()})
    assert [key.layer for key in found.values()] == [
        "patches",
        "position",
        "transformer.blocks.0",
        "transformer.blocks.1",
        "transformer.blocks.1",
        "3",
        "4",
        "model.moe",
        "loss.logit_scale",
    ]
