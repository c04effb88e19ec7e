"""The corridor of one training run: from a module and its optimizers to plan, buckets and clipping."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.clipping import GradientClipper
from lightning_moeclip.gradients.collectives import broadcast_from_first
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.masters import MasterWeights
from lightning_moeclip.gradients.reducer import Reducer
from lightning_moeclip.gradients.report import Attendance
from lightning_moeclip.gradients.stash import StashMode, check_stash
from lightning_moeclip.gradients.statistics import LayerStatistics
from lightning_moeclip.parallel import checks
from lightning_moeclip.parallel.explanation import Explanation, explain_plan
from lightning_moeclip.parallel.fates import role_outside
from lightning_moeclip.parallel.interop import listed_names
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import SyncPlan, build_plan, plan_parameter
from lightning_moeclip.parallel.roles import Towers, read_roles
from lightning_moeclip.parallel.strays import stray_tensors
from lightning_moeclip.parallel.whereabouts import Place

__all__ = ["CorridorSettings", "GradientCorridor", "optimizer_only_parameters"]


@dataclass(frozen=True)
class CorridorSettings:
    """What a user chose about the way of gradients.

    Attributes:
        towers: module paths by tower; None recognises known layouts.
        bucket_size_mb: upper bound of a bucket, in MiB.
        gradient_dtype: dtype in which gradients are summed over ranks; None is each gradient's own.
        idle_expert: what a parameter without a gradient on any rank gets: "skip" None, "zero" zeros.
        stash: how buckets travel.
        wait_window: buckets in flight at a time; None for all of them.
    """

    towers: Towers | None = None
    bucket_size_mb: float = 25.0
    gradient_dtype: torch.dtype | None = None
    idle_expert: Literal["skip", "zero"] = "skip"
    stash: StashMode = "stream"
    wait_window: int | None = None

    def __post_init__(self) -> None:
        if not self.bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={self.bucket_size_mb} must be positive. The default is 25.0.")
        if self.idle_expert not in ("skip", "zero"):
            raise ValueError(f'idle_expert={self.idle_expert!r} must be "skip" (the default) or "zero".')
        if self.gradient_dtype is not None and not self.gradient_dtype.is_floating_point:
            raise ValueError(f"gradient_dtype={self.gradient_dtype} must be a floating-point dtype, or None.")
        check_stash(self.stash, self.wait_window)


def optimizer_only_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Parameters that an optimizer steps and the module does not have, by their place in the optimizer.

    Where there are masters these are the 16-bit parameters behind them.
    """
    known = {id(p) for p in module.parameters()}
    found = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(map(model_parameter, group["params"])):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    found[f"optimizer{i}.group{j}.{k}"] = parameter
    return found


class GradientCorridor:
    """Reduces, counts and clips the gradients of a module over the ranks of a mesh.

    Making one compares the plan over ranks: every rank makes it at the same point.

    Attributes:
        plan: who reduces what, equal on all ranks.
        reducer: None on one process without divisors.
        clipper: total norm over all ranks.
        statistics: sums over gradients by layer.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        mesh: Mesh,
        settings: CorridorSettings,
        *,
        spread: frozenset[str] = frozenset(),
        masters: MasterWeights | None = None,
        divisors: Callable[[], Mapping[str, Tensor]] = dict,
        on_finished: Callable[[Attendance], None] = lambda _: None,
    ) -> None:
        """Lay out the plan and hook the parameters.

        Args:
            module: the user's module, experts spread already.
            optimizers: the optimizers of the run; asked again when the plan is made anew.
            mesh: axes and groups.
            settings: the user's choices.
            spread: names of expert parameters of which this rank holds a slice.
            masters: of the 16-bit parameters in the optimizers; None where there are to be none.
            divisors: additional divisors of gradients, see ``Reducer``; asked again when the plan is made anew.
            on_finished: told the outcome of each reduction.

        Raises:
            RuntimeError: on every rank, when ranks differ in their parameters.
            ValueError: a parameter is in two optimizers, or ``towers`` is wrong.
        """
        self._module = module
        self._optimizers = optimizers
        self._mesh = mesh
        self._settings = settings
        self._spread = spread
        self._masters = masters
        self._divisors = divisors
        self._on_finished = on_finished
        self.reducer: Reducer | None = None
        # kept alive, so that no other parameter gets the id of one of these
        self._shared = {
            id(p): p for p in [*module.parameters(), *optimizer_only_parameters(module, optimizers()).values()]
        }
        self._planned: frozenset[int] = frozenset()
        self._lay_out(keeps_frozen=False)

    def _lay_out(self, *, keeps_frozen: bool, is_asked: bool = False) -> None:
        """Make the plan, and what is made from it, for the parameters as they are now.

        Args:
            keeps_frozen: parameters of the last plan stay in it while they are switched off.
            is_asked: statistics are being taken in this step.
        """
        if self._masters is not None:
            self._masters.cover(self._optimizers())
        outside = optimizer_only_parameters(self._module, self._optimizers())
        roles = dict(read_roles(self._module, self._settings.towers))
        roles |= {name: role_outside(parameter) for name, parameter in outside.items()}
        everything = [*self._module.named_parameters(), *outside.items()]
        listed = listed_names(self._module)
        self._everything = tuple(
            plan_parameter(
                n, p, roles[n], is_spread=n in self._spread, is_in_module=n not in outside, is_listed=n in listed
            )
            for n, p in everything
        )
        trainable = {n: p for n, p in everything if p.requires_grad or (keeps_frozen and id(p) in self._planned)}
        self._planned = frozenset(id(p) for p in trainable.values())
        self.plan: SyncPlan = build_plan(
            trainable,
            roles,
            self._mesh,
            spread=self._spread,
            listed=listed,
            optimizer_only=frozenset(outside),
            bucket_size_mb=self._settings.bucket_size_mb,
        )
        checks.check_same_on_all_ranks(self.plan.fingerprint(), what="The set of trainable parameters")
        self._share(trainable)
        self.clipper = GradientClipper(self.plan, trainable, self._mesh)
        self.statistics = LayerStatistics(self.plan, trainable, self._mesh, roles, is_asked=is_asked)
        divisors = self._divisors()
        if self._mesh.world_size > 1 or divisors:
            self._replace_reducer(trainable, divisors)

    def _replace_reducer(self, trainable: Mapping[str, nn.Parameter], divisors: Mapping[str, Tensor]) -> None:
        """Hook the parameters anew; what the reducer of the last plan holds goes over to the new one."""
        previous = self.reducer
        if previous is not None:
            previous.detach()
        self.reducer = Reducer(
            self.plan,
            trainable,
            self._mesh,
            wire_dtype=self._settings.gradient_dtype,
            stash=self._settings.stash,
            wait_window=self._settings.wait_window,
            divisors=divisors,
            is_idle_zero=self._settings.idle_expert == "zero",
            count_unplanned=self.count_unplanned,
            # within a step a parameter may be switched off for a moment, as toggle_optimizer does
            on_unplanned=self._lay_out_within_step,
            on_finished=self._on_finished,
            statistics=self.statistics,
        )
        if previous is not None:
            self.reducer.adopt(previous)
            self.reducer.is_termination_requested = previous.is_termination_requested
            self.reducer.place = previous.place
            self.reducer.is_residual_asked, self.reducer.residual = previous.is_residual_asked, previous.residual

    def _lay_out_within_step(self) -> None:
        self._lay_out(keeps_frozen=True, is_asked=self.statistics.is_asked)

    def _share(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Give every rank the first one's values of parameters that were made while training, and of masters."""
        axes = {planned.name: planned.axis for planned in self.plan.parameters}
        values = [(axes[name], value) for name, p in trainable.items() for value in self._values_of(p)]
        new = [(axis, value) for axis, value in values if id(value) not in self._shared]
        for axis in ("dp", "edp"):
            broadcast_from_first([v for of, v in new if of == axis], self._mesh.gradient_groups[axis])
        self._shared |= {id(value): value for _, value in new}

    def _values_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        master = None if self._masters is None else self._masters.master_of(parameter)
        return [parameter] if master is None else [parameter, master]

    def count_unplanned(self) -> int:
        """Trainable parameters that an optimizer steps and the plan does not know: unfrozen or added since."""
        return sum(
            parameter.requires_grad and id(model_parameter(parameter)) not in self._planned
            for optimizer in self._optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def is_outdated(self) -> bool:
        """Whether this rank's trainable parameters are no longer those of the plan."""
        outside = optimizer_only_parameters(self._module, self._optimizers())
        trainable = {id(p) for p in [*self._module.parameters(), *outside.values()] if p.requires_grad}
        return trainable != self._planned

    def rebuild(self) -> None:
        """Make the plan anew between two steps, keeping gradients; every rank calls this at the same point."""
        self._lay_out(keeps_frozen=False)

    def explain(self, regions: Mapping[str, str]) -> Explanation:
        """What the plan does with each parameter, on this rank and without a collective.

        Args:
            regions: names by name of the parameter, of those in a region.
        """
        outside = optimizer_only_parameters(self._module, self._optimizers())
        return explain_plan(
            self.plan,
            self._everything,
            self._mesh,
            strays=stray_tensors(self._module),
            held={id(parameter): name for name, parameter in outside.items()},
            regions=regions,
            wire_dtype=self._settings.gradient_dtype,
        )

    def begin_step(self, *, is_watched: bool = False, is_residual_asked: bool = False) -> None:
        """Before a training step: nothing of an earlier one is under way.

        Args:
            is_watched: statistics are taken; the same on all ranks.
            is_residual_asked: a sample of the reduction is compared with float32; the same on all ranks.
        """
        self.statistics.begin(is_asked=is_watched)
        if self._masters is not None:
            self._masters.cover(self._optimizers())
            self._masters.settle()
        if self.reducer is not None:
            self.reducer.begin_step()
            self.reducer.is_residual_asked = is_residual_asked

    def begin(self, *, is_live: bool = True, is_spoiled: bool = False) -> None:
        """Before a backward whose reduction ``finish`` will end.

        Args:
            is_live: the loss is this rank's own, and not a stand-in for a missing one.
            is_spoiled: layers have sent values to other ranks that are not finite, for a loss that is missing.
        """
        if self.reducer is not None:
            self.reducer.begin(is_live=is_live, is_spoiled=is_spoiled)

    def abort(self) -> None:
        """After a backward that an exception ended: the next one starts anew."""
        if self.reducer is not None:
            self.reducer.abort()

    def finish(self) -> None:
        """After a backward: the reduced gradients are in ``.grad``. Nothing while paused or on one process."""
        if self.reducer is not None:
            self.reducer.finish()

    def place(self) -> Place:
        """Where this rank is on the way of its gradients; may be asked from another thread."""
        return Place() if self.reducer is None else self.reducer.place

    def detach(self) -> None:
        """Remove every hook."""
        if self.reducer is not None:
            self.reducer.detach()
