"""Cases from the field that are about gradients; each test names the report it comes from."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, Notebook, gradients, parameters, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Base(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.build()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WithExperts(Base):
    def build(self) -> None:
        self.dense = nn.Linear(DIM, DIM).double()
        self.experts = TinyExperts(DIM, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.idle = nn.Linear(DIM, DIM).double()

    def loss(self, x: Tensor) -> Tensor:
        return (self.experts(self.dense(x)) * self.logit_scale.exp()).pow(2).mean()


class OneOfTwoOutputs(Base):
    def build(self) -> None:
        self.trunk, self.used, self.unused = (nn.Linear(DIM, DIM).double() for _ in range(3))
        self.bias_that_no_loss_has = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def loss(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        first, _ = self.used(x), self.unused(x)
        return first.pow(2).mean()


class FrozenImageTower(Base):
    def build(self) -> None:
        self.visual, self.text = (nn.Linear(DIM, DIM).double() for _ in range(2))
        self.visual.requires_grad_(False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0, dtype=torch.float64))

    def loss(self, x: Tensor) -> Tensor:
        return ((self.visual(x) * self.text(x)).sum(1) * self.logit_scale.exp()).pow(2).mean()


def in_plain_torch(module: Base, *, clip: float | None = None, skipped: int = -1) -> list[dict[str, Tensor | None]]:
    """Train on whole batches; gradients of each step. In step ``skipped`` the second half has no loss."""
    seen = []
    optimizer = module.configure_optimizers()
    for k, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        loss = module.loss(batch) if k != skipped else module.loss(batch.chunk(2)[0]) / 2
        loss.backward()
        seen.append(gradients(module))
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in module.parameters() if p.grad is not None], clip)
        optimizer.step()
    return seen


def check_equal(rank: Rank, kind: type[Base], *, size: int = 1, clip: float | None = None) -> None:
    module, true = kind(), kind()
    notebook = Notebook()
    strategy = MoEClipStrategy(expert_parallel_size=size)
    trainer(strategy=strategy, callbacks=[notebook], gradient_clip_val=clip).fit(module, share_of(BATCHES, rank))
    for k, (got, want) in enumerate(zip(notebook.gradients, in_plain_torch(true, clip=clip), strict=True)):
        mine = {n: v.chunk(size)[rank.index % size] if n == "experts.weight" else v for n, v in want.items()}
        assert worst_error(got, mine) < TOLERANCE, f"{kind.__name__}, step {k}, expert_parallel_size {size}"
    assert worst_error(parameters(module), parameters(true)) < TOLERANCE, kind.__name__


@on_ranks(4)
def test_case_5_expert_gradients_do_not_depend_on_expert_parallel_size(rank: Rank) -> None:
    for size in (1, 2, 4):
        check_equal(rank, WithExperts, size=size)


@on_ranks(2)
def test_case_10_dense_expert_and_scalar_parameters_under_one_clip(rank: Rank) -> None:
    for size in (1, 2):
        check_equal(rank, WithExperts, size=size, clip=0.05)


@on_ranks(2)
def test_case_17_frozen_tower_and_a_bias_that_the_loss_does_not_use(rank: Rank) -> None:
    check_equal(rank, FrozenImageTower)


@on_ranks(2)
def test_case_18_module_of_two_outputs_of_which_the_loss_uses_one(rank: Rank) -> None:
    check_equal(rank, OneOfTwoOutputs)


class Guarded(WithExperts):
    """Returns None where the loss is not finite, as many training loops do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss * float("nan")
        return loss if loss.isfinite() else None


class Unguarded(Guarded):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("nan") if batch_idx == 1 and self.global_rank == 1 else 1.0)


@on_ranks(2)
def test_case_26_nan_loss_on_rank_1_is_one_decision_of_all_ranks(rank: Rank) -> None:
    for size in (1, 2):
        module, true = Guarded(), Guarded()
        notebook = Notebook()
        loop = trainer(strategy=MoEClipStrategy(expert_parallel_size=size), callbacks=[notebook])
        loop.fit(module, share_of(BATCHES, rank))
        for k, (got, want) in enumerate(zip(notebook.gradients, in_plain_torch(true, skipped=1), strict=True)):
            mine = {n: v.chunk(size)[rank.index % size] if n == "experts.weight" else v for n, v in want.items()}
            assert worst_error(got, mine) < TOLERANCE, f"step {k}, expert_parallel_size {size}"
        assert worst_error(parameters(module), parameters(true)) < TOLERANCE
        assert gather_objects(loop.global_step) == [len(BATCHES)] * dist.get_world_size()


@on_ranks(2)
def test_case_26_nan_that_nobody_guards_is_passed_on_to_all_ranks(rank: Rank) -> None:
    module = Unguarded()
    notebook = Notebook()
    trainer(callbacks=[notebook]).fit(module, share_of(BATCHES, rank))
    used = [g for n, g in notebook.gradients[1].items() if not n.startswith("idle")]
    assert gather_objects([bool(g.isnan().all()) for g in used]) == [[True] * len(used)] * 2
