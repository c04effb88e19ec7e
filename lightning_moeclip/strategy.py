"""``MoEClipStrategy``: binds the corridor of a gradient to PyTorch Lightning.

torch's DDP wrapper is not used. The strategy keeps what Lightning's ``DDPStrategy`` does around it (launchers, sampler
injection, ``sync_dist``, ``torch.compile``) and puts the package's own reduction, state and checks in its place.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moeclip.binding import (
    DDPStrategy,
    Precision,
    TrainerFn,
    TrainerStatus,
    made_for,
)
from lightning_moeclip.gradients.collectives import broadcast_from_first
from lightning_moeclip.gradients.corridor import CorridorSettings, GradientCorridor, optimizer_only_parameters
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.gradients.report import Attendance, GradReport
from lightning_moeclip.gradients.stash import StashMode
from lightning_moeclip.parallel import checks, interop, ledger, precision_checks
from lightning_moeclip.parallel.agreement import together
from lightning_moeclip.parallel.explanation import Explanation
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import SyncPlan
from lightning_moeclip.parallel.roles import Towers
from lightning_moeclip.plan_log import write_plan
from lightning_moeclip.precision import MoEClipPrecision
from lightning_moeclip.scale_log import ScaleLog
from lightning_moeclip.setup_checks import CheckedStrategy
from lightning_moeclip.state.broadcast import broadcast_buffers, broadcast_state
from lightning_moeclip.state.canonical import SpreadExperts, spread_names
from lightning_moeclip.state.optimizer_parameters import placement

__all__ = ["MoEClipStrategy"]


class MoEClipStrategy(CheckedStrategy):
    """Data- and expert-parallel training with the gradients of one process.

    Args:
        expert_parallel_size: ranks that share out the experts of each ``MoE``; divides the number of ranks and of
            experts.
        towers: module paths by tower, ``{"image": "model.visual", "text": ["model.text"]}``; None recognises the
            layouts of known CLIP models.
        bucket_size_mb: upper bound in MiB of the gradients reduced in one collective.
        wait_window: such collectives under way at a time; None for all of them. So many start within backward, the
            others when it has ended. It changes no bit.
        idle_expert: what a parameter gets that no rank has a gradient for: "skip" leaves ``grad=None`` as one process
            does, "zero" gives zeros, so that momentum and weight decay move it.
        gradient_dtype: dtype in which gradients are summed over ranks, such as ``torch.bfloat16`` or its name; None is
            each gradient's own.
        stash: how gradients travel while backward goes on: "stream" on a stream of their own (in threads of the process
            group on a CPU), "graph" replayed from a recording, a CUDA graph on a GPU, "sync" one after the other when
            backward has ended. All of them give the same bits.
        accelerator: as in Lightning's ``DDPStrategy``, like the arguments below.
        parallel_devices: see ``accelerator``.
        cluster_environment: see ``accelerator``.
        checkpoint_io: see ``accelerator``.
        precision_plugin: see ``accelerator``; becomes a ``MoEClipPrecision``.
        process_group_backend: see ``accelerator``.
        timeout: see ``accelerator``.
        start_method: see ``accelerator``.
        ddp_arguments: arguments of torch's DDP, which are refused by name.

    Raises:
        TypeError: an argument that only torch's DDP knows.
        ValueError: a value out of its range.
    """

    strategy_name = "moeclip"
    _precision_plugin: MoEClipPrecision | None

    def __init__(
        self,
        *,
        expert_parallel_size: int = 1,
        towers: Towers | None = None,
        bucket_size_mb: float = 25.0,
        wait_window: int | None = None,
        idle_expert: Literal["skip", "zero"] = "skip",
        gradient_dtype: torch.dtype | str | None = None,
        stash: StashMode = "stream",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_arguments: Any,
    ) -> None:
        checks.refuse_ddp_arguments(ddp_arguments)
        checks.check_at_least_one(expert_parallel_size)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.has_own_timeout = timeout != default_pg_timeout  # LightningCLI hands over the default too
        self.expert_parallel_size = expert_parallel_size
        self._settings = CorridorSettings(
            towers, bucket_size_mb, checks.dtype_named(gradient_dtype), idle_expert, stash, wait_window
        )
        self._is_stand_in = self._is_spoiled = False
        self.report = GradReport()
        self._scale_log = ScaleLog()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(expert_parallel_size={self.expert_parallel_size}, {made_for()})"

    @property
    def plan(self) -> SyncPlan:
        """Who reduces what; made when the optimizers are."""
        if self._corridor is None:
            raise RuntimeError("strategy.plan exists while fit runs and after it: read it in on_fit_start or later.")
        return self._corridor.plan

    def explain(self) -> Explanation:
        """Who reduces which gradients in this run: a table that prints itself. No collective.

        Raises:
            RuntimeError: there is no run yet.
        """
        if self._corridor is None:
            raise RuntimeError(
                "strategy.explain() tells of a run, while fit runs and after it: call it in on_fit_start or later. "
                "Before, write lightning_moeclip.explain(module, world_size=..., expert_parallel_size=...)."
            )
        towers = self._settings.towers
        return self._corridor.explain(self.precision_plugin.region_names(self.lightning_module, towers=towers))

    def clip_grad_norm_(self, max_norm: float, *, optimizer: Optimizer | None = None) -> Tensor:
        """Clip by the norm over all ranks, for manual optimization; every rank must call this.

        Args:
            max_norm: bound of the total norm.
            optimizer: whose parameters are meant; None means all optimizers'.

        Returns:
            0-d norm before clipping, the same on all ranks.
        """
        return self.precision_plugin.clip_norm(self.optimizers if optimizer is None else [optimizer], max_norm)

    @property
    def precision_plugin(self) -> MoEClipPrecision:
        """The plugin of the run, always a ``MoEClipPrecision``."""
        if self._precision_plugin is None:
            self._precision_plugin = MoEClipPrecision("32-true")
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else MoEClipPrecision.upgrade(plugin)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._mesh is None:
            self._mesh = Mesh.build(self.expert_parallel_size)
            if self._mesh.experts is not None:
                self._experts = SpreadExperts(self._mesh.experts)

    @override
    def setup(self, trainer: Any) -> None:
        """Make everything ready for fit; outside fit experts are whole and nothing is reduced."""
        precision_checks.warn_of_two_precisions(
            trainer._accelerator_connector._precision_flag, self.precision_plugin.precision
        )
        self.precision_plugin.use_device(self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        self._loaded = None
        # nothing is reduced outside fit: no wrapper, and no broadcast over experts that differ
        super(DDPStrategy, self).setup(trainer)
        self.check_outside_fit()
        if self._experts is not None:
            self._experts.gather(masters=self._masters)
        broadcast_state(self.lightning_module, self.mesh)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    @override
    def configure_ddp(self) -> None:
        """Give every rank the same weights, then its own experts; runs before the optimizers are made."""
        module = self.lightning_module
        self.check_before_spreading()
        broadcast_state(module, self.mesh)
        with together():
            self.precision_plugin.open_regions(module, towers=self._settings.towers, device=self.root_device)
        if self._experts is not None:
            for root in [module, *self._copies_in_callbacks()]:
                self._experts.spread(root)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, then the plan and the buckets; compares both over ranks."""
        super().setup_optimizers(trainer)
        digits = self._adopt_optimizer_parameters()
        if self._corridor is not None:
            self._corridor.detach()
        module, optimizers = self.lightning_module, self._plain_optimizers()
        self.check_parameters()
        self._make_masters(digits | self.precision_plugin.take_originals())
        self.check_optimizers(optimizers)
        lists = sorted(interop.listed_names(module))
        self.refuse_lost_parameters(lists, why="is of an expert that one rank has", can_be_made_before=False)
        self._corridor = GradientCorridor(
            module,
            self._plain_optimizers,
            self.mesh,
            self._settings,
            spread=frozenset(spread_names(module)),
            masters=self._masters,
            divisors=lambda: self.precision_plugin.divisors(dict(module.named_parameters())),
            on_finished=self._note_reduction,
        )
        if self._watch is not None:
            self._watch.whereabouts.follow(self._corridor.place)
        self.report = GradReport()
        self.precision_plugin.join(
            self._corridor_clipper,
            group=self.mesh.gradient_groups["dp"],
            has_spread_experts=self._experts is not None,
            note=self._note,
            device=self.root_device,
            before_hooks=self._publish,
            is_held=self._agree_on_verdict if self._learn_who_holds() else None,
        )
        self._watch_raw_steps()

    def _make_masters(self, originals: Mapping[int, Tensor]) -> None:
        """Float32 masters for what the optimizers hold in 16 bits.

        Args:
            originals: values before they were cast, by the id of the parameter.
        """
        loaded, previous = self._loaded or {}, self._masters
        self._loaded = self._masters = None
        if not self.precision_plugin.has_master_weights:
            return
        self._masters = MasterWeights(axis=self.mesh.experts, previous=previous)
        self._masters.cover(self._plain_optimizers())
        self._masters.take(originals)
        self._masters.take(self._by_parameter(loaded))
        if not len(self._masters):
            precision_checks.warn_of_no_masters(self.precision_plugin.precision)

    def _corridor_clipper(self) -> Any:
        return None if self._corridor is None else self._corridor.clipper

    def _adopt_optimizer_parameters(self) -> dict[int, Tensor]:
        """Give every rank the first one's values of parameters that only an optimizer holds, on its device.

        Returns:
            Values before the cast of those that are in another dtype now, by id.
        """
        module, optimizers = self.lightning_module, self._plain_optimizers()
        # on every rank: whether there is anything to broadcast must not be one rank's own decision
        checks.check_same_on_all_ranks(placement(module, optimizers), what="What the optimizers hold")
        outside = optimizer_only_parameters(module, optimizers)
        if not outside:
            return {}
        before = {id(p): p.data for p in outside.values()}
        self.refuse_lost_parameters(list(outside), why="is in an optimizer and not in the LightningModule")
        for parameter in outside.values():
            self.precision_plugin.convert_parameter(parameter)
            parameter.data = parameter.data.to(self.root_device)
        broadcast_from_first(outside.values(), self.mesh.gradient_groups["dp"])
        checks.warn_of_optimizer_only(list(outside))
        return {id(p): before[id(p)] for p in outside.values() if p.dtype is not before[id(p)].dtype}

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; where it returns None on this rank, a zero stands in for the missing loss."""
        self._is_stand_in = self._is_spoiled = False
        self.precision_plugin.begin_step()
        self._begin_watch()
        reducer = None if self._corridor is None else self._corridor.reducer
        if reducer is not None:
            reducer.is_last_batch = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        with self._in_step(), ledger.recording() as page:
            output = super().training_step(*args, **kwargs)
        self.check_checkpointing(page)
        module = self.lightning_module
        if output is not None or not module.automatic_optimization or self.world_size == 1:
            return output
        # the other ranks' backward waits in collectives of the layers that this rank has run
        self._is_stand_in = True
        self._is_spoiled = not all(bool(o.detach().isfinite().all()) for o in [*page, *page.hidden])
        return ledger.stand_in(page, device=self.root_device)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step():
            return super().validation_step(*args, **kwargs)

    def _in_step(self) -> Any:
        axis = self.mesh.experts
        return nullcontext() if axis is None else axis.opened()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward and reduction: ``on_after_backward`` sees reduced gradients, still scaled by the loss scale."""
        module = self.lightning_module
        corridor = self._corridor
        assert corridor is not None, "backward outside fit"
        if not self._is_stand_in:  # a stand-in takes outputs from within layers
            self.precision_plugin.check_regions(closure_loss)
        self._begin_backward()
        self.pre_backward(closure_loss)
        loss, closure_loss = closure_loss, self.precision_plugin.pre_backward(closure_loss, module)
        self._note_loss(loss, is_live=not self._is_stand_in)
        corridor.begin(is_live=not self._is_stand_in, is_spoiled=self._is_spoiled)
        try:
            with self._in_step():  # activation checkpointing runs layers again
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        except BaseException:
            corridor.abort()
            raise
        self.agree_on_termination()
        corridor.finish()
        self._end_backward()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _note_reduction(self, attendance: Attendance) -> None:
        # the verdict is that of the training step, which may have several backwards and optimizers
        self.report = GradReport(attendance, loss_scales=self.report.loss_scales, verdict=self.report.verdict)
        self.end_if_terminated(attendance.is_termination_requested)
        self.note_ends(attendance.ending_ranks)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """One step of an optimizer, after which scales and their rates are logged where Lightning logs."""
        self._begin_optimizer_step(optimizer)
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._end_optimizer_step()
        self._scale_log.write(self._trainer, self.report.loss_scales)
        return output

    @override
    def agree_on_termination(self) -> None:
        """Put this rank's wish to end into the next roll call, which every backward reduces anyway."""
        reducer = None if self._corridor is None else self._corridor.reducer
        if reducer is not None:
            reducer.is_termination_requested = self.termination_requested

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Sum gradients on this rank alone while the body runs, as for all but the last micro-batch of a step."""
        reducer = None if self._corridor is None else self._corridor.reducer
        if reducer is None:
            yield
            return
        before, reducer.is_paused = reducer.is_paused, True
        try:
            yield
        finally:
            reducer.is_paused = before

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        write_plan(self._trainer, self.explain)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        broadcast_buffers(self.lightning_module, self.mesh)

    @override
    def teardown(self) -> None:
        """Take all hooks away, and make experts whole again unless the run failed or was interrupted."""
        self._unwatch_raw_steps()
        if self._corridor is not None:
            self._corridor.detach()
        # after spawn the main process tears down too, with neither ranks nor experts
        is_whole_run = not self.has_failed
        if self._experts is not None and is_whole_run and self._trainer.state.status != TrainerStatus.INTERRUPTED:
            self._experts.gather(masters=self._masters)
        self._loaded = None
        super().teardown()
        if self._masters is not None:
            self._masters.release()
