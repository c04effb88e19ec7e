"""Shapes, strides, dtypes and graphs that flat buckets have to bear, against one process."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.gradients.roll_call import NUM_FIELDS
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from lightning_moeclip.testing.on_ranks import RanksFailed
from tests.gradients.one_process import (
    TOLERANCE,
    Notebook,
    gradients,
    logged_collectives,
    parameters,
    share_of,
    trainer,
    worst_error,
)

DIM = 4
BATCHES = torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Base(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.build()

    def build(self) -> None:
        self.linear = nn.Linear(DIM, DIM).double()

    def loss(self, x: Tensor) -> Tensor:
        return self.linear(x).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class AnyShape(Base):
    """A scalar, an empty parameter, one with holes in memory, a transposed one and a channels-last convolution."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, DIM, dtype=torch.float64))
        self.holes = nn.Parameter(torch.randn(DIM, 2 * DIM, dtype=torch.float64)[:, ::2])
        self.transposed = nn.Parameter(torch.randn(DIM + 1, DIM, dtype=torch.float64).T)
        self.overlapping = nn.Parameter(torch.randn(DIM, dtype=torch.float64))
        self.conv = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)

    def loss(self, x: Tensor) -> Tensor:
        y = x @ self.holes * self.scale + self.empty.sum() + self.overlapping
        z = self.conv(x.view(-1, 1, 2, 2).expand(-1, 2, -1, -1).contiguous(memory_format=torch.channels_last))
        return (y @ self.transposed).tanh().pow(2).mean() + z.tanh().pow(2).mean()


class Tied(Base):
    """One weight in three places, one of them in a block that runs twice under activation checkpointing."""

    use_reentrant: bool | None = None

    def build(self) -> None:
        self.shared = nn.Linear(DIM, DIM).double()
        self.tied = nn.Linear(DIM, DIM).double()
        self.tied.weight = self.shared.weight
        self.block = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()).double()
        self.tail = nn.Linear(DIM, DIM).double()

    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x) if self.use_reentrant is None else checkpoint(part, x, use_reentrant=self.use_reentrant)

    def loss(self, x: Tensor) -> Tensor:
        x = self.shared(x.clone().requires_grad_())
        for part in (self.block, self.shared, self.block, self.tied):
            x = self.run(part, x)
        return self.tail(x).pow(2).mean()


class Reentrant(Tied):
    use_reentrant = True


class NonReentrant(Tied):
    use_reentrant = False


class LateReentrant(Reentrant):
    """Checkpoints from the third step on only: parts arrive when their bucket is on its way already."""

    num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.use_reentrant = True if batch_idx >= 2 else None
        return self.loss(batch)


class RawReentrant(Reentrant):
    """loss.backward() without the strategy, whose end autograd announces once per checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self._trainer is None:  # in plain torch
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()
        return None


class ScalarAndExpert(Base):
    """Dense, expert and scalar parameters, one of them idle, under one clip."""

    def build(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM).double() for _ in range(3)])

    def loss(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        # by the row, so that the ranks' choice is that of one process
        parts = [self.experts[k](y) * (x[:, :1] > 0.3 * k) for k in range(2)]
        return (sum(parts) * self.logit_scale.exp()).pow(2).mean()


def fit(
    module: LightningModule, rank: Rank, *, batches: Tensor = BATCHES, strategy: Any = None, **arguments: Any
) -> Notebook:
    notebook = Notebook()
    trainer(strategy=strategy, callbacks=[notebook], **arguments).fit(module, share_of(batches, rank))
    return notebook


def in_plain_torch(module: Base, *, clip: float | None = None) -> list[dict[str, Tensor | None]]:
    seen = []
    optimizer = module.configure_optimizers()
    for k, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        module.training_step(batch, k).backward()
        seen.append(gradients(module))
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], clip)
        optimizer.step()
    return seen


@on_ranks(2)
def test_odd_shapes_strides_and_graphs_equal_one_process(rank: Rank) -> None:
    kinds = [AnyShape, Tied, NonReentrant, Reentrant, LateReentrant, ScalarAndExpert]
    for kind in kinds:
        for bucket_size_mb in (1e-6, 25.0):  # each parameter alone, and all together
            for clip in (None, 0.02):
                module, true = kind(), kind()
                notebook = fit(
                    module, rank, strategy=MoEClipStrategy(bucket_size_mb=bucket_size_mb), gradient_clip_val=clip
                )
                for k, (got, want) in enumerate(zip(notebook.gradients, in_plain_torch(true, clip=clip), strict=True)):
                    assert worst_error(got, want) < TOLERANCE, f"{kind.__name__}, step {k}"
                assert worst_error(parameters(module), parameters(true)) < TOLERANCE, kind.__name__


@on_ranks(2)
def test_raw_backward_under_reentrant_checkpointing_equals_one_process(rank: Rank) -> None:
    module, true = RawReentrant(), RawReentrant()
    notebook = fit(module, rank, strategy=MoEClipStrategy(bucket_size_mb=1e-6))
    for got, want in zip(notebook.gradients, in_plain_torch(true), strict=True):
        assert worst_error(got, want) < TOLERANCE
    assert worst_error(parameters(module), parameters(true)) < TOLERANCE


@on_ranks(2)
def test_bucket_is_reduced_once_per_step_under_activation_checkpointing(rank: Rank) -> None:
    for kind in (NonReentrant, Reentrant):
        with logged_collectives() as log:
            fit(kind(), rank)
        sums = [n for call, group, n in log if call == "all_reduce" and group == "moeclip_gradients_dp"]
        num_elements = sum(p.numel() for p in kind().parameters())
        assert sums == [num_elements, NUM_FIELDS + len(list(kind().parameters()))] * len(BATCHES), kind.__name__


class SeveralTypes(Base):
    def build(self) -> None:
        self.double_ = nn.Linear(DIM, DIM).double()
        self.single = nn.Linear(DIM, DIM).float()
        self.brain = nn.Linear(DIM, DIM).bfloat16()

    def loss(self, x: Tensor) -> Tensor:
        return sum(p(x.to(p.weight.dtype)).pow(2).mean().double() for p in (self.double_, self.single, self.brain))


@on_ranks(2)
def test_several_types_in_one_model_equal_one_process_by_their_precision(rank: Rank) -> None:
    module, true = SeveralTypes(), SeveralTypes()
    first = fit(module, rank, gradient_clip_val=0.05).gradients[0]
    want = in_plain_torch(true)[0]
    # a bfloat16 gradient is rounded on each rank and in the sum, of terms that may cancel
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
    for name, gradient in want.items():
        assert first[name].dtype is gradient.dtype
        error = (first[name].double() - gradient.double()).norm() / gradient.double().norm()
        assert error < bounds[gradient.dtype], name
    assert all(other == bits(module) for other in gather_objects(bits(module)))


def bits(module: nn.Module) -> list[bytes]:
    return [p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in module.parameters() if p.ndim]


@on_ranks(2)
def test_clipping_bfloat16_gradients_leaves_the_norm_at_its_bound(rank: Rank) -> None:
    class Brain(Base):
        def build(self) -> None:
            self.linear = nn.Linear(64, 64).bfloat16()

        def loss(self, x: Tensor) -> Tensor:
            return self.linear(x.bfloat16()).pow(2).mean().float()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.unclipped = gradients(self)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.clipped = gradients(self)

    module = Brain()
    batches = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    loop = trainer(gradient_clip_val=0.01)
    loop.fit(module, share_of(batches, rank))
    before, after = ([g.double().norm() for g in found.values()] for found in (module.unclipped, module.clipped))
    true = torch.stack(before).norm()
    assert abs(float(loop.strategy.report.total_norm) / float(true) - 1) < 1e-6
    # each element is rounded by itself, up and down: far below the 2^-8 of a rounded factor
    assert abs(float(torch.stack(after).norm()) / 0.01 - 1) < 2**-11


class Wide(Base):
    def build(self) -> None:
        self.linear = nn.Linear(DIM, 32)
        self.head = nn.Linear(32, DIM)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x.float()).tanh()).pow(2).mean()


@on_ranks(2)
def test_gradient_dtype_bfloat16_is_within_its_rounding_and_bit_equal_on_ranks(rank: Rank) -> None:
    module, true = Wide(), Wide()
    notebook = fit(module, rank, strategy=MoEClipStrategy(gradient_dtype="bfloat16"))
    want = in_plain_torch(true)[0]
    assert all(other == bits(module) for other in gather_objects(bits(module)))
    shares = []
    for part in BATCHES[0].chunk(2):
        part_of = Wide()
        (part_of.loss(part) / 2).backward()
        shares.append(gradients(part_of))
    for name, gradient in want.items():
        # each of the two terms and their sum is rounded by at most 2^-8 of itself
        terms = shares[0][name].abs() + shares[1][name].abs()
        error = (notebook.gradients[0][name] - gradient).abs()
        assert bool((error <= 2**-8 * (1 + 2**-8) * (terms + gradient.abs()) + 1e-6).all()), name
        # float32 alone would be a thousand times nearer
        assert bool((error > 2**-12 * gradient.abs()).any()), f"{name} was not rounded at all"


@on_ranks(2)
def test_model_without_trainable_parameters_runs(rank: Rank) -> None:
    no_trainable_parameter()


def no_trainable_parameter() -> None:
    class Frozen(Base):
        def build(self) -> None:
            super().build()
            self.linear.requires_grad_(False)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            leaf = batch.clone().requires_grad_()
            self.manual_backward(self.loss(leaf))
            assert leaf.grad is not None

        def configure_optimizers(self) -> None:
            return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = trainer()
        loop.fit(Frozen(), share_of(BATCHES, Rank(0, 1)))
    assert loop.strategy.plan.parameters == ()


def test_model_without_trainable_parameters_runs_on_one_process() -> None:
    no_trainable_parameter()


@on_ranks(2)
def test_compiled_module_equals_one_process(rank: Rank) -> None:
    module, true = ScalarAndExpert(), ScalarAndExpert()
    notebook = fit(torch.compile(module, backend="aot_eager"), rank)
    want = in_plain_torch(true)
    for got, w in zip(notebook.gradients, want, strict=True):
        assert worst_error({n.removeprefix("_orig_mod."): g for n, g in got.items()}, w) < TOLERANCE


class SparseByHand(Base):
    """Makes sparse gradients where no layer says so."""

    def build(self) -> None:
        self.table = nn.Parameter(torch.randn(5, DIM, dtype=torch.float64))

    def loss(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x)) % 5
        return nn.functional.embedding(rows, self.table, sparse=True).pow(2).mean()


class SparseLayer(Base):
    def build(self) -> None:
        self.table = nn.Embedding(5, DIM, sparse=True)


@on_ranks(2)
def fits(rank: Rank, kind: type[Base]) -> None:
    fit(kind(), rank)


@pytest.mark.parametrize(("kind", "message"), [(SparseLayer, "table has sparse=True"), (SparseByHand, "table got a")])
def test_sparse_gradients_are_refused_with_the_reason(kind: type[Base], message: str) -> None:
    with pytest.raises(RanksFailed, match=message) as caught:
        fits.launch(kind=kind)
    assert set(caught.value.failures) == {0, 1}
    assert all("sparse=False" in why for why in caught.value.failures.values())
