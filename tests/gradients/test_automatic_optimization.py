"""Accumulation, missing losses, idle parameters and changes of the plan under Trainer.fit, against plain torch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule
from lightning_moeclip.gradients.roll_call import NUM_FIELDS
from lightning_moeclip.parallel import ledger
from lightning_moeclip.testing import Rank, on_ranks
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

DIM = 5  # no parameter has as many elements as a roll call
STEPS = 5
BATCHES = torch.randn(STEPS, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(LightningModule):
    """Parts, of which each rank uses the ones that ``uses(step, rank)`` names; no loss where it is None."""

    def __init__(self, uses: Callable[[int, int], str | None] = lambda *_: "ab", parts: str = "abc") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.uses = uses
        self.parts = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in parts}).double()
        self.step = 0

    def forward(self, x: Tensor, used: str) -> Tensor:
        for name in used:
            x = self.parts[name](x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        used = self.uses(self.step, self.global_rank)
        self.step += 1
        return None if used is None else self(batch, used).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def in_plain_torch(
    net: Net, *, accumulate: int = 1, epochs: int = 1, clip: float | None = None, before: Callable = lambda *_: None
) -> list[dict[str, Tensor | None]]:
    """Train on whole batches, where rank r of two has the r-th half; gradients of each step."""
    optimizer = net.configure_optimizers()
    seen = []
    step = 0
    for epoch in range(epochs):
        for k, batch in enumerate(BATCHES):
            before(net, optimizer, epoch, k)
            if k % accumulate == 0:
                optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for rank, part in enumerate(batch.chunk(2)):
                used = net.uses(step, rank)
                if used is not None:
                    total = total + net(part, used).pow(2).mean() / 2 / accumulate
            if total.requires_grad:
                total.backward()
            step += 1
            if (k + 1) % accumulate == 0 or k + 1 == STEPS:
                seen.append(gradients(net))
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
    return seen


def check(rank: Rank, uses: Callable = lambda *_: "ab", *, name: str, before: Callable = lambda *_: None, **run: Any):
    net, true = Net(uses), Net(uses)
    notebook = Notebook()
    fit = {"accumulate_grad_batches": run.get("accumulate", 1), "max_epochs": run.get("epochs", 1)}
    loop = trainer(
        strategy=MoEClipStrategy(bucket_size_mb=run.pop("bucket_size_mb", 1e-4)),
        callbacks=[notebook, *run.pop("callbacks", [])],
        gradient_clip_val=run.get("clip"),
        **fit,
    )
    loop.fit(net, share_of(BATCHES, rank))
    want = in_plain_torch(true, before=before, **run)
    assert len(notebook.gradients) == len(want)
    for k, (g, w) in enumerate(zip(notebook.gradients, want, strict=True)):
        assert worst_error(g, w) < TOLERANCE, f"{name}, step {k}"
    assert worst_error(parameters(net), parameters(true)) < TOLERANCE, name
    return net, loop


@on_ranks(2)
def test_accumulation_equals_one_process_and_communicates_once_per_step(rank: Rank) -> None:
    num_rolled = NUM_FIELDS + 6  # of the roll call: the parameters of three layers
    for accumulate in (1, 2, 3):
        with logged_collectives() as log:
            check(rank, name=f"accumulation of {accumulate}", accumulate=accumulate)
        rolls = [
            n for call, group, n in log if group == "moeclip_gradients_dp" and call == "all_reduce" and n == num_rolled
        ]
        assert len(rolls) == -(-STEPS // accumulate)
        buckets = [
            n for call, group, n in log if group == "moeclip_gradients_dp" and call == "all_reduce" and n != num_rolled
        ]
        assert sum(buckets) == 3 * (DIM * DIM + DIM) * len(rolls)


@on_ranks(2)
def test_missing_losses_and_idle_parts_equal_one_process(rank: Rank) -> None:
    programs: dict[str, Callable[[int, int], str | None]] = {
        "none on rank 1 at times": lambda s, r: None if r == 1 and s in (0, 3) else "ab",
        "none everywhere in step 1": lambda s, r: None if s == 1 else "ab",
        "none everywhere always": lambda s, r: None,
        "rank 1 never has one": lambda s, r: None if r == 1 else "ac",
        "another part on each rank": lambda s, r: "ab" if (s + r) % 2 else "ac",
        "a part that is used once": lambda s, r: "abc" if s == 1 and r == 1 else "ab",
        "a part that misses once": lambda s, r: "a" if s == 2 and r == 1 else "abc",
        "another order on each rank": lambda s, r: "abc" if r else "cba",
    }
    for name, uses in programs.items():
        for accumulate in (1, 2):
            check(rank, uses, name=f"{name}, accumulation of {accumulate}", accumulate=accumulate, clip=0.05)


class _Exchange(torch.autograd.Function):
    """Rows of all ranks; the backward sums their cotangents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        total = cotangent.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


class Exchanging(Net):
    """Each rank's loss is over the rows of all; rank 1 uses a part of its own."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        rows = ledger.enter(_Exchange.apply(self(batch, "ab" if self.global_rank else "a")))
        used = self.uses(self.step, self.global_rank)
        self.step += 1
        return None if used is None else (rows @ rows.T).pow(2).mean() * (1 + self.global_rank)


@on_ranks(2)
def test_gradient_owed_by_a_rank_without_a_loss_equals_one_process(rank: Rank) -> None:
    programs: list[Callable[[int, int], str | None]] = [
        lambda s, r: None if r == 1 and s != 2 else "ab",
        lambda s, r: None if r == 0 else "ab",
        lambda s, r: None if s == 1 or r == 1 else "ab",
    ]
    for uses in programs:
        net, true = Exchanging(uses), Exchanging(uses)
        notebook = Notebook()
        trainer(callbacks=[notebook]).fit(net, share_of(BATCHES, rank))
        optimizer = true.configure_optimizers()
        for step, batch in enumerate(BATCHES):
            optimizer.zero_grad()
            first, second = batch.chunk(2)
            rows = torch.cat([true(first, "a"), true(second, "ab")])
            weight = sum((1 + r) / 2 for r in range(2) if uses(step, r) is not None)
            if weight:
                (weight * (rows @ rows.T).pow(2).mean()).backward()
            assert worst_error(notebook.gradients[step], gradients(true)) < TOLERANCE, step
            optimizer.step()
        assert worst_error(parameters(net), parameters(true)) < TOLERANCE


class _Meeting(torch.autograd.Function):
    """Rows as they are; the backward is a collective, as that of a layer that has sent nothing on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(()))
        return cotangent


class Meeting(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        # part c is used by rank 1 alone, and in step 1 rank 1 gives its loss up
        y = ledger.enter(_Meeting.apply(self(batch, "ac" if self.global_rank else "ab")))
        return None if batch_idx == 1 and self.global_rank == 1 else y.pow(2).mean()


@on_ranks(2)
def test_part_whose_loss_was_given_up_has_no_gradient_as_in_one_process(rank: Rank) -> None:
    def uses(step: int, rank: int) -> str | None:
        return "ab" if rank == 0 else None if step == 1 else "ac"

    for accumulate in (1, 2):
        net, true = Meeting(), Net(uses)
        notebook = Notebook()
        trainer(callbacks=[notebook], accumulate_grad_batches=accumulate).fit(net, share_of(BATCHES, rank))
        for got, want in zip(notebook.gradients, in_plain_torch(true, accumulate=accumulate), strict=True):
            assert worst_error(got, want) < TOLERANCE
        assert worst_error(parameters(net), parameters(true)) < TOLERANCE


@on_ranks(2)
def test_idle_zero_moves_an_absent_parameter_as_zeros_do(rank: Rank) -> None:
    def uses(step: int, rank: int) -> str:
        return "abc" if step == 0 else "ab"

    net, true, skipping = Net(uses), Net(uses), Net(uses)
    trainer(strategy=MoEClipStrategy(idle_expert="zero")).fit(net, share_of(BATCHES, rank))
    optimizer = true.configure_optimizers()
    for step, batch in enumerate(BATCHES):
        optimizer.zero_grad()
        true(batch, uses(step, 0)).pow(2).mean().backward()
        for p in true.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    assert worst_error(parameters(net), parameters(true)) < TOLERANCE
    in_plain_torch(skipping)
    moved = (net.parts["c"].weight - skipping.parts["c"].weight).norm() / skipping.parts["c"].weight.norm()
    assert moved > 1e-3  # what "skip" avoids


class Thaw(Callback):
    """Trains part c from (epoch, batch) on, freezes it at another, and adds it to the optimizer if it is not there."""

    def __init__(self, start: tuple[int, int], stop: tuple[int, int] | None = None, *, is_added: bool = False) -> None:
        self.start, self.stop, self.is_added = start, stop, is_added

    def apply(self, net: Net, optimizer: torch.optim.Optimizer, epoch: int, batch: int) -> None:
        if (epoch, batch) == (0, 0):
            net.parts["c"].requires_grad_(False)
        if (epoch, batch) == self.start:
            net.parts["c"].requires_grad_(True)
            if self.is_added:
                optimizer.add_param_group({"params": list(net.parts["c"].parameters())})
        if (epoch, batch) == self.stop:
            net.parts["c"].requires_grad_(False)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.parts["c"].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.apply(pl_module, trainer.optimizers[0], trainer.current_epoch, 0)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.apply(pl_module, trainer.optimizers[0], trainer.current_epoch, batch_idx)


def without_c(net: Net) -> torch.optim.Optimizer:
    kept = [p for n, p in net.named_parameters() if not n.startswith("parts.c")]
    return torch.optim.AdamW(kept, lr=1e-2, weight_decay=0.1)


@on_ranks(2)
def test_unfreezing_freezing_and_new_groups_equal_one_process(rank: Rank) -> None:
    points = [((0, 0), None), ((1, 0), None), ((0, 2), None), ((1, 3), None), ((0, 1), (0, 3)), ((0, 3), (1, 0))]
    stock = Net.configure_optimizers
    for start, stop in points:
        for accumulate, is_added in ((1, False), (2, False), (1, True), (2, True)):
            thaw = Thaw(start, stop, is_added=is_added)
            Net.configure_optimizers = without_c if is_added else stock
            _, loop = check(
                rank,
                lambda s, r: "abc" if (s + r) % 3 else "cba",
                name=f"trained from {start} to {stop}, accumulation of {accumulate}, new group {is_added}",
                before=thaw.apply,
                callbacks=[thaw],
                epochs=2,
                accumulate=accumulate,
                clip=0.05,
            )
            assert len(loop.strategy.plan.parameters) == (6 if stop is None else 4)
    Net.configure_optimizers = stock
