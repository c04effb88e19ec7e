"""Whole launches, as users start them: how a run ends when one rank does not go on."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_moeclip.binding import ROOT as LIGHTNING

JOB = Path(__file__).parent / "job.py"
SPREAD_JOB = JOB.with_name("spread_job.py")
ROOT = JOB.parent.parent.parent
END_S = 10.0  # from the failure to the end of every process, on a machine that starts them in less
DEADLINE_S = 120.0


def free_port() -> int:
    """A port below those that Linux gives to others by itself, from 32768 on, before the launch binds it."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = random.SystemRandom().randrange(20000, 32000)
            probe.bind(("127.0.0.1", port))
            return port


def is_running(pid: int, folder: Path) -> bool:
    """Whether a launch in this folder still has the process; somebody else's with the same number does not count."""
    try:
        # of a process that has ended, and waits for nothing but its parent, it is empty
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


@dataclass
class Ended:
    """How a launch ended: exit codes, what all ranks wrote, seconds before and after the failure."""

    codes: list[int]
    text: str
    before_s: float
    after_s: float

    @property
    def is_in_time(self) -> bool:
        # a process takes as long to go as to come where others want the machine too
        return self.after_s < END_S + self.before_s


class Launch:
    """Processes started by a test, their output, and the ranks among them."""

    def __init__(
        self, folder: Path, *plan: str, job: Path = JOB, torchrun: bool = False, slurm: bool = False, ranks: int = 2
    ) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.started_at = time.time()
        command = [sys.executable]
        if torchrun:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(job), str(folder), *plan]
        taken = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "TORCHELASTIC_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(taken)}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TEST_ROOT": LIGHTNING}
        if not torchrun:
            env["MASTER_PORT"] = str(free_port())
        # a line and its end in one write, or those of two ranks get mixed
        env.pop("PYTHONUNBUFFERED", None)
        environments = [env]
        if slurm:
            # what srun sets for two tasks on one node
            tasks = {
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NAME": "train",
                "SLURM_NTASKS": "2",
                "SLURM_NTASKS_PER_NODE": "2",
            }
            tasks |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1"}
            ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
            environments = [env | tasks | rank for rank in ranks]
        with self.log.open("a") as log:  # ranks that write at once would overwrite one another without appending
            self.processes = [
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    start_new_session=True,
                    preexec_fn=hear_ctrl_c,
                )
                for env in environments
            ]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")  # the last character may be half written

    @property
    def running(self) -> list[int]:
        pids = [p.pid for p in self.processes] + [int(pid) for pid in re.findall(r"\] pid (\d+)", self.text)]
        return [pid for pid in pids if is_running(pid, self.folder)]

    @property
    def failed_at(self) -> float | None:
        found = re.search(r"\] NOW ([\d.]+)", self.text)
        return float(found[1]) if found else None

    def wait_for_failure(self) -> None:
        deadline = time.time() + DEADLINE_S
        while self.failed_at is None:
            assert time.time() < deadline, self.text
            assert self.processes[0].poll() is None, self.text
            time.sleep(0.1)

    def end(self) -> Ended:
        deadline = time.time() + DEADLINE_S
        while running := self.running:
            assert time.time() < deadline, f"still running: {running}\n{self.text}"
            time.sleep(0.1)
        codes = [process.wait() for process in self.processes]
        failed_at = self.failed_at or time.time()
        return Ended(codes, self.text, failed_at - self.started_at, time.time() - failed_at)

    def clean(self) -> None:
        for pid in self.running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def hear_ctrl_c() -> None:
    """As a program that a person starts: a shell's background job, and what it starts, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    started: list[Launch] = []
    yield started
    for launch in started:
        launch.clean()


def assert_users_error_ended_it(ended: Ended, bad: int, other: int) -> None:
    assert ended.is_in_time, ended
    assert all(ended.codes), ended.text
    assert "not reached" not in ended.text
    assert f"[rank {other}] rank {bad} failed with UserError: my own bug" in ended.text, ended.text
    assert re.search(rf"^(\[rank{bad}\]: )?UserError: my own bug$", ended.text, re.MULTILINE), ended.text
    assert "raise UserError" in ended.text


def assert_all_ended_quietly(ended: Ended) -> None:
    assert ended.is_in_time, ended
    assert ended.codes == [0], ended.text
    assert "not reached" not in ended.text
    assert "Traceback" not in ended.text
    assert "failed with" not in ended.text


def test_case_31_exception_on_rank_1_ends_both_with_the_users_error(tmp_path: Path, launches: list[Launch]) -> None:
    launches.append(Launch(tmp_path, "fit", "counts", "val_counts", "checkpoint:1"))
    ended = launches[0].end()
    assert_users_error_ended_it(ended, bad=1, other=0)
    # nothing is gathered for OnExceptionCheckpoint: each rank writes what it holds
    assert (tmp_path / "on_exception.ckpt.rank1").exists()
    assert not (tmp_path / "on_exception.ckpt").exists()
    assert "rank 1 wrote what it holds to" in ended.text
    # before that, in the same launch: fit, test, fit agree over ranks, and unequal loaders are refused on both
    fitted = re.findall(r"\[(\d)\] fitted ([\d.]+)", ended.text)
    assert sorted(rank for rank, _ in fitted) == ["0", "1"]
    assert len({weight for _, weight in fitted}) == 1
    training = r"refused RuntimeError: .* numbers of training batches \(rank 0: 6, rank 1: 5\).*limit_train_batches"
    assert len(re.findall(training, ended.text)) == 2, ended.text
    validation = r"refused RuntimeError: .* numbers of validation batches \(rank 0: 1, rank 1: 2\).*limit_val_batches"
    assert len(re.findall(validation, ended.text)) == 2, ended.text


def test_case_31_under_torchrun(tmp_path: Path, launches: list[Launch]) -> None:
    launches.append(Launch(tmp_path, "checkpoint:1", torchrun=True))
    assert_users_error_ended_it(launches[0].end(), bad=1, other=0)
    assert (tmp_path / "on_exception.ckpt.rank1").exists()


def test_rank_that_fails_but_stays_does_not_hold_the_others_in_a_collective(
    tmp_path: Path, launches: list[Launch]
) -> None:
    launches.append(Launch(tmp_path, "stay:0"))
    ended = launches[0].end()
    assert_users_error_ended_it(ended, bad=0, other=1)
    assert "[rank 1] ended because rank 0 failed with UserError: my own bug" in ended.text


def test_case_32_sigterm_to_rank_1_alone_ends_both_cleanly(tmp_path: Path, launches: list[Launch]) -> None:
    launches.append(Launch(tmp_path, "term:1"))
    assert_all_ended_quietly(launches[0].end())


def test_case_32_sigterm_to_rank_0_alone_under_torchrun(tmp_path: Path, launches: list[Launch]) -> None:
    launches.append(Launch(tmp_path, "term:0", torchrun=True))
    assert_all_ended_quietly(launches[0].end())


@pytest.mark.parametrize(("bad", "ranks", "torchrun"), [(2, 4, False), (0, 2, True)])
def test_case_31_error_in_a_callback_ends_all_ranks_that_wait_in_its_sum(
    bad: int, ranks: int, torchrun: bool, tmp_path: Path, launches: list[Launch]
) -> None:
    launches.append(Launch(tmp_path, f"fail:{bad}:{ranks}", torchrun=torchrun, ranks=ranks))
    ended = launches[0].end()
    for other in set(range(ranks)) - {bad}:
        assert_users_error_ended_it(ended, bad=bad, other=other)


def test_case_32_sigterm_to_rank_0_in_a_callback_ends_all_cleanly(tmp_path: Path, launches: list[Launch]) -> None:
    launches.append(Launch(tmp_path, "term:0:2"))
    assert_all_ended_quietly(launches[0].end())


def test_slurm_tasks_fit_and_end_together(tmp_path: Path, launches: list[Launch]) -> None:
    launches.append(Launch(tmp_path, "fit", "fail:1", slurm=True))
    ended = launches[0].end()
    assert_users_error_ended_it(ended, bad=1, other=0)
    assert len(set(re.findall(r"fitted ([\d.]+)", ended.text))) == 1


LOST = {
    "LateExperts": r"The parameter 'late\.w_in' \(\d in all\) was made in configure_model or setup",
    "Outside": r"The parameter 'optimizer0\.group0\.\d+' \(1 in all\) is in an optimizer and not in",
}


@pytest.mark.parametrize(
    ("start", "num_processes", "lost"),
    [("spawn", 1, []), ("fork", 1, ["LateExperts"]), ("popen", 2, [])],
)
def test_spread_experts_end_as_one_process_and_are_saved_after_fit(
    start: str, num_processes: int, lost: list[str], tmp_path: Path, launches: list[Launch]
) -> None:
    launches.append(Launch(tmp_path, start, "Whole", *lost, job=SPREAD_JOB, torchrun=start == "popen"))
    ended = launches[0].end()
    assert ended.codes == [0], ended.text
    # where the ranks were spawned or forked, the process that goes on is the main one, which met nobody
    errors = re.findall(r"(?:error|saved) (\d\.\d+e[-+]\d+)", ended.text)  # ranks may share a line
    assert len(errors) == 2 * num_processes, ended.text
    assert all(float(error) < 1e-9 for error in errors), ended.text
    for kind in lost:
        told = rf"ValueError: {LOST[kind]}.*, under start_method='{start}': .*__init__"
        assert re.search(told, ended.text), ended.text


def test_spawn_refuses_parameters_that_the_main_process_would_not_get_back(
    tmp_path: Path, launches: list[Launch]
) -> None:
    launches.append(Launch(tmp_path, "spawn", *LOST, job=SPREAD_JOB))
    ended = launches[0].end()
    assert ended.codes == [0], ended.text
    for told in LOST.values():
        assert re.search(rf"ValueError: {told}.*, under start_method='spawn': .*__init__", ended.text), ended.text


def test_ctrl_c_ends_all_ranks_with_stock_exit_code(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path, "wait:1")
    launches.append(launch)
    launch.wait_for_failure()
    # a terminal sends it to the whole foreground group
    os.killpg(launch.processes[0].pid, signal.SIGINT)
    ended = launch.end()
    assert ended.is_in_time, ended
    # as under a stock strategy: Lightning looks every 5 s whether a child has failed, and then kills the main process
    assert ended.codes[0] in (1, -signal.SIGKILL), ended.text
    assert "not reached" not in ended.text
