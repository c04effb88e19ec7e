"""Step time of ``MoEClipStrategy`` against stock DDP, no synchronisation and one all-reduce per parameter.

Run ``python -m tests.benchmarks.step_time``. Every arm is a real ``Trainer.fit`` of the same module, optimizer and
data in a thread of its own; its loader hands over a batch only when it is the arm's turn, so one turn is one whole
step of Lightning's loop and nothing else runs meanwhile. All ranks meet at a barrier before each turn, and a turn
takes as long as its slowest rank.

* ``ours``: ``MoEClipStrategy()``.
* ``watched``: the same with statistics of all gradients, before and after the reduction, in one step of fifty, as a
  ``VarianceHeatmap`` with its defaults asks for them. Its figure is of sums over all steps, also of those.
* ``stock``: ``DDPStrategy(find_unused_parameters=True)``.
* ``no sync``: ours without the reducer, so that the difference is the synchronisation alone.
* ``naive``: the same plus one blocking all-reduce per parameter after backward.
* ``flat``: no Trainer, one all-reduce of as many bytes as the gradients have: the limit.

The floor, counted for the 7,399,873 float32 parameters of the model (204 tensors) on 2 ranks: 29.6 MB of gradients are
sent and received by each rank (a ring moves 2 (W - 1) / W times the bytes) and summed once, and they are read and
written once more to be divided and laid side by side (the pack). Ours does that in 5 collectives of gradients and one
roll call of 4 numbers and one per tensor (832 bytes); 1, 2, 4, 8 or 16 buckets per model made no difference beyond the
noise. Stock DDP also copies every gradient back out of its buckets, sums a bitmap of used parameters, walks the graph
for unused ones and, in Lightning's loop, broadcasts a flag in every batch.
"""

import argparse
import math
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moeclip import MoEClipStrategy
from lightning_moeclip.binding import Callback, DDPStrategy, Trainer
from lightning_moeclip.testing import Rank, on_ranks
from tests.benchmarks import measure
from tests.benchmarks.two_towers import TwoTowers, batches

BAR_STOCK, BAR_NAIVE, SPREADS = 1.03, 2.8, 3.0
_TURN_S = 60.0


class NoSync(MoEClipStrategy):
    """Everything of ours but the reducer: gradients stay those of the rank."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self._corridor is not None
        self._corridor.detach()
        self._corridor.reducer = None


class Naive(NoSync):
    """What a hand-written loop does: one blocking all-reduce per parameter, when backward is over."""

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(closure_loss, *args, **kwargs)
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.world_size)
        return loss


class Ask(Callback):
    """Asks for statistics as often as a Trainer logs."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            trainer.strategy.ask_for_statistics()


class Arm:
    """A fit that takes one step per turn.

    Args:
        strategy: of the Trainer.
        data: one batch per turn, and one more with which the fit ends.
        module: what is trained; None takes the two towers.
        arguments: further ones of the Trainer.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        data: list[Any],
        *,
        module: Any = None,
        arguments: Mapping[str, Any] = MappingProxyType({"logger": False}),
    ) -> None:
        self.module = TwoTowers() if module is None else module
        self._arguments = dict(arguments)
        self._strategy = strategy
        self._data = data
        self._turn = threading.Semaphore(0)
        self._over = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        self._wait()  # until the loop asks for its first batch

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._data:
            self._over.release()
            self._turn.acquire()
            yield batch

    def step(self) -> None:
        """Run the loop until it asks for the next batch."""
        self._turn.release()
        self._wait()

    def _wait(self) -> None:
        if not self._over.acquire(timeout=_TURN_S):
            raise RuntimeError(f"{type(self._strategy).__name__} took more than {_TURN_S:g} s for one step.")
        if self._error is not None:
            raise self._error

    def _fit(self) -> None:
        torch.set_num_threads(1)
        try:
            Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy=self._strategy,
                max_epochs=1,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                **self._arguments,
            ).fit(self.module, self)
        except BaseException as error:
            self._error = error
        self._over.release()


@on_ranks(2, timeout_s=900.0)
def measure_steps(rank: Rank, rounds: int, warmup: int) -> dict[str, Any]:
    data = batches(rank.index, rounds + warmup + 1)
    fits = {
        "ours": Arm(MoEClipStrategy(), data),
        "watched": Arm(MoEClipStrategy(), data, arguments={"logger": False, "callbacks": [Ask()]}),
        "stock": Arm(DDPStrategy(find_unused_parameters=True), data),
        "no sync": Arm(NoSync(), data),
        "naive": Arm(Naive(), data),
    }
    size = sum(p.numel() for p in fits["ours"].module.parameters())
    flat = torch.zeros(size)
    arms = {name: fit.step for name, fit in fits.items()} | {"flat": lambda: dist.all_reduce(flat)}
    seconds = measure.take_turns(arms, rounds=rounds, warmup=warmup, before=dist.barrier)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    reducer = fits["ours"]._strategy._corridor.reducer  # type: ignore[attr-defined]
    buckets = [bucket.num_bytes for bucket in reducer.buckets]
    for fit in fits.values():
        fit.step()  # the last batch: the fit ends
    return {
        "seconds": dict(zip(seconds, slowest.tolist(), strict=True)),
        "errors": {name: _difference(fits["stock"].module, fits[name].module) for name in ("ours", "watched", "naive")},
        "parameters": size,
        "buckets": buckets,
    }


def _difference(reference: TwoTowers, module: TwoTowers) -> float:
    """Largest relative error of the first step's gradients: |g - g_ref| / max(|g_ref|, 1e-6 |all g_ref|)."""
    total = torch.stack([g.norm() for g in reference.gradients.values()]).norm()
    assert reference.gradients.keys() == module.gradients.keys(), "a gradient is missing"
    return max(
        ((module.gradients[n] - g).norm() / torch.maximum(g.norm(), 1e-6 * total)).item()
        for n, g in reference.gradients.items()
    )


def summarise(seconds: dict[str, list[float]]) -> tuple[list[tuple[str, measure.Figure]], bool]:
    """Figures of the table, and whether the cost of ours stands out of its own spread."""
    table = {name: torch.tensor(values, dtype=torch.float64) for name, values in seconds.items()}
    rounds = len(table["ours"])
    cost = {name: table[name] - table["no sync"] for name in ("ours", "stock", "naive")}

    def of_costs(above: torch.Tensor, below: torch.Tensor) -> measure.Figure:
        return measure.bootstrap(lambda draw: measure.middle(above[draw]) / measure.middle(below[draw]), rounds)[0]

    def of_sums(above: torch.Tensor, below: torch.Tensor) -> measure.Figure:
        return measure.bootstrap(lambda draw: above[draw].sum(1) / below[draw].sum(1), rounds)[0]

    own, spread = measure.bootstrap(lambda draw: measure.middle(cost["ours"][draw]), rounds)
    figures = [
        ("step: ours / stock DDP(find_unused)", measure.paired_ratio(seconds["ours"], seconds["stock"])),
        (
            "step: ours with statistics / stock DDP(find_unused)",
            measure.paired_ratio(seconds["watched"], seconds["stock"]),
        ),
        ("step: ours / no sync", measure.paired_ratio(seconds["ours"], seconds["no sync"])),
        ("sync: (naive - no sync) / (ours - no sync)", of_costs(cost["naive"], cost["ours"])),
        ("sync: (stock - no sync) / (ours - no sync)", of_costs(cost["stock"], cost["ours"])),
        ("sync: (ours - no sync) / flat all-reduce", of_costs(cost["ours"], table["flat"])),
        ("sync: (ours - no sync) / its spread", measure.exact(own.median / spread)),
    ]
    return figures, own.median >= SPREADS * spread


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="print only, and leave the results file as it is")
    arguments = parser.parse_args()
    found = measure_steps.launch(rounds=arguments.rounds, warmup=arguments.warmup)[0]  # type: ignore[attr-defined]
    if max(found["errors"].values()) > 1e-6:
        raise SystemExit(f"The arms do not compute the same gradients: {found['errors']}. Nothing was written.")
    print(
        f"{found['parameters']} parameters, buckets of {found['buckets']} bytes, gradients differ by {found['errors']}"
    )
    for name, values in found["seconds"].items():
        low, mid, high = torch.quantile(torch.tensor(values), torch.tensor([0.2, 0.5, 0.8])).mul(1000).tolist()
        print(f"{name:8} median {mid:7.1f} ms, p20 {low:7.1f}, p80 {high:7.1f}")
    figures, stands_out = summarise(found["seconds"])
    if not stands_out:
        print(f"Void: ours - no sync is under {SPREADS:g} x its own spread. Use a quieter machine or more --rounds.")
        void = measure.exact(math.nan)
        figures = [
            (name, void if "(ours - no sync)" in name and figure.low < figure.high else figure)
            for name, figure in figures
        ]
    rows = [measure.row(name, figure, rounds=arguments.rounds, ranks=2) for name, figure in figures]
    measure.write_rows(None if arguments.keep else measure.RESULTS / "step_time.csv", rows)


if __name__ == "__main__":
    main()
