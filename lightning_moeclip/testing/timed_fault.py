"""What every fault of ``inject`` shares: it waits for its step on its rank, acts there and leaves nothing behind."""

import difflib
import warnings
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_moeclip.binding import Callback, LightningModule, Trainer
from lightning_moeclip.parallel.roles import read_roles

__all__ = ["Fault"]


class Fault(Callback):
    """A fault that waits for its step on its rank.

    Attributes:
        step: it acts in the first batch of a fit that begins at this ``trainer.global_step`` or behind it.
        rank: where it acts.
        parameter: the one that it acts on; None is each fault's own choice.
        fired: the step in which it acted in the last fit, on its own rank; None before, and on the other ranks.
    """

    name = ""

    def __init__(self, step: int, rank: int, *, parameter: str | None = None) -> None:
        self.step = step
        self.rank = rank
        self.parameter = parameter
        self.fired: int | None = None
        self._is_armed = self._is_past = False
        self._batch_step = 0  # at which the batch at hand began, or that in which it was armed

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the rank exists, and make ready for a fit."""
        if self.rank >= trainer.world_size:
            raise ValueError(
                f"{self} on {trainer.world_size} rank(s): there is no rank {self.rank}. "
                f"Write rank=0 to {trainer.world_size - 1}, or Trainer(devices={self.rank + 1})."
            )
        if stage == "fit":
            self.fired = None
            self._is_armed = self._is_past = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the parameter exists, which ``configure_model`` may have made."""
        if self.parameter is not None:
            self._named(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of a fault that lies behind this fit: a resumed run has had it before."""
        self._is_past = trainer.global_step > self.step
        if self._is_past and trainer.global_rank == self.rank:
            warnings.warn(
                f"{self}: training begins at step {trainer.global_step}, behind it. Nothing is planted; write a later "
                "step, or leave it out.",
                stacklevel=2,
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Arm the fault in the first batch of its step."""
        if self._is_armed:
            return
        self._batch_step = trainer.global_step
        # passed rather than met: with several optimizers a batch takes several steps
        is_here = trainer.global_rank == self.rank and trainer.global_step >= self.step and not self._is_past
        if is_here and self.fired is None:
            self._is_armed = True
            self._arm(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Disarm it in the last batch of its step."""
        if self._is_armed and trainer.global_step != self._batch_step:
            self._is_armed = False
            self._end_step(trainer, pl_module)
            self._disarm()
            if self.fired is None:
                raise RuntimeError(f"{self} did not happen: {self._why_not()}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a run that was to show a fault and had none."""
        if trainer.global_rank == self.rank and self.fired is None and not self._is_past:
            if self._is_armed:
                raise RuntimeError(f"{self} did not happen: training ended within step {self._batch_step}.")
            raise RuntimeError(
                f"{self} did not happen: this fit ended after {trainer.global_step} optimizer steps. Write a step up "
                f"to {self._batch_step}, or give it to a Trainer that goes on longer."
            )

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take every hook away, also after a run that failed within the step."""
        self._is_armed = False
        self._disarm()

    def __repr__(self) -> str:
        named = "" if self.parameter is None else f", parameter={self.parameter!r}"
        return f"inject({self.name!r}, step={self.step}, rank={self.rank}{named})"

    def _arm(self, trainer: Trainer, module: LightningModule) -> None:
        """Act, or prepare to, before the first batch of the step; on the faulty rank alone, like all below."""

    def _end_step(self, trainer: Trainer, module: LightningModule) -> None:
        """Act after the last batch of the step."""

    def _disarm(self) -> None:
        """Leave nothing behind."""

    def _why_not(self) -> str:
        what = "no parameter" if self.parameter is None else self.parameter
        return f"{what} got a gradient that it could act on on rank {self.rank} in step {self._batch_step}."

    def _fire(self) -> None:
        self.fired = self._batch_step

    def _named(self, module: LightningModule) -> nn.Parameter:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        found = parameters.get(self.parameter or "")
        if found is None or not found.numel():
            close = difflib.get_close_matches(self.parameter or "", parameters, n=3, cutoff=0.4) or list(parameters)[:3]
            what = "no parameter of that name" if found is None else "no element in it"
            raise ValueError(f"{self}: {what}. Close to it are {', '.join(map(repr, close))}.")
        return found

    def _all_or_named(self, module: LightningModule) -> list[nn.Parameter]:
        return list(module.parameters()) if self.parameter is None else [self._named(module)]

    def _first_dense_or_named(self, trainer: Trainer, module: LightningModule) -> nn.Parameter:
        if self.parameter is not None:
            return self._named(module)
        roles = read_roles(module)
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad and p.numel()]
        return min(trained, key=lambda item: roles[item[0]].kind != "dense")[1]
