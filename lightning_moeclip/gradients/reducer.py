"""From autograd's hooks to reduced gradients: pack, launch in one fixed order, wait, agree on who was missing.

The end of a reduction reads one small reduced vector on the host, the roll call.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.buckets import Bucket, Slot
from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.report import Attendance, ReductionResidual
from lightning_moeclip.gradients.residual import ResidualSample
from lightning_moeclip.gradients.roll_call import Answer, RollCall, Totals, presence_fields, presence_totals
from lightning_moeclip.gradients.slabs import Slabs
from lightning_moeclip.gradients.stash import GradStash, StashMode, passage_for
from lightning_moeclip.gradients.statistics import LayerStatistics
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import SyncPlan
from lightning_moeclip.parallel.whereabouts import Place

__all__ = ["Reducer"]


class Reducer:
    """Reduces the gradients of a plan during each backward.

    Attributes:
        is_paused: gradients are summed on this rank alone, as for the first micro-batches of an accumulation.
        is_live: this rank's loss counts; False while a zero stands in for a missing one, whose zero gradients then
            are those of a parameter that was not used.
        is_termination_requested: goes into the roll call, so that all ranks learn of it.
        is_last_batch: this rank's loader ends with the batch at hand; goes into the roll call too.
        place: training steps that this rank has begun and reductions that it has entered, which must be the same on
            all ranks.
        is_residual_asked: the next reduction compares a sample with float32; the same on all ranks.
        residual: what that comparison found, until the next reduction; None when there was none.
    """

    def __init__(
        self,
        plan: SyncPlan,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        *,
        wire_dtype: torch.dtype | None = None,
        stash: StashMode = "stream",
        wait_window: int | None = None,
        divisors: Mapping[str, Tensor] = MappingProxyType({}),
        is_idle_zero: bool = False,
        count_unplanned: Callable[[], int] = lambda: 0,
        on_unplanned: Callable[[], None] = lambda: None,
        on_finished: Callable[[Attendance], None] = lambda _: None,
        statistics: LayerStatistics | None = None,
    ) -> None:
        """Make the buckets and hook the parameters.

        Args:
            plan: layout, equal on all ranks.
            parameters: the Parameter objects by name.
            mesh: axes and groups.
            wire_dtype: dtype of the collectives; None sends gradients as they are.
            stash: how buckets travel.
            wait_window: buckets in flight at a time; None for all of them.
            divisors: what this rank's gradients of a parameter are divided by beside the size of the world, by its
                name: 0-d powers of two, which their owner may change in place between two steps. Only the gradients
                of a backward are divided: reduced ones that are there stay.
            is_idle_zero: a parameter without a gradient on any rank gets zeros instead of None.
            count_unplanned: number of trainable parameters on this rank that the plan does not know.
            on_unplanned: called on all ranks when some rank counted one.
            on_finished: told the outcome of each reduction, also of one that a raw ``loss.backward()`` ends.
            statistics: reads gradients before they are reduced, in the steps in which it is asked to.
        """
        self.plan = plan
        self._statistics = statistics
        self._mesh = mesh
        self._is_idle_zero = is_idle_zero
        self._count_unplanned = count_unplanned
        self._on_unplanned = on_unplanned
        self._on_finished = on_finished
        self._stash = GradStash(wait_window, is_eager=stash != "sync")
        self._slabs = Slabs(plan, mesh.gradient_groups)
        self.buckets = self._make_buckets(parameters, wire_dtype, stash, divisors)
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        device = self.buckets[0].flat.device if self.buckets else torch.device("cpu")
        self.roll_call = RollCall(mesh, [slot.planned.is_listed for slot in self._slots], device)
        self._order = list(self.buckets)
        self._be_idle()
        self._accumulators: list[torch.autograd.graph.Node] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for slot in self._slots:
            self._hook(slot)

    def _make_buckets(
        self,
        parameters: Mapping[str, nn.Parameter],
        wire_dtype: torch.dtype | None,
        stash: StashMode,
        divisors: Mapping[str, Tensor],
    ) -> list[Bucket]:
        return [
            Bucket(
                bucket,
                parameters,
                flat,
                divisor=self.plan.divisor,
                num_replicas=len(self.plan.replicas[bucket.axis]),
                group=self._mesh.gradient_groups[bucket.axis],
                passage=passage_for(stash, bucket.device),
                wire_dtype=wire_dtype,
                divisors=divisors,
            )
            for bucket, flat in zip(self.plan.buckets, self._slabs.flats, strict=True)
        ]

    def _be_idle(self) -> None:
        """Begin where no backward is under way and nobody has asked for anything."""
        self.is_paused = False
        self.is_live = True
        self.is_termination_requested = False
        self.is_last_batch = False
        self.place = Place()
        self.is_residual_asked = False
        self.residual: ReductionResidual | None = None
        self._next = 0
        self._is_open = False
        self._was_live = False
        self._was_spoiled = False
        self._is_driven = False
        self._is_aborted = False

    def _hook(self, slot: Slot) -> None:
        parameter = slot.parameter
        is_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # also one that is switched off for a moment
        self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _: self._on_gradient(slot)))
        if slot.comes_back_changed:
            # not a hook of the parameter: torch.autograd.grad, which adds nothing to .grad, calls those too
            accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
            self._accumulators.append(accumulator)  # autograd makes a new one, without the hook, when nobody holds it
            self._handles.append(accumulator.register_prehook(lambda _: self._reopen(slot)))
        parameter.requires_grad_(is_trainable)

    def detach(self) -> None:
        """Remove the hooks; reduced gradients stay where they are, and nothing is reduced any more."""
        for bucket in self.buckets:
            bucket.release()
        self._slabs.release()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulators.clear()

    def begin_step(self) -> None:
        """Before a training step: nothing of an earlier one is under way."""
        self.abandon()
        self.place = replace(self.place, step=self.place.step + 1)

    def begin(self, *, is_live: bool = True, is_spoiled: bool = False) -> None:
        """Say that ``finish`` will be called after this backward.

        Args:
            is_live: see the attribute.
            is_spoiled: what this rank gave up is not finite and has been sent to other ranks: zero times it is NaN,
                so no rank gets a gradient.
        """
        self.abandon()
        self._is_driven = True
        if not self.is_paused:
            self._enter_reduction()
        self.is_live = is_live
        self._was_live |= is_live
        self._was_spoiled |= is_spoiled

    def _enter_reduction(self) -> None:
        if not self.place.is_reducing:
            self.place = replace(self.place, num_reductions=self.place.num_reductions + 1, is_reducing=True)

    def abandon(self) -> None:
        """Forget a backward that an exception ended before its reduction; what the ranks launched comes to its end."""
        if self._is_open or self._stash.is_busy:
            self._stash.flush()
            for bucket in self.buckets:
                bucket.catch_up()
            self._close()
        self._is_driven = self._is_aborted = False
        if self.place.is_reducing:
            self.place = replace(self.place, num_paused=0, is_reducing=False)

    def abort(self) -> None:
        """Note that an exception ended a backward; nothing is waited for, since the other ranks may not come."""
        self._is_aborted = True

    @torch.no_grad()
    def _reopen(self, slot: Slot) -> None:
        slot.reopen()

    def _on_gradient(self, slot: Slot) -> None:
        # a backward without create_graph has switched recording off already, and switching it again costs as much
        # as the rest of a small parameter's hook
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._take(slot)
        else:
            self._take(slot)

    def _take(self, slot: Slot) -> None:
        if self._is_aborted:
            self.abandon()
        grad = slot.parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(
                f"{slot.planned.name} got a {grad.layout} gradient. Gradients are summed over ranks in flat buffers, "
                "which hold every row. Use nn.Embedding(..., sparse=False)."
            )
        self._was_live |= self.is_live
        says_nothing = not self.is_live and self._says_nothing(slot)
        if self.is_paused:
            if says_nothing:
                slot.parameter.grad = None
            else:
                slot.keep()
            return
        self._open()
        slot.is_silent = says_nothing and (slot.is_silent or not slot.has_come)
        slot.num_fired += 1
        bucket = slot.bucket
        if bucket.is_launched:
            slot.is_late = True  # the buffer is in flight: this part waits in .grad
            return
        bucket.take(slot)
        if bucket.is_full:
            self._launch_ready()

    def _says_nothing(self, slot: Slot) -> bool:
        """Whether a stand-in's backward left a fresh zero: what is not zero is owed to the losses of other ranks."""
        grad = slot.parameter.grad
        return grad is not None and grad is not slot.view and not slot.is_late and not bool(grad.any())

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._watch_or_not()
            if not self._is_driven:
                # a raw loss.backward(): autograd calls back when it ends
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_raw)

    def _finish_raw(self) -> None:
        if self._is_open:
            self.finish()

    @property
    def _is_watched(self) -> bool:
        """Whether gradients are read before they are reduced, for which all of them have to be there."""
        is_sampled = self.is_residual_asked and any(map(ResidualSample.covers, self.buckets))
        return is_sampled or (self._statistics is not None and self._statistics.is_asked)

    def _launch_ready(self) -> None:
        if self._is_watched:
            return
        while self._next < len(self._order):
            bucket = self._order[self._next]
            if bucket.is_deferred is not False or not bucket.is_full or not self._stash.has_room:
                return
            self._stash.launch(bucket)
            self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is left, wait for everything and point ``.grad`` at the reduced gradients; nothing while paused.

        Every rank must call this after the same backward, with or without gradients of its own.
        """
        is_driven, self._is_driven = self._is_driven, False
        self.is_live = True
        if self.is_paused:
            self.place = replace(self.place, num_paused=self.place.num_paused + is_driven)
            return
        self._enter_reduction()
        self._watch_or_not()
        sample = self._watch() if self._is_watched else None
        for bucket in self._order[self._next :]:
            self._stash.launch(bucket)
        if self.roll_call.vector.is_cuda:
            self._stash.flush()  # waits for nothing on the host, and puts the roll call behind all sums on every rank
        totals = self.roll_call.call(self._answer())
        self.place = replace(self.place, num_paused=0, is_reducing=False)
        self._stash.flush()
        for bucket in self._order:
            bucket.rehearse()
        self.residual = None if sample is None else sample.compare(self._order)
        if totals.has_late:
            for bucket in self._order:
                bucket.add_late_parts()
        attendance = self._hand_out(totals)
        self._learn_order(totals)
        self._close()
        if totals.has_unplanned:
            self._on_unplanned()
        self._on_finished(attendance)

    def _watch_or_not(self) -> None:
        is_watched = self._statistics is not None and self._statistics.is_asked
        for bucket in self.buckets:
            bucket.is_watched = is_watched

    def _watch(self) -> ResidualSample | None:
        """Read the gradients of this rank as they go into the sum."""
        sample = ResidualSample(self._mesh, seed=self.place.step) if self.is_residual_asked else None
        statistics = self._statistics if self._statistics is not None and self._statistics.is_asked else None
        for bucket in self._order:
            bucket.close()
            if sample is not None:
                sample.take(bucket)
        if statistics is not None:
            present = [slot for slot in self._slots if slot.is_present]
            statistics.take_local((slot.parameter, slot.sums) for slot in present if slot.sums is not None)
        return sample

    def _answer(self) -> Answer:
        return Answer(
            step=self.place.step,
            num_paused=self.place.num_paused,
            is_live=self._was_live,
            is_spoiled=self._was_spoiled,
            num_late=sum(slot.is_late for slot in self._slots),
            num_unplanned=self._count_unplanned(),
            is_termination_requested=self.is_termination_requested,
            is_last_batch=self.is_last_batch,
            # one that was there before counts as many: its bucket is not to be launched early
            num_fired=[(slot.num_fired or 2) if slot.is_present else 0 for slot in self._slots],
        )

    def _hand_out(self, totals: Totals) -> Attendance:
        absent = []
        is_any = totals.num_live > 0 and not totals.is_spoiled
        for slot, is_somewhere in zip(self._slots, totals.is_present, strict=True):
            is_present = is_somewhere and is_any
            if not is_present:
                absent.append(slot.planned.name)
                slot.view.zero_()
            is_shown = is_present or (is_any and self._is_idle_zero and slot.parameter.requires_grad)
            slot.parameter.grad = slot.view if is_shown else None
            slot.is_local = False
        return Attendance(
            num_live_ranks=totals.num_live,
            absent=tuple(absent),
            is_spoiled=totals.is_spoiled,
            is_termination_requested=totals.is_termination_requested,
            ending_ranks=totals.ending_ranks,
        )

    def _learn_order(self, totals: Totals) -> None:
        """Move buckets whose gradients do not all come exactly once behind the others, equally on all ranks."""
        if totals.num_live < self._mesh.world_size:
            return  # a rank without a loss says nothing about which gradients come
        is_steady = iter(totals.is_steady)
        for bucket in self.buckets:
            steady = [next(is_steady) for _ in bucket.slots]
            bucket.is_deferred = bool(bucket.is_deferred) or not all(steady)
        self._order = sorted(self.buckets, key=lambda bucket: bool(bucket.is_deferred))

    @torch.no_grad()
    def adopt(self, previous: "Reducer") -> None:
        """Take over the gradients of a reducer with another plan, and reduce those that it did not know.

        Every rank must call this after the same ``finish``.
        """
        planned = {id(slot.parameter) for slot in self._slots}
        for slot in previous._slots:
            if id(slot.parameter) not in planned and slot.parameter.grad is slot.view:
                slot.parameter.grad = slot.view.clone()  # of one that was frozen: its view would keep the whole slab
        known = {id(slot.parameter): slot for slot in previous._slots}
        newcomers = [slot for slot in self._slots if id(slot.parameter) not in known]
        is_listed = [slot.planned.is_listed for slot in newcomers]
        own = presence_fields([float(slot.parameter.grad is not None) for slot in newcomers], is_listed, self._mesh)
        presence = torch.tensor(own)
        for slot in newcomers:
            slot.is_local = True  # nobody has reduced it
            slot.bucket.fill_missing_slot(slot)
            slot.bucket.pack_pending()
            sum_over(slot.view, slot.bucket.group)
        totals = sum_over(presence.to(self.roll_call.vector.device), self._mesh.gradient_groups["dp"]).tolist()
        for slot, (total, _) in zip(newcomers, presence_totals(totals, is_listed, self._mesh), strict=True):
            slot.parameter.grad = slot.view if total > 0 or self._is_idle_zero else None
            slot.is_local = False
        for slot in self._slots:
            if id(slot.parameter) in known and slot.parameter.grad is not None:
                slot.view.copy_(slot.parameter.grad)
                slot.parameter.grad = slot.view
                slot.is_local = known[id(slot.parameter)].is_local
            slot.reset()

    def _close(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0
        self._is_open = False
        self._was_live = False
        self._was_spoiled = False
