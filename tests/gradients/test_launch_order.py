"""Collectives come in one order on all ranks, and start while backward goes on."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import LightningModule
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.gradients.one_process import TOLERANCE, gradients, logged_collectives, share_of, trainer, worst_error
from tests.gradients.tiny_experts import TinyExperts

DIM = 4
BATCHES = torch.randn(6, 8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# experts that each rank uses in each step, None for the step in which rank 1 has no loss
EXPERTS = [["01", "23"], ["0", "0"], ["3", "12"], ["01", None], ["", "2"], ["0123", "0123"]]
GRADIENTS = ("moeclip_gradients_dp", "moeclip_gradients_edp")


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(DIM, DIM).double()
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM).double() for _ in range(4)])
        self.spread = TinyExperts(DIM, 4)
        self.sometimes = nn.Linear(DIM, DIM).double()
        self.last = nn.Linear(DIM, DIM).double()
        self.log_of_collectives: list[tuple] = []

    def forward(self, x: Tensor, experts: str, *, is_odd: bool) -> Tensor:
        x = self.first(x).tanh()
        y = sum((self.experts[int(e)](x).tanh() for e in experts), x)
        y = y + self.spread(y)
        return self.last(self.sometimes(y).tanh() if is_odd else y)

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            # after the strategy's own hook of the parameter
            parameter.register_post_accumulate_grad_hook(lambda _, n=name: self.log_of_collectives.append(("hook", n)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        experts = EXPERTS[batch_idx][self.global_rank]
        y = self(batch, experts or "", is_odd=bool(batch_idx % 2))
        return None if experts is None else y.pow(2).mean()

    def on_before_backward(self, loss: Tensor) -> None:
        self.log_of_collectives.append(("backward",))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        batch = BATCHES[self.trainer.global_step]
        true = self.in_one_process(self.trainer.global_step, batch)
        place, size = self.trainer.strategy.mesh.experts.rank, self.trainer.strategy.mesh.experts.size
        true["spread.weight"] = true["spread.weight"].chunk(size)[place]
        assert worst_error(gradients(self), true) < TOLERANCE, self.trainer.global_step

    def in_one_process(self, step: int, batch: Tensor) -> dict[str, Tensor]:
        net = Net()  # the learning rate is zero
        used = EXPERTS[step]
        losses = [
            net(x, e, is_odd=bool(step % 2)).pow(2).mean()
            for x, e in zip(batch.chunk(2), used, strict=True)
            if e is not None
        ]
        (sum(losses) / 2).backward()
        return gradients(net)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@on_ranks(2)
def test_every_rank_enters_the_same_collectives_in_the_same_order(rank: Rank) -> None:
    net = Net()
    strategy = MoEClipStrategy(expert_parallel_size=2, bucket_size_mb=1e-4)
    with logged_collectives() as log:
        net.log_of_collectives = log
        trainer(strategy=strategy).fit(net, share_of(BATCHES, rank))

    backwards = split_at_backwards(log)
    assert len(backwards) == len(BATCHES)
    # each group is a communicator of its own, and so are the layers': in each the order is one
    for description in {entry[1] for entry in log if entry[0] != "hook" and len(entry) == 3}:
        mine = [entry for entry in log if len(entry) == 3 and entry[1] == description]
        assert all(other == mine for other in gather_objects(mine)), description
    gradient = [[e for e in backward if len(e) == 3 and e[1] in GRADIENTS] for backward in backwards]
    assert all(other == gradient for other in gather_objects(gradient))


@on_ranks(2)
def test_buckets_start_while_backward_goes_on_and_those_that_missed_come_last(rank: Rank) -> None:
    net = Net()
    strategy = MoEClipStrategy(expert_parallel_size=2, bucket_size_mb=1e-4)
    with logged_collectives() as log:
        net.log_of_collectives = log
        trainer(strategy=strategy).fit(net, share_of(BATCHES, rank))

    for step, backward in enumerate(split_at_backwards(log)):
        hooks = [i for i, entry in enumerate(backward) if entry[0] == "hook"]
        launches = [i for i, entry in enumerate(backward) if len(entry) == 3 and entry[1] == "moeclip_gradients_dp"]
        early = [i for i in launches if hooks and i < hooks[-1]]
        assert bool(early) == (step >= 1 and EXPERTS[step][rank.index] is not None), f"step {step}"
    steady = [bucket.is_deferred for bucket in strategy._corridor.reducer._order]
    assert steady == sorted(steady)
    deferred = {slot.planned.name for b in strategy._corridor.reducer.buckets if b.is_deferred for slot in b.slots}
    assert deferred == {n for n, _ in net.named_parameters() if n.startswith(("experts.", "sometimes."))}


def split_at_backwards(log: list[tuple]) -> list[list[tuple]]:
    starts = [i for i, entry in enumerate(log) if entry == ("backward",)]
    return [log[a:b] for a, b in zip(starts, [*starts[1:], len(log)], strict=True)]
