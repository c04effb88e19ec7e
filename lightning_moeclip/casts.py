"""Casts and contexts of a precision, which are Lightning's own."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_moeclip.binding import HalfPrecision, MixedPrecision, Precision

__all__ = ["CastingPrecision"]


class CastingPrecision(Precision):
    """Wraps the plugin that Lightning makes for a precision string, for all but the decisions of a step."""

    def _wrap_casts(self, inner: Precision, *, keeps_originals: bool, is_auto: bool) -> None:
        self._inner = inner
        self._is_auto = is_auto
        self.precision = inner.precision
        self._keeps_originals = keeps_originals
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}  # beside their parameters, whose ids nobody else gets

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the module as Lightning does; in half precision 0-d tensors, such as a temperature, keep their dtype.

        A 0-d float32 tensor does not widen the 16-bit ones that it is multiplied with, and in 16 bits it would move in
        steps too coarse to learn.
        """
        if not isinstance(self._inner, HalfPrecision):
            return self._inner.convert_module(module)
        is_kept = self._keeps_originals
        before = [(p, p.data) for p in module.parameters() if p.ndim == 0 or (is_kept and p.requires_grad)]
        # a cast changes parameters in place, and puts new tensors in the place of buffers
        scalars = [
            (layer, name, buffer)
            for layer in module.modules()
            for name, buffer in layer.named_buffers(recurse=False)
            if buffer.ndim == 0
        ]
        converted = self._inner.convert_module(module)
        for parameter, original in before:
            if parameter.ndim == 0:
                parameter.data = original
        for layer, name, buffer in scalars:
            setattr(layer, name, buffer)
        if is_kept:
            self._originals |= {id(p): (p, data) for p, data in before if p.dtype != data.dtype}
        return converted

    def take_originals(self) -> dict[int, Tensor]:
        """Values of parameters before the cast to 16 bits, by id; they are handed over, and kept until then."""
        originals = {key: data for key, (_, data) in self._originals.items()}
        self._originals = {}
        return originals

    def use_device(self, device: torch.device) -> None:
        """Cast for the device of the run, where "auto" was to find it."""
        if self._is_auto and isinstance(self._inner, MixedPrecision):
            self._inner.device = device.type

    def convert_parameter(self, parameter: Tensor) -> None:
        """Give a parameter that no module holds the dtype of those that one does, in place.

        A 0-d one, such as a temperature, keeps its dtype in half precision.
        """
        if parameter.ndim == 0 and isinstance(self._inner, HalfPrecision):
            return
        holder = nn.Module()
        holder.value = nn.Parameter(parameter.data, requires_grad=False)
        parameter.data = self._inner.convert_module(holder).value.data

    @override
    def convert_input(self, data: Any) -> Any:
        return self._inner.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._inner.convert_output(data)

    @override
    def tensor_init_context(self) -> Any:
        return self._inner.tensor_init_context()

    @override
    def module_init_context(self) -> Any:
        return self._inner.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with self._inner.forward_context():
            yield

    @override
    def teardown(self) -> None:
        self._inner.teardown()
