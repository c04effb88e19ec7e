"""A training script that fails in the way its arguments say; the tests run it as users would.

``python job.py OUT PLAN...``: the steps of the plan one after another, in one launch. Each rank prints the time
at which it does what the others must not wait for. ``ACT:RANK`` acts before a step, on one of two ranks,
``ACT:RANK:W`` inside a callback, on one of W ranks that sum something in it.
"""

import atexit
import os
import signal
import sys
import time
from typing import Any

import tests.launch.same_root  # noqa: F401  # isort: skip

import torch
from torch.utils.data import DataLoader

from lightning_moeclip.binding import Callback, LightningModule, Trainer, pl

# the only place that names the strategy under test
from lightning_moeclip.strategy import MoEClipStrategy as Strategy
from tests.launch.watchful import Watchful

OnExceptionCheckpoint = pl.callbacks.OnExceptionCheckpoint


class UserError(Exception):
    pass


def say(text: str) -> None:
    print(f"[{os.environ.get('LOCAL_RANK') or os.environ.get('SLURM_LOCALID')}] {text}", flush=True)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class At(Callback):
    """Does something on one rank before step 3, while the other ranks wait in that step's collective."""

    def __init__(self, rank: int, act: Any) -> None:
        self.rank = rank
        self.act = act

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 3:
            say(f"NOW {time.time():.3f}")
            self.act()


def fail() -> None:
    raise UserError("my own bug")


def fail_and_stay() -> None:
    atexit.register(time.sleep, 60)
    fail()


def now(act: Any) -> Any:
    """``act``, with its time told, while the others wait already."""

    def do() -> None:
        time.sleep(0.3)
        say(f"NOW {time.time():.3f}")
        act()

    return do


def fit(out: str, *callbacks: Callback, steps: int = 6, val_steps: int = 0, devices=2) -> Any:
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=Strategy(process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, OnExceptionCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=out,
    )
    model = Model()
    loaders = [DataLoader(torch.ones(max(n, 1) * 2, 2), batch_size=2) for n in (steps, val_steps)]
    trainer.fit(model, loaders[0], loaders[1] if val_steps else None)
    return trainer, model, loaders[0]


def refused(kind: type[Exception], **kwargs: Any) -> None:
    try:
        fit(**kwargs)
    except kind as error:
        say(f"refused {type(error).__name__}: {error}")
    else:
        say("accepted")


def run(step: str, out: str) -> None:
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    if step == "fit":
        trainer, model, loader = fit(out)
        weight = model.layer.weight.abs().sum().item()
        trainer.test(model, loader, verbose=False)
        trainer.fit(model, loader)
        say(f"fitted {weight:.6f}")
    elif step == "counts":
        refused(RuntimeError, out=out, steps=6 - rank)
    elif step == "val_counts":
        refused(RuntimeError, out=out, val_steps=4 - 2 * rank if rank else 1)
    elif step == "late":
        time.sleep(60 * rank)
        fit(out)
    else:
        act, bad, *devices = step.split(":")
        act = {
            "fail": fail,
            "checkpoint": fail,
            "stay": fail_and_stay,
            "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "int": lambda: os.kill(os.getpid(), signal.SIGINT),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "wait": lambda: time.sleep(60),
        }[act]
        callbacks = [OnExceptionCheckpoint(out)] if step.startswith("checkpoint") else []
        if devices:
            fit(out, Watchful(int(bad), now(act)), devices=int(devices[0]))
        else:
            fit(out, At(int(bad), act), *callbacks)
        say("not reached")


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(f"pid {os.getpid()}")
    for step in sys.argv[2:]:
        run(step, sys.argv[1])
