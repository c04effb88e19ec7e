"""``ResidualResync`` in whole fits: what differs is found at the next check, told of and mended, and no more."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moeclip import MoEClipPrecision, MoEClipStrategy
from lightning_moeclip.binding import Callback, LightningModule, Trainer, pl
from lightning_moeclip.callbacks import ExpertLoadMonitor, VarianceHeatmap
from lightning_moeclip.callbacks.residual_resync import ResidualResync
from lightning_moeclip.parallel.agreement import gather_objects
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.heatmap_runs import NoteTaker
from tests.gradients.narrow_clip import Clip, masters, pairs
from tests.gradients.one_process import logged_collectives
from tests.models import TwoTowers, batches, loader, quiet_trainer, share

NUM_STEPS = 5
DENSE, EXPERT = "text.head.weight", "image.moe.w_in"
ROUTER, SCALAR = "image.moe.router.weight", "loss.logit_scale"
CSVLogger = pl.loggers.CSVLogger
Fault = Callable[[Trainer, LightningModule], object]


class AtEnd(Callback):
    """A fault of some ranks at the end of some steps, counted from 0."""

    def __init__(self, fault: Fault, *, ranks: tuple[int, ...] = (1,), steps: tuple[int, ...] = (2,)) -> None:
        self.fault, self.ranks, self.steps = fault, ranks, steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step - 1 in self.steps:
            with torch.no_grad():
                self.fault(trainer, pl_module)


class AfterReduction(AtEnd):
    """The same between the reduction of a step and its optimizer."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step in self.steps:
            self.fault(trainer, pl_module)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Keep(Callback):
    """What this rank holds when training ends, while its experts are spread, and what each step was."""

    def __init__(self) -> None:
        self.held_steps: list[int] = []
        self.told: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.strategy.report.verdict.holds_step:
            self.held_steps.append(trainer.global_step - 1)
            assert all(p.grad is None for p in pl_module.parameters())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (optimizer,) = trainer.strategy.optimizers
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.tensors = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self.tensors |= {f"held {i}": p.detach().clone() for i, p in enumerate(held)}
        for index, parameter in enumerate(held):
            self.tensors |= {f"{k} of {index}": v.clone() for k, v in optimizer.state[parameter].items()}
        self.metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("grad_residual/")}
        self.scaler = trainer.precision_plugin.state_dict().get("scale")


def run(rank: Rank, *callbacks: Callback, ep: int = 1, module: LightningModule | None = None, **arguments: Any) -> Keep:
    """A fit, with everything it left behind; warnings of other things are errors."""
    kept = Keep()
    strategy = MoEClipStrategy(expert_parallel_size=ep, gradient_dtype=arguments.pop("gradient_dtype", None))
    data = arguments.pop("data", None)
    data = share(batches(NUM_STEPS), [8 // rank.world_size] * rank.world_size, rank.index) if data is None else data
    trainer = quiet_trainer(rank.world_size, strategy=strategy, callbacks=[*callbacks, kept], **arguments)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        trainer.fit(module or TwoTowers(), loader(data))
    kept.told = [str(w.message) for w in told if "ResidualResync" in str(w.message)]
    assert not kept.told or rank.index == 0
    return kept


def assert_same(a: Keep, b: Keep) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, value in a.tensors.items():
        assert torch.equal(value, b.tensors[name]), name


def one_ulp(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], torch.inf))


def moved(name: str) -> Fault:
    return lambda trainer, module: one_ulp(module.get_parameter(name))


def moved_moment(name: str) -> Fault:
    return lambda trainer, module: one_ulp(trainer.strategy.optimizers[0].state[module.get_parameter(name)]["exp_avg"])


@on_ranks(2)
def test_a_healthy_run_is_the_run_without_the_callback_bit_by_bit_and_nothing_is_resynced(rank: Rank) -> None:
    for ep in (1, 2):
        plain = run(rank, ep=ep)
        kept = run(rank, ResidualResync(every_n_steps=1), ep=ep)
        assert_same(kept, plain)
        assert kept.metrics == {"grad_residual/mismatches": 0.0, "grad_residual/resyncs": 0.0}
        assert kept.held_steps == []
        assert len(kept.told) == (1 if ep == 2 and rank.index == 0 else 0)
        if kept.told:
            assert (
                "4 parameter(s) of this rank have no other replica and are not watched: image.moe.w_in" in kept.told[0]
            )


@on_ranks(2)
def test_one_ulp_on_either_rank_of_2_is_found_at_the_next_check_and_the_run_is_as_without_it(rank: Rank) -> None:
    plain = run(rank)
    for fault in (moved(DENSE), moved_moment(EXPERT)):
        kept = run(rank, ResidualResync(every_n_steps=1), AtEnd(fault))
        assert_same(kept, plain)
        assert kept.metrics == {"grad_residual/mismatches": 1.0, "grad_residual/resyncs": 1.0}
        assert kept.held_steps == []
        if rank.index == 0:
            assert "differed on rank 1: 1 of " in kept.told[0]
            assert "resynced from rank 0 (step 3)" in kept.told[0]
    # of two replicas the lowest rank is believed
    kept = run(rank, ResidualResync(every_n_steps=1), AtEnd(moved(DENSE), ranks=(0,)))
    assert gather_objects(kept.tensors[DENSE].tolist())[0] == kept.tensors[DENSE].tolist()
    assert kept.metrics["grad_residual/resyncs"] == 1.0


@on_ranks(4)
def test_one_ulp_on_any_rank_of_4_in_a_dense_parameter_and_in_an_expert_is_mended_to_the_run_without_it(
    rank: Rank,
) -> None:
    plain = run(rank, ep=2)
    for bad in range(4):
        kept = run(rank, ResidualResync(every_n_steps=1), AtEnd(moved(DENSE), ranks=(bad,)), ep=2)
        assert_same(kept, plain)
        assert kept.metrics == {"grad_residual/mismatches": 1.0, "grad_residual/resyncs": 1.0}
    for bad in (2, 3):  # of the two replicas of an expert the lowest rank is believed
        fault = moved(EXPERT) if bad == 2 else moved_moment(EXPERT)
        kept = run(rank, ResidualResync(every_n_steps=1), AtEnd(fault, ranks=(bad,)), ep=2)
        assert_same(kept, plain)
        assert kept.metrics == {"grad_residual/mismatches": 1.0, "grad_residual/resyncs": 1.0}


@on_ranks(2)
def test_a_fault_in_the_last_step_is_mended_before_training_ends_and_an_earlier_one_at_the_next_check(
    rank: Rank,
) -> None:
    plain = run(rank)
    kept = run(rank, ResidualResync(), AtEnd(moved(ROUTER), steps=(NUM_STEPS - 1,)))
    assert_same(kept, plain)
    assert kept.metrics["grad_residual/resyncs"] == 1.0
    # trained on with for two steps, which moves other tensors too; replicas are equal all the same
    kept = run(rank, ResidualResync(every_n_steps=3), AtEnd(moved(SCALAR), steps=(0,)))
    assert kept.metrics["grad_residual/resyncs"] >= 1.0
    if rank.index == 0:
        assert "(step 3)" in kept.told[0]
    mine = {n: t.tolist() for n, t in kept.tensors.items()}
    assert gather_objects(mine) == [mine] * 2


@on_ranks(2)
def test_a_missing_entry_and_another_option_of_an_optimizer_are_mended(rank: Rank) -> None:
    plain = run(rank)

    def forget(trainer: Trainer, module: LightningModule) -> None:
        del trainer.strategy.optimizers[0].state[module.get_parameter(DENSE)]

    def hasten(trainer: Trainer, module: LightningModule) -> None:
        trainer.strategy.optimizers[0].param_groups[0]["lr"] *= 1.5

    for fault, number in ((forget, 3.0), (hasten, 1.0)):
        kept = run(rank, ResidualResync(every_n_steps=1), AtEnd(fault))
        assert_same(kept, plain)
        assert kept.metrics["grad_residual/resyncs"] == number


class Half(TwoTowers):
    """In float32, for a loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def in_half(rank: Rank, *callbacks: Callback) -> Keep:
    data = [(x.float(), y.float()) for x, y in share(batches(NUM_STEPS), [4, 4], rank.index)]
    plugin = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0, growth_interval=2)
    return run(rank, *callbacks, module=Half(), data=data, plugins=[plugin])


@on_ranks(2)
def test_a_loss_scale_of_one_rank_is_mended(rank: Rank) -> None:
    plain = in_half(rank)

    def rescale(trainer: Trainer, module: LightningModule) -> None:
        plugin = trainer.precision_plugin
        plugin.load_state_dict({**plugin.state_dict(), "scale": 64.0})

    kept = in_half(rank, ResidualResync(every_n_steps=1), AtEnd(rescale))
    assert_same(kept, plain)
    assert kept.scaler == plain.scaler == 1024.0
    assert kept.metrics["grad_residual/resyncs"] == 1.0
    if rank.index == 0:
        assert "loss scale differed on rank 1: 1 of " in kept.told[0]


@on_ranks(2)
def test_a_sign_of_one_ranks_scaled_gradient_holds_the_step_and_leaves_the_scale(rank: Rank) -> None:
    kept = in_half(rank, ResidualResync(every_n_steps=1), AfterReduction(negated))
    assert kept.held_steps == [2]
    assert kept.scaler == 1024.0  # four steps count
    mine = {n: t.tolist() for n, t in kept.tensors.items()}
    assert gather_objects(mine) == [mine] * 2


@on_ranks(2)
def test_a_master_moved_below_what_16_bits_resolve_is_mended(rank: Rank) -> None:
    def move_master(trainer: Trainer, module: LightningModule) -> None:
        one_ulp(trainer.strategy._masters.master_of(module.get_parameter("moe.w_in")).data)

    def fit(*callbacks: Callback) -> Keep:
        data = [(x[rank.index :: 2], y[rank.index :: 2]) for x, y in pairs(NUM_STEPS)]
        return run(rank, *callbacks, module=Clip(lr=1e-3), data=data, plugins=[masters()])

    plain = fit()
    kept = fit(ResidualResync(every_n_steps=1), AtEnd(move_master))
    assert_same(kept, plain)
    assert kept.metrics == {"grad_residual/mismatches": 1.0, "grad_residual/resyncs": 1.0}
    if rank.index == 0:
        assert "master of moe.w_in differed on rank 1: 1 of " in kept.told[0]


def negated(trainer: Trainer, module: LightningModule) -> None:
    module.get_parameter(DENSE).grad.neg_()


def own_part(trainer: Trainer, module: LightningModule) -> None:
    """As if the sum over ranks had not come."""
    for parameter in module.text.head.parameters():
        parameter.grad.mul_(1.0 + trainer.global_rank)


class BeforeStep(AtEnd):
    """A fault of some ranks in the hook before some optimizer steps."""

    may_hold_step = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step in self.steps:
            self.fault(trainer, pl_module)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


@on_ranks(2)
def test_a_sign_flip_and_a_dropped_reduction_of_one_rank_hold_the_step_on_all_and_the_run_goes_on_without_it(
    rank: Rank,
) -> None:
    plain = run(rank, BeforeStep(lambda trainer, module: trainer.strategy.hold_step("left out")))
    for fault, number in ((negated, 1.0), (own_part, 2.0)):
        kept = run(rank, ResidualResync(every_n_steps=2), AfterReduction(fault))
        assert kept.held_steps == [2]
        assert_same(kept, plain)
        assert kept.metrics == {"grad_residual/mismatches": number, "grad_residual/resyncs": 0.0}
        if rank.index == 0:
            assert "differed on rank 1" in kept.told[0]
            assert "step held (step 2)" in kept.told[0]


@on_ranks(4)
def test_an_experts_gradient_and_accumulated_ones_are_watched(rank: Rank) -> None:
    for accumulate in (1, 2):
        fault = BeforeStep(lambda t, m: m.get_parameter(EXPERT).grad.neg_(), ranks=(3,), steps=(1,))
        kept = run(rank, fault, ResidualResync(every_n_steps=1), ep=2, accumulate_grad_batches=accumulate)
        assert kept.held_steps == [1]
        assert kept.metrics == {"grad_residual/mismatches": 1.0, "grad_residual/resyncs": 0.0}


class TwoOptimizers(Half):
    """Each tower with an optimizer of its own, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.verdicts: list[tuple[bool, ...]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", 0.0)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.compute_loss(batch))
        held = []
        for optimizer in optimizers:
            optimizer.step()
            held.append(self.trainer.strategy.report.verdict.holds_step)
        self.verdicts.append(tuple(held))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([*part.parameters()], lr=0.01) for part in (self.image, self.text)]


@on_ranks(2)
def test_of_two_optimizers_stepped_by_hand_the_one_with_the_wrong_gradient_is_held(rank: Rank) -> None:
    data = [(x.float(), y.float()) for x, y in share(batches(NUM_STEPS), [4, 4], rank.index)]
    module = TwoOptimizers()
    plugin = MoEClipPrecision("16-mixed", device="cpu", init_scale=256.0)
    fault = AfterReduction(negated, steps=(4,))  # the third batch: two steps in each
    check = ResidualResync(every_n_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        quiet_trainer(2, callbacks=[fault, check], plugins=[plugin]).fit(module, loader(data))
    assert module.verdicts == [(False, False)] * 2 + [(False, True)] + [(False, False)] * 2
    assert plugin.state_dict()["_growth_tracker"] == NUM_STEPS
    mine = {n: p.tolist() for n, p in module.named_parameters()}
    assert gather_objects(mine) == [mine] * 2


@on_ranks(2)
def test_the_fourth_mismatch_of_one_tensor_ends_the_run_with_its_story_on_all_ranks(rank: Rank) -> None:
    always = tuple(range(NUM_STEPS))
    for fault in (AtEnd(moved(DENSE), steps=always), AfterReduction(negated, steps=always)):
        with pytest.raises(RuntimeError, match=f"{DENSE} differed on rank 1") as raised:
            run(rank, ResidualResync(every_n_steps=1), fault)
        assert "which was mended 3 times before" in str(raised.value)
        assert str(raised.value).count("of 30 elements") == 5


@on_ranks(2)
def test_a_check_is_one_all_gather_before_the_step_and_one_after_the_reduction(rank: Rank) -> None:
    counts = []
    for callbacks in ([], [ResidualResync(every_n_steps=2)]):
        with logged_collectives() as log:
            run(rank, *callbacks)
        counts.append(
            [sum(name == kind for name, *_ in log) for kind in ("all_gather", "all_gather_object", "all_reduce")]
        )
    # steps 0, 2 and 4, and one more when training ends; each step asks whether it is held
    assert counts[1][0] - counts[0][0] == 3 * 2 + 1
    assert counts[1][1] == counts[0][1]
    assert counts[1][2] - counts[0][2] == NUM_STEPS


@on_ranks(2)
def test_a_reduction_that_loses_too_much_is_told_once_and_held_from_three_times_the_bound(rank: Rank) -> None:
    wide = run(rank, ResidualResync(every_n_steps=1), gradient_dtype="bfloat16")
    assert wide.told == []
    assert 0 < wide.metrics["grad_residual/relative"] < 8e-3
    relative = wide.metrics["grad_residual/relative"]
    told = run(
        rank, ResidualResync(every_n_steps=1, threshold=relative / 30, critical_factor=1e6), gradient_dtype="bfloat16"
    )
    assert_same(told, wide)
    assert told.held_steps == []
    kept = run(rank, ResidualResync(every_n_steps=2, threshold=1e-9), gradient_dtype="bfloat16")
    assert kept.held_steps == [0, 2, 4]
    if rank.index == 0:
        assert [len(of.told) for of in (told, kept)] == [1, 1]
        assert "low precision differed from one in float32" in told.told[0]
        assert "the step is taken" in told.told[0]
        assert "the step is held" in kept.told[0]
        assert "gradient_dtype=None" in kept.told[0]


@on_ranks(2)
def log_a_fault(rank: Rank, folder: str) -> None:
    loggers = [CSVLogger(folder, name=name) for name in ("a", "b")]
    run(rank, ResidualResync(every_n_steps=2), AtEnd(moved(DENSE)), logger=loggers)
    for logger in loggers:
        logger.save()
    kept = run(rank, ResidualResync(every_n_steps=1), fast_dev_run=2)
    assert kept.metrics == {"grad_residual/mismatches": 0.0, "grad_residual/resyncs": 0.0}


def test_two_loggers_on_rank_0_get_the_numbers_and_fast_dev_run_works(tmp_path: Path) -> None:
    log_a_fault.launch(folder=str(tmp_path))
    files = sorted(tmp_path.rglob("metrics.csv"))
    assert [file.relative_to(tmp_path).parts[0] for file in files] == ["a", "b"]
    for file in files:
        with file.open() as lines:
            rows = [(row["step"], row["grad_residual/mismatches"]) for row in csv.DictReader(lines)]
        # before step 0 and 2 nothing differs; what differs after step 2 moves others before it is seen
        logged = [(step, float(number)) for step, number in rows if number]
        assert logged[:2] == [("0", 0.0), ("2", 0.0)]
        assert logged[-1][1] >= 1.0


@on_ranks(2)
def log_seven_batches(rank: Rank) -> list[tuple[int | None, list[str]]]:
    notes = NoteTaker()
    watch = [ResidualResync(every_n_steps=3), VarianceHeatmap(every_n_steps=3), ExpertLoadMonitor(every_n_steps=3)]
    data = share(batches(7), [4, 4], rank.index)
    run(rank, *watch, data=data, logger=notes, log_every_n_steps=1)
    return [(step, sorted(metrics)) for step, metrics in notes.metrics]


def test_what_is_found_when_training_ends_has_the_step_of_the_last_batch() -> None:
    told, _ = log_seven_batches.launch()
    of_resync = [step for step, tags in told if "grad_residual/mismatches" in tags]
    assert of_resync == [0, 3, 6, 6]  # replicas are compared once more at the end
    assert max(step for step, _ in told if step is not None) == 6


def test_one_process_is_told_that_nothing_is_compared() -> None:
    kept = run(Rank(0, 1), ResidualResync(every_n_steps=1))
    (told,) = kept.told
    assert "ResidualResync on one process compares nothing" in told
    assert kept.metrics == {}
    assert_same(kept, run(Rank(0, 1)))


def test_another_strategy_and_two_of_the_callback_and_bad_bounds_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"Write Trainer\(strategy=MoEClipStrategy\(\), callbacks=\[ResidualResync\(\)\]"
    ):
        quiet_trainer(1, strategy="auto", callbacks=[ResidualResync()]).fit(TwoTowers(), loader(batches(1)))
    with pytest.raises(ValueError, match="holds 2 of ResidualResync"):
        quiet_trainer(1, callbacks=[ResidualResync(), ResidualResync()]).fit(TwoTowers(), loader(batches(1)))
    with pytest.raises(ValueError, match="every_n_steps=0 must be an integer from 1"):
        ResidualResync(every_n_steps=0)
