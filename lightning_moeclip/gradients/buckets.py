"""Flat gradient buffers that ``.grad`` views.

A gradient that autograd hands over fresh is divided and packed into its place in one pass, and the fresh tensor is
freed at once: after backward there is one copy of the gradients, in the buckets.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moeclip.gradients.collectives import start_sum, sum_over
from lightning_moeclip.parallel.plan import BucketPlan, PlannedParameter

__all__ = ["Bucket", "Slot"]


class ScaleFactors:
    """Factors of gradients that carry a scale of their own, which its owner changes between two steps.

    Everything stays on the device of the scale: nothing is read on the host.
    """

    def __init__(self, scale: Tensor, bucket: "Bucket") -> None:
        self._scale = scale
        self._bucket = bucket
        self._version = -1
        self._factors = (scale, scale)

    @property
    def pack(self) -> Tensor:
        """What each gradient is multiplied by: 1/(W a), 0-d."""
        return self._current()[0]

    @property
    def reopen(self) -> Tensor:
        """What a reduced gradient is multiplied by before another is added to it: W a / R, 0-d."""
        return self._current()[1]

    def _current(self) -> tuple[Tensor, Tensor]:
        if self._version != self._scale._version:
            self._version = self._scale._version
            # from the rounded 1/W, so that a power of two changes no bit of a gradient
            pack = self._bucket.factor_0d / self._scale.detach()
            self._factors = (pack, 1.0 / (pack * self._bucket.num_replicas))
        return self._factors


class Slot:
    """Place of one parameter in a bucket, and what it holds in the current backward.

    Attributes:
        view: part of the bucket's flat buffer, in the shape and strides of the parameter.
        num_fired: gradients that arrived since the last reduction.
        is_packed: the view holds this rank's divided gradient.
        is_late: a gradient arrived after the bucket was launched, and waits in ``.grad``.
        is_silent: all that arrived are the zeros of a stand-in for a missing loss, as good as nothing.
        factors: of a gradient that carries a scale of its own; None divides by the size of the world alone.
        is_local: ``.grad`` is a sum of this rank alone, made while paused. Any other gradient that is there before a
            backward is equal on all replicas: the result of an earlier reduction, or what the user made of it.
    """

    __slots__ = (
        "bucket", "factors", "is_late", "is_local", "is_packed", "is_silent", "num_fired", "parameter", "planned",
        "view",
    )  # fmt: skip

    def __init__(
        self,
        planned: PlannedParameter,
        parameter: nn.Parameter,
        bucket: "Bucket",
        view: Tensor,
        factors: ScaleFactors | None,
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
        self.is_packed = False
        self.is_late = False
        self.is_silent = False

    @property
    def is_present(self) -> bool:
        """Whether this rank has a gradient to give."""
        return self.is_packed and not self.is_silent

    def keep(self) -> None:
        """Add to this rank's undivided sum, without communication: ``.grad`` becomes the view."""
        grad = self.parameter.grad
        if grad is not self.view:
            # .grad was None or foreign before, so what autograd left is the whole sum
            assert grad is not None, "a hook fired without a gradient"
            self.view.copy_(grad.detach())
            self.parameter.grad = self.view
        self.is_local = True

    def pack(self) -> None:
        """Divide what autograd left into the view, and free it."""
        grad = self.parameter.grad
        assert grad is not None, "a hook fired without a gradient"
        factor = self.bucket.factor
        if self.factors is not None:
            self._pack_scaled(grad.detach(), self.factors.pack)
        elif self.is_packed:  # fired before in this backward, for another use of the parameter
            self.view.add_(grad.detach(), alpha=factor)
        elif grad is self.view:
            self.view.mul_(factor)
        else:
            torch.mul(grad.detach(), self.bucket.factor_0d, out=self.view)
        self.parameter.grad = None
        self.is_packed = True

    def _pack_scaled(self, grad: Tensor, factor: Tensor) -> None:
        # CUDA kernels would round a 0-d factor to the 16 bits of the gradient first
        wide = grad.to(factor.dtype)
        if self.is_packed:
            self.view.add_(wide * factor)
        else:
            torch.mul(wide, factor, out=self.view)

    def close(self) -> bool:
        """Give the view its final content before the launch; returns whether there is a gradient at all."""
        if self.is_packed:
            return True
        grad = self.parameter.grad
        if grad is None:
            self.view.zero_()
            return False
        if self.is_local:
            self.pack()
        else:
            # comes back as it was, up to rounding: the sum has that many equal terms
            torch.mul(grad.detach(), 1.0 / self.bucket.num_replicas, out=self.view)
            self.parameter.grad = None
            self.is_packed = True
        return True

    def reopen(self) -> None:
        """Before another gradient is added to a reduced one: undo the divisions that packing will repeat.

        Reducing again takes 1/(W a) of the sum over R replicas, where a is the scale of the gradient itself, so the
        reduced part has to enter as W a / R of itself.
        """
        grad = self.parameter.grad
        if grad is None or self.is_local or self.bucket.is_launched:
            return
        factor = 1.0 / (self.bucket.factor * self.bucket.num_replicas) if self.factors is None else self.factors.reopen
        if grad is self.view:
            self.view.mul_(factor)
        else:
            self.parameter.grad = grad.detach() * factor  # a tensor of the user's stays as it is


class Bucket:
    """Gradients that are reduced in one collective.

    Attributes:
        slots: places in the flat buffer, in the order in which gradients are expected.
        factor: what each gradient is multiplied by when packed: 1/W.
        factor_0d: the same as a 0-d tensor on the CPU, with which a product into a small tensor takes half the time.
        num_replicas: ranks that sum this bucket.
        is_deferred: launched when backward ends: some gradient may not come, or come twice. None until one
            backward was seen.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        *,
        divisor: int,
        num_replicas: int,
        group: dist.ProcessGroup | None,
        wire_dtype: torch.dtype | None = None,
        divisors: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self.factor = 1.0 / divisor
        # in the precision that a Python number would be taken in: 16-bit gradients are multiplied in float32
        self.factor_0d = torch.tensor(self.factor, dtype=torch.promote_types(plan.dtype, torch.float32).to_real())
        self.num_replicas = num_replicas
        self.group = group
        self.is_deferred: bool | None = None
        self.num_packed = 0
        self.is_launched = False
        self._work: dist.Work | None = None
        members = [(planned, parameters[planned.name]) for planned in plan.parameters]
        self.flat = torch.zeros(sum(p.numel() for _, p in members), dtype=plan.dtype, device=plan.device)
        self._wire = None if wire_dtype in (None, plan.dtype) else torch.empty_like(self.flat, dtype=wire_dtype)
        parts = self.flat.split([p.numel() for _, p in members])
        factors = {id(scale): ScaleFactors(scale, self) for scale in divisors.values()}
        self.slots = []
        for (planned, parameter), part in zip(members, parts, strict=True):
            scale = divisors.get(planned.name)
            own = None if scale is None else factors[id(scale)]
            self.slots.append(Slot(planned, parameter, self, _view_like(part, parameter), own))

    @property
    def num_bytes(self) -> int:
        """Size of the flat buffer."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def is_full(self) -> bool:
        """Whether every gradient has come."""
        return self.num_packed == len(self.slots)

    def reset(self) -> None:
        """Make ready for the next backward."""
        self.num_packed = 0
        self.is_launched = False
        for slot in self.slots:
            slot.reset()

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed."""
        return self.flat.dtype if self._wire is None else self._wire.dtype

    def close(self) -> None:
        """Fill what is missing with zeros."""
        for slot in self.slots:
            slot.close()

    def launch(self) -> None:
        """Close and start the sum."""
        self.close()
        self.is_launched = True
        if self._wire is not None:
            self._wire.copy_(self.flat)
        self._work = start_sum(self.flat if self._wire is None else self._wire, self.group)

    def wait(self) -> None:
        """Wait for the sum; the views hold the reduced gradients afterwards."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._wire is not None:
            self.flat.copy_(self._wire)

    def add_late_parts(self) -> None:
        """Reduce what arrived after the launch and add it; every rank of the group must call this."""
        late = torch.zeros_like(self.flat)
        parts = late.split([slot.view.numel() for slot in self.slots])
        for slot, part in zip(self.slots, parts, strict=True):
            if slot.is_late:
                grad = slot.parameter.grad
                assert grad is not None, "a late gradient was lost"
                factor = self.factor if slot.factors is None else slot.factors.pack
                torch.mul(grad.detach(), factor, out=_view_like(part, slot.parameter))
                slot.parameter.grad = None
        self.flat.add_(sum_over(late, self.group))


def _view_like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """``part`` in the shape of the parameter, with its strides where they fill memory without holes."""
    # preserved strides mean non-overlapping and dense
    if torch.empty_like(parameter, memory_format=torch.preserve_format).stride() == parameter.stride():
        return part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
    return part.view(parameter.size())
