"""Flat gradient buffers that ``.grad`` views.

A gradient that autograd hands over fresh is divided and packed into its place in one pass, and the fresh tensor is
freed at once: after backward there is one copy of the gradients, in the buckets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.factors import Factors, ScaleFactors
from lightning_moeclip.gradients.slabs import places_of
from lightning_moeclip.kernels.grad_pack import grad_pack
from lightning_moeclip.parallel.plan import BucketPlan, PlannedParameter

__all__ = ["Bucket", "Passage", "Slot", "Waiting"]


# elements that wait at most in a bucket that is launched when backward ends: gradients are freed as they are packed
_MOST_WAITING = 2**22


class Passage(Protocol):
    """How the gradients of a bucket are packed, and get into the sum and back."""

    @property
    def patience(self) -> float:
        """Elements of gradients that wait for one another before they are packed; 0 packs each when it comes."""

    def note(self) -> None:
        """Take note of who leaves a gradient that is to wait."""

    def pack(self, bucket: "Bucket") -> None:
        """Pack what waits."""

    def catch_up(self) -> None:
        """Have the caller see what was packed."""

    def start(self, bucket: "Bucket") -> None:
        """Close the bucket and start the sum, without waiting for other ranks unless its place is behind backward."""

    def end(self, bucket: "Bucket") -> None:
        """Wait until the views hold the sum."""

    def rehearse(self, bucket: "Bucket") -> None:
        """Behind backward: make ready what takes a wait."""

    def release(self) -> None:
        """Let go of what must not outlive the process group."""


class Slot:
    """Place of one parameter in a bucket, and what it holds in the current backward.

    Attributes:
        view: part of the bucket's flat buffer, in the shape and strides of the parameter.
        num_fired: gradients that arrived since the last reduction.
        is_pending: what came, or was there before, waits to be packed.
        is_packed: the view holds this rank's divided gradient.
        is_late: a gradient arrived after the bucket was launched, and waits in ``.grad``.
        is_silent: all that arrived are the zeros of a stand-in for a missing loss, as good as nothing.
        sums: of what was packed, a row of ``grad_statistics``; None where nobody asked.
        factors: what its gradients are multiplied by.
        is_local: ``.grad`` is a sum of this rank alone, made while paused. Any other gradient that is there before a
            backward is equal on all replicas: the result of an earlier reduction, or what the user made of it.
    """

    __slots__ = (
        "bucket", "factors", "is_late", "is_local", "is_packed", "is_pending", "is_silent", "num_fired", "parameter",
        "planned", "sums", "view",
    )  # fmt: skip

    def __init__(
        self,
        planned: PlannedParameter,
        parameter: nn.Parameter,
        bucket: "Bucket",
        view: Tensor,
        factors: Factors | ScaleFactors,
    ) -> None:
        self.planned = planned
        self.parameter = parameter
        self.bucket = bucket
        self.view = view
        self.factors = factors
        self.is_local = False
        self.reset()

    def reset(self) -> None:
        """Forget the last backward; what the view holds stays."""
        self.num_fired = 0
        self.is_pending = False
        self.is_packed = False
        self.is_late = False
        self.is_silent = False
        self.sums: Tensor | None = None

    @property
    def has_come(self) -> bool:
        """Whether there is a gradient, packed or not."""
        return self.is_pending or self.is_packed

    @property
    def is_present(self) -> bool:
        """Whether this rank has a gradient to give."""
        return self.has_come and not self.is_silent

    @property
    def comes_back_changed(self) -> bool:
        """Whether reducing an already reduced gradient again, as if it were this rank's own, changes it."""
        return isinstance(self.factors, ScaleFactors) or self.factors.divisor != self.factors.num_replicas

    def keep(self) -> None:
        """Add to this rank's undivided sum, without communication: ``.grad`` becomes the view."""
        grad = self.parameter.grad
        if grad is not self.view:
            # .grad was None or foreign before, so what autograd left is the whole sum
            assert grad is not None, "a hook fired without a gradient"
            grad_pack([grad], [self.view], [self.bucket.factors.one])
            self.parameter.grad = self.view
        self.is_local = True

    def reopen(self) -> None:
        """Before another gradient is added to a reduced one: undo the divisions that packing will repeat.

        Reducing again takes 1/(W a) of the sum over R replicas, where a is the scale of the gradient itself, so the
        reduced part has to enter as W a / R of itself.
        """
        grad = self.parameter.grad
        if grad is None or self.is_local or self.bucket.is_launched:
            return
        if grad is self.view:
            grad_pack([grad], [grad], [self.factors.reopen])
        else:
            self.parameter.grad = grad.detach() * self.factors.reopen  # a tensor of the user's stays as it is


@dataclass(frozen=True, eq=False)
class Waiting:
    """A gradient that waits to be packed.

    Attributes:
        slot: where it belongs.
        gradient: as autograd left it.
        factor: what it is multiplied by, 0-d.
        accumulates: it is added to an earlier part of this backward.
    """

    slot: Slot
    gradient: Tensor
    factor: Tensor
    accumulates: bool


class Bucket:
    """Gradients that are reduced in one collective.

    Attributes:
        slots: places in the flat buffer, in the order in which gradients are expected.
        flat: the buffer, a part of a slab.
        wire: what travels: ``flat``, or a buffer in the dtype of the collectives.
        factors: what gradients without a scale of their own are multiplied by.
        is_deferred: launched when backward ends: some gradient may not come, or come twice. None until one
            backward was seen.
        is_watched: sums are taken of what is packed.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        flat: Tensor,
        *,
        divisor: int,
        num_replicas: int,
        group: dist.ProcessGroup | None,
        passage: Passage,
        wire_dtype: torch.dtype | None = None,
        divisors: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.factors = Factors.of(plan.dtype, divisor=divisor, num_replicas=num_replicas)
        self.group = group
        self.is_deferred: bool | None = None
        self.is_watched = False
        self.num_come = 0
        self.is_launched = False
        self._passage = passage
        self._pending: list[Waiting] = []
        self._num_pending = 0
        self.flat = flat
        self.wire = flat if wire_dtype in (None, plan.dtype) else torch.zeros_like(flat, dtype=wire_dtype)
        scaled = {id(scale): ScaleFactors(scale, self.factors) for scale in divisors.values()}
        self.slots = []
        for planned, (first, end) in zip(plan.parameters, places_of(plan), strict=True):
            parameter, scale = parameters[planned.name], divisors.get(planned.name)
            own = self.factors if scale is None else scaled[id(scale)]
            self.slots.append(Slot(planned, parameter, self, _view_like(flat[first:end], parameter), own))

    @property
    def num_bytes(self) -> int:
        """Size of the flat buffer."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def num_replicas(self) -> int:
        """Ranks that sum this bucket."""
        return self.factors.num_replicas

    @property
    def is_full(self) -> bool:
        """Whether every gradient has come."""
        return self.num_come == len(self.slots)

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.num_come = 0
        self.is_launched = False
        self._pending, self._num_pending = [], 0  # of a backward that an exception ended
        for slot in self.slots:
            slot.reset()

    def take(self, slot: Slot) -> None:
        """Note that a gradient came, and pack it: many at a time where the launch of a kernel is dear."""
        if not slot.has_come:
            self.num_come += 1
        patience = self._passage.patience
        if not patience:
            self._pack_one(slot)
            return
        self._passage.note()
        self._put_off(slot, slot.factors.pack)
        if self._num_pending >= (patience if self.is_deferred is False else min(patience, _MOST_WAITING)):
            self._passage.pack(self)

    def _pack_one(self, slot: Slot) -> None:
        """``pack`` of one, which is called for every gradient of a step."""
        accumulates = slot.is_packed
        sums = grad_pack(
            (_let_go(slot),),
            (slot.view,),
            (slot.factors.pack,),
            accumulates=accumulates,
            with_statistics=self.is_watched,
        )
        slot.is_packed = True
        slot.sums = None if sums is None else sums[0]

    def _put_off(self, slot: Slot, factor: Tensor) -> None:
        self._pending.append(Waiting(slot, _let_go(slot), factor, accumulates=slot.has_come))
        self._num_pending += slot.view.numel()
        slot.is_pending = True

    def pack_pending(self) -> list[Tensor]:
        """Pack what waits; returns what was read, which has to live until it has been."""
        pending = self.hand_over()
        self._pack([waiting for waiting in pending if not waiting.accumulates])
        more = [waiting for waiting in pending if waiting.accumulates]
        while more:
            # in the order in which they came, and one of each slot at a time: a launch of a kernel knows no order
            first = {waiting.slot: waiting for waiting in reversed(more)}
            self._pack(list(first.values()), accumulates=True)
            more = [waiting for waiting in more if first[waiting.slot] is not waiting]
        return [waiting.gradient for waiting in pending]

    def _pack(self, members: Sequence[Waiting], *, accumulates: bool = False) -> None:
        if not members:
            return
        sums = grad_pack(
            [waiting.gradient for waiting in members],
            [waiting.slot.view for waiting in members],
            [waiting.factor for waiting in members],
            accumulates=accumulates,
            with_statistics=self.is_watched,
        )
        for index, waiting in enumerate(members):
            waiting.slot.sums = None if sums is None else sums[index]

    def hand_over(self) -> list[Waiting]:
        """What waits, for the caller to pack."""
        pending, self._pending, self._num_pending = self._pending, [], 0
        for waiting in pending:
            waiting.slot.is_pending, waiting.slot.is_packed = False, True
        return pending

    @property
    def waits_plainly(self) -> bool:
        """Whether all that waits is the first gradient of its place, and of its dtype."""
        return not any(w.accumulates or w.gradient.dtype != w.slot.view.dtype for w in self._pending)

    def fill_missing(self) -> None:
        """Have all that this rank gives to the sum packed or waiting, and zeros where there is nothing."""
        for slot in self.slots:
            if not slot.has_come:
                self.fill_missing_slot(slot)

    def fill_missing_slot(self, slot: Slot) -> None:
        """Make do with what is there of a slot for which nothing came."""
        if slot.parameter.grad is None:
            slot.view.zero_()
        else:
            # what was reduced before comes back as it was, up to rounding: the sum has that many equal terms
            self._put_off(slot, slot.factors.pack if slot.is_local else self.factors.share)

    def close(self) -> None:
        """Give every place its final content before the sum."""
        self.fill_missing()
        self._passage.pack(self)
        self._passage.catch_up()

    def launch(self) -> None:
        """Close and start the sum."""
        self.is_launched = True
        self._passage.start(self)

    def wait(self) -> None:
        """Wait for the sum; the views hold the reduced gradients afterwards."""
        self._passage.end(self)

    def rehearse(self) -> None:
        """Behind backward, when nothing is under way: make the next one ready."""
        self._passage.rehearse(self)

    def catch_up(self) -> None:
        """Have the caller see what was packed."""
        self._passage.catch_up()

    def release(self) -> None:
        """Let go of what must not outlive the process group."""
        self._passage.release()

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies that a recording reads and writes, but for the gradients themselves."""
        return self.flat.data_ptr(), self.wire.data_ptr(), *(slot.view.data_ptr() for slot in self.slots)

    def to_wire(self) -> None:
        """Cast what is packed for its way."""
        if self.wire is not self.flat:
            self.wire.copy_(self.flat)

    def from_wire(self) -> None:
        """Cast the sum back."""
        if self.wire is not self.flat:
            self.flat.copy_(self.wire)

    def add_late_parts(self) -> None:
        """Reduce what arrived after the launch and add it; every rank of the group must call this."""
        late = torch.zeros_like(self.flat)
        for slot, (first, end) in zip(self.slots, places_of(self.plan), strict=True):
            if slot.is_late:
                grad = slot.parameter.grad
                assert grad is not None, "a late gradient was lost"
                grad_pack([grad], [_view_like(late[first:end], slot.parameter)], [slot.factors.pack])
                slot.parameter.grad = None
        self.flat.add_(sum_over(late, self.group))


def _let_go(slot: Slot) -> Tensor:
    """The gradient of a slot, which its parameter no longer has: a second one will come apart."""
    grad = slot.parameter.grad
    assert grad is not None, "a hook fired without a gradient"
    slot.parameter.grad = None
    return grad


def _view_like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """``part`` in the shape of the parameter, with its strides where they fill memory without holes."""
    # preserved strides mean non-overlapping and dense
    if torch.empty_like(parameter, memory_format=torch.preserve_format).stride() == parameter.stride():
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
    return part.view(parameter.size())
