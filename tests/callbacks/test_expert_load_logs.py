"""The monitor of experts: when it tells, to whom, and what it refuses."""

import copy
import pickle
import re
from typing import Any

import pytest

from lightning_moeclip.binding import pl
from lightning_moeclip.callbacks.expert_load_monitor import ExpertLoadMonitor
from lightning_moeclip.testing import Rank, on_ranks
from tests.callbacks.watched_fit import Shared, Wishes, fit
from tests.models import TwoTowers, batches, loader, quiet_trainer


class Notes(pl.loggers.logger.Logger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[dict[str, float], int | None]] = []

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.notes.append((dict(metrics), step))

    def log_hyperparams(self, *args: object) -> None:
        pass


def only_load(notes: Notes) -> list[tuple[dict[str, float], int | None]]:
    return [(metrics, step) for metrics, step in notes.notes if any(tag.startswith("expert_load") for tag in metrics)]


def test_every_logger_gets_every_number_at_the_step_of_lightning() -> None:
    first, second = Notes(), Notes()
    data: list[Wishes] = [{"image": [0, 0, 0, 1]}, {None: [2]}, {None: [3]}]
    _, _, trainer = fit(data, every=None, logger=[first, second], log_every_n_steps=2)
    assert first.notes == second.notes
    (at_two, step_of_two), (at_end, step_of_end) = only_load(first)
    assert (step_of_two, step_of_end) == (1, 2)
    assert set(at_two) == {
        *(f"expert_load/moe/{tower}/{expert}" for tower in ("all", "image") for expert in range(4)),
        *(f"expert_load_{what}/moe/{tower}" for tower in ("all", "image") for what in ("variation", "dead", "dropped")),
    }
    assert at_two["expert_load/moe/all/0"] == 3 / 5
    assert at_two["expert_load/moe/image/0"] == 3 / 4
    assert at_two["expert_load_variation/moe/image"] == pytest.approx(1.5**0.5, rel=1e-15)  # 3, 1, 0, 0
    assert (at_two["expert_load_dead/moe/image"], at_two["expert_load_dead/moe/all"]) == (2.0, 1.0)
    assert at_end == {
        **{f"expert_load/moe/all/{expert}": float(expert == 3) for expert in range(4)},
        "expert_load_variation/moe/all": pytest.approx(3**0.5),
        "expert_load_dead/moe/all": 3.0,
        "expert_load_dropped/moe/all": 0.0,
    }
    assert trainer.callback_metrics["expert_load/moe/all/3"].item() == 1.0


@on_ranks(2)
def log_on_ranks(rank: Rank) -> tuple[int, float]:
    notes = Notes()
    _, _, trainer = fit([{"image": [rank.index]}], world_size=2, logger=notes)
    return len(only_load(notes)), trainer.callback_metrics["expert_load/moe/all/1"].item()


def test_first_rank_alone_writes_and_every_rank_has_the_metrics() -> None:
    assert log_on_ranks.launch() == [(1, 0.5), (0, 0.5)]


@pytest.mark.parametrize(
    "options",
    [{"logger": False}, {"fast_dev_run": True}, {"fast_dev_run": 2, "logger": True}],
    ids=["no logger", "fast_dev_run", "fast_dev_run of two"],
)
def test_short_run_publishes_when_it_ends_with_or_without_loggers(options: dict[str, Any]) -> None:
    _, monitor, trainer = fit([{None: [0]}, {None: [0]}], every=None, **options)
    assert monitor.last is not None
    assert monitor.last.loads["moe", "all"].share.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert trainer.callback_metrics["expert_load_dead/moe/all"].item() == 3.0


def test_trainer_that_logs_no_step_publishes_none() -> None:
    _, monitor, _ = fit([{None: [0]}], every=None, log_every_n_steps=0)
    assert monitor.last is None


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda monitor: pickle.loads(pickle.dumps(monitor))])
def test_monitor_can_be_sent_to_other_processes_also_after_a_fit(copy_of: Any) -> None:
    _, monitor, _ = fit([{"image": [0]}])
    other = copy_of(monitor)
    assert (other.every_n_steps, other.last.step) == (1, 1)


def test_run_without_such_layers_is_told_once_and_goes_on() -> None:
    module, monitor = TwoTowers(has_own_moe=False), ExpertLoadMonitor(every_n_steps=1)
    with pytest.warns(
        UserWarning, match=r"found no layer that counts in TwoTowers and logs nothing. Use .*MoE"
    ) as told:
        quiet_trainer(1, callbacks=[monitor]).fit(module, loader(batches(2)))
    assert ["ExpertLoadMonitor" in str(one.message) for one in told].count(True) == 1
    assert monitor.last is None


@pytest.mark.parametrize("every", [0, -3, 2.5, "5", True])
def test_interval_that_is_no_integer_from_one_is_refused(every: Any) -> None:
    message = re.escape(f"(every_n_steps={every!r}) must be an integer from 1. Use 1 for every step, or None")
    with pytest.raises(ValueError, match=message):
        ExpertLoadMonitor(every_n_steps=every)


def test_two_monitors_are_refused() -> None:
    trainer = quiet_trainer(1, callbacks=[ExpertLoadMonitor(), ExpertLoadMonitor()])
    with pytest.raises(ValueError, match=r"holds 2 of ExpertLoadMonitor.* Give one"):
        trainer.fit(Shared(), loader([{None: [0]}]))


@on_ranks(2)
def fit_with_tower_all_on_one_rank(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"a tower 'all', which ExpertLoadMonitor writes .* another name of the tower"):
        fit([{("all", "image")[rank.index]: [0]}], world_size=2, strategy="ddp")


def test_tower_called_all_is_refused_on_every_rank() -> None:
    fit_with_tower_all_on_one_rank.launch()
