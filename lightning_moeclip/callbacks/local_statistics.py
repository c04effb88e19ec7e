"""Gradient sums of this rank alone, for strategies that keep none.

In a step that is watched, hooks read each gradient as it is accumulated, before the strategy reduces it: this file
reads on the host during backward. In all other steps there are no hooks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.report import GradSums, LayerKey
from lightning_moeclip.gradients.statistics import keys_of, sums_of

__all__ = ["LocalStatistics"]


class LocalStatistics:
    """Sums over ``.grad`` as it stood when a parameter's hook last fired in a step.

    By then it holds all micro-batches of this rank, and all uses of a recomputed or shared module, whose hook fires
    several times: the last reading replaces those before. Where gradients were reduced earlier in the same step, as by
    torch's DDP in manual optimization without ``no_sync``, they are in it as the reduction left them. With sharded
    parameters it holds this rank's shard.
    """

    def __init__(self) -> None:
        self._key_of: dict[int, LayerKey] = {}
        self._sums: dict[int, GradSums] = {}
        self._handles: list[RemovableHandle] = []

    def listen(self, module: nn.Module, *, is_new_step: bool) -> None:
        """Read the gradients of the coming backwards.

        Args:
            module: the user's.
            is_new_step: not a further micro-batch of the step at hand.
        """
        self.stop()
        if is_new_step:
            keys = keys_of(module)
            self._key_of = {id(p): keys[name] for name, p in module.named_parameters() if p.requires_grad}
            self._sums = {}
        for parameter in module.parameters():
            if id(parameter) in self._key_of and parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._read))

    def stop(self) -> None:
        """Read no more; what was read stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(self, optimizer: Optimizer, *, loss_scale: float) -> list[tuple[Sequence[LayerKey], GradSums]]:
        """Rows of the parameters of an optimizer, one entry for each; size 0 where nothing was accumulated.

        Args:
            optimizer: about to step.
            loss_scale: by which the loss was multiplied; divided out.
        """
        held = [id(model_parameter(p)) for group in optimizer.param_groups for p in group["params"]]
        parts: list[tuple[Sequence[LayerKey], GradSums]] = []
        for parameter in held:
            if parameter in self._key_of:
                key = self._key_of[parameter]
                sums = self._sums.pop(parameter, None)
                parts.append(
                    ((key,), sums_of([(key, torch.empty(0))])[1] if sums is None else _scaled(sums, loss_scale))
                )
        return parts

    def _read(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if hasattr(gradient, "to_local"):  # a DTensor
            gradient = gradient.to_local()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        self._sums[id(parameter)] = sums_of([(self._key_of[id(parameter)], gradient)])[1]


def _scaled(sums: GradSums, loss_scale: float) -> GradSums:
    return replace(
        sums,
        total=sums.total / loss_scale,
        square=sums.square / loss_scale**2,
        absolute=sums.absolute / loss_scale,
        maximum=sums.maximum / loss_scale,
    )
