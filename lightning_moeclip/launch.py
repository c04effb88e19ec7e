"""The part of the strategy that starts and ends a run: launchers, failing ranks, signals."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from typing_extensions import override

from lightning_moeclip.binding import DDPStrategy, MultiProcessingLauncher, SubprocessScriptLauncher, TrainerFn, pl
from lightning_moeclip.parallel.watch import FailureWatch, client_at, client_of

__all__ = ["GuardedStrategy"]

_log = logging.getLogger(__name__)
_TunerExit = pl.utilities.exceptions._TunerExitException
_Terminated = pl.utilities.exceptions.SIGTERMException
STARTUP_S = 300.0  # a rank that reads its data before it trains is late by minutes, not by more


class _Guarded:
    """The function that a launcher runs, with failures told to the other ranks. Can be pickled, for ``spawn``."""

    def __init__(self, strategy: "GuardedStrategy", function: Callable[..., Any]) -> None:
        self.strategy = strategy
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except BaseException as error:
            # before any on_exception hook: one that waits for the other ranks must not delay this
            instead = self.strategy.go_down(error)
            if instead is not None:
                raise instead from None
            raise


class _GuardedSubprocessLauncher(SubprocessScriptLauncher):
    strategy: "GuardedStrategy"

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(_Guarded(self.strategy, function), *args, trainer=trainer, **kwargs)


class _GuardedMultiProcessingLauncher(MultiProcessingLauncher):
    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(_Guarded(self._strategy, function), *args, trainer=trainer, **kwargs)


class GuardedStrategy(DDPStrategy):
    """DDP that ends on every rank, with the user's own error, when one rank fails.

    Works the same under Lightning's own launchers, torchrun and SLURM. An error that the caller of ``trainer.fit``
    catches on every rank leaves the processes alone. With one process everything here is inert.

    The environment variable ``MOECLIP_STARTUP_TIMEOUT_S`` holds the seconds that all ranks have to arrive at the
    start of a run. Unset, they have the ``timeout`` that the user gave, or five minutes.
    """

    has_own_timeout = False  # whether the user chose ``timeout``
    _launcher: Any
    _watch: FailureWatch | None = None
    _is_terminated = False
    _has_agreed_to_end = False
    _names_at_connect: frozenset[str] = frozenset()

    @property
    def has_failed(self) -> bool:
        """Whether this rank or another one is going down: nothing may be gathered any more."""
        return self._watch is not None and self._watch.failure is not None

    @property
    def termination_requested(self) -> bool:
        """Whether this rank was asked to end (SIGTERM); the ranks agree on it at the next optimizer step."""
        return self._is_terminated

    def end_if_terminated(self, any_rank: bool) -> None:
        """End this run after the current batch when any rank was asked to.

        Args:
            any_rank: ``termination_requested`` of any rank, reduced; the same on all ranks.
        """
        if any_rank and self._watch is not None:
            self._has_agreed_to_end = True
            self._trainer._signal_connector.received_sigterm = True

    def agree_on_termination(self) -> None:
        """Put ``termination_requested`` into what the ranks reduce next, and see to ``end_if_terminated`` then.

        Called after each optimizer step, on every rank.
        """
        raise NotImplementedError

    def go_down(self, error: BaseException) -> RuntimeError | None:
        """Tell the other ranks about an error on this one, once.

        Args:
            error: what was raised here.

        Returns:
            The error to raise instead, when ``error`` only says that another rank is gone.
        """
        if self._watch is None or self._watch.own is not None or isinstance(error, _TunerExit):
            return None
        if self._has_agreed_to_end and isinstance(error, _Terminated):
            return None
        return self._watch.publish(error)

    @override
    def connect(self, model: Any) -> None:
        super().connect(model)
        self._names_at_connect = frozenset(name for name, _ in model.named_parameters())

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if type(self._launcher) is SubprocessScriptLauncher:
            self._launcher = _GuardedSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            self._launcher.strategy = self
        elif type(self._launcher) is MultiProcessingLauncher:
            self._launcher = _GuardedMultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        self._start_watch()
        super().setup_environment()
        if self._watch is not None:
            self._watch.arrived()
            self._replace_signal_handling()

    @override
    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            new = [n for n, _ in self.lightning_module.named_parameters() if n not in self._names_at_connect]
            self.refuse_lost_parameters(new, why="was made in configure_model or setup")
        super().setup(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        # where a launcher of somebody else ran the function, this is the first that is heard of it
        self.go_down(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._watch is None:
            return
        if self.has_failed:
            self._watch.leave()
        else:
            self._watch.stop()
            self._watch = None

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.has_failed:
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.has_failed else super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if self.has_failed else super().reduce(tensor, group=group, reduce_op=reduce_op)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save as always; after a failure anywhere, this rank's own shard beside ``filepath``, gathering nothing."""
        if not self.has_failed:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        assert self._watch is not None, "only a watched run has failed"
        shard = f"{os.fspath(filepath)}.rank{self.global_rank}"
        with self._watch.saving():
            self.checkpoint_io.save_checkpoint(checkpoint, shard, storage_options=storage_options)
        # logged, not warned: where warnings are errors it would take the place of the user's own
        _log.warning(
            f"The run has failed, so nothing was gathered: rank {self.global_rank} wrote what it holds to {shard}. "
            "Resume from the last whole checkpoint."
        )

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._watch is not None:
            self.agree_on_termination()
        return output

    def stop_after_a_failure(self) -> None:
        """Raise before the next collective when another rank has failed."""
        # sooner than the watch would, and with this rank's hooks: the next collective would not come back
        if self._watch is not None and self._watch.seen is not None:
            raise RuntimeError(f"rank {self.global_rank} was ended because {self._watch.seen.told()}")

    def refuse_lost_parameters(self, names: Sequence[str], *, why: str, can_be_made_before: bool = True) -> None:
        """Refuse parameters that only the launched processes have.

        Args:
            names: of these parameters.
            why: they are known to these processes alone, as told to the user.
            can_be_made_before: the main process could have them as well.

        Raises:
            ValueError: there are some, and the main process goes on after the run.
        """
        if names and self._start_method != "popen":
            remedy = "Make it in the module's __init__, or leave" if can_be_made_before else "Leave"
            raise ValueError(
                f"The parameter {names[0]!r} ({len(names)} in all) {why}, under "
                f"start_method={self._start_method!r}: the main process does not get it back, so what it learns "
                f"would be lost when fit returns. {remedy} out start_method (the default 'popen'), or start the script "
                "with torchrun."
            )

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def _start_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._is_terminated = self._has_agreed_to_end = False
        self.set_world_ranks()
        world_size = dist.get_world_size() if dist.is_initialized() else self.world_size
        if world_size == 1:
            return
        connect: Callable[[], Store | None]
        if dist.is_initialized():
            connect = partial(client_of, dist.distributed_c10d._get_default_store())
        else:
            connect = partial(client_at, self.cluster_environment.main_address, self.cluster_environment.main_port)
        self._watch = FailureWatch(
            self.global_rank,
            world_size,
            connect,
            startup_timeout_s=_startup_timeout_s(self._timeout if self.has_own_timeout else None),
            before_end=partial(self._signal_children, signal.SIGKILL),
        )
        self._watch.start()

    def _signal_children(self, signum: int) -> None:
        # a forked worker also holds the launcher that forked it, with processes that are not its own
        if isinstance(self._launcher, SubprocessScriptLauncher):
            self._launcher.kill(signum)

    def _replace_signal_handling(self) -> None:
        trainer = self.lightning_module.trainer
        # Lightning's handler broadcasts inside the handler, on the interrupted rank alone
        trainer._signal_connector._sigterm_notifier_fn = self._note_termination
        # and its epoch loop broadcasts what rank 0 knows in every batch: the ranks agree at the step instead
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing

    def _note_termination(self, signum: int, _: Any) -> None:
        if not self._is_terminated:
            self._signal_children(signum)
        self._is_terminated = True
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            # no step to agree at: this rank ends at its next batch, and the others hear of it as of a failure
            trainer._signal_connector.received_sigterm = True


def _do_nothing() -> None:
    pass


def _startup_timeout_s(timeout: timedelta | None) -> float:
    """Seconds that ranks have to arrive: MOECLIP_STARTUP_TIMEOUT_S, or the user's timeout, or five minutes."""
    asked = os.environ.get("MOECLIP_STARTUP_TIMEOUT_S")
    if asked:
        try:
            return float(asked)
        except ValueError:
            raise ValueError(
                f"MOECLIP_STARTUP_TIMEOUT_S={asked!r} is not a number. It holds the seconds that all ranks have to "
                "arrive at the start of a run: set a number such as 600, or unset it."
            ) from None
    return STARTUP_S if timeout is None else timeout.total_seconds()
