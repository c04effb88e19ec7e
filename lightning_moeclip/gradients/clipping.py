"""One total gradient norm over all ranks, every logical parameter counted once."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.collectives import sum_over
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.squares import sum_of_squares
from lightning_moeclip.parallel.mesh import Mesh
from lightning_moeclip.parallel.plan import SyncPlan

__all__ = ["GradientClipper", "has_gradients"]


class GradientClipper:
    """Norm and clip factor that are bit-identical on all ranks.

    Of the ranks that hold a replica one counts it, in turn, so that the work is shared and nothing is counted twice;
    slices of spread experts are counted where they lie. One number is reduced.
    """

    def __init__(self, plan: SyncPlan, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        self._group = mesh.gradient_groups["dp"]
        self._rank = mesh.rank
        self._counting_rank = {id(parameters[name]): rank for name, rank in plan.counting_ranks().items()}

    @torch.no_grad()
    def own_square(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """This rank's part of the squared norm of the gradients of ``parameters``: parts of all ranks add up to it.

        Returns:
            0-d, float64; non-finite when a gradient that this rank counts is.
        """
        members = list(parameters)
        # one that is no longer in the plan, frozen with a gradient left, is the same on all ranks
        counted = [p for p in members if self._counting_rank.get(id(model_parameter(p)), 0) == self._rank]
        device = members[0].device if members else torch.device("cpu")
        return sum_of_squares([p.grad for p in counted if p.grad is not None], device=device)

    @torch.no_grad()
    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """L2 norm of the reduced gradients of ``parameters`` over all ranks.

        Every rank must call this with the same logical parameters.

        Returns:
            0-d tensor, float64 for float64 gradients and float32 otherwise; non-finite when a gradient is.
        """
        members = list(parameters)
        square = self.own_square(members)[None]
        norm = sum_over(square, self._group).sqrt().squeeze(0)
        is_double = any(p.dtype is torch.float64 for p in members if p.grad is not None)
        return norm if is_double else norm.float()

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
        """Scale the gradients of ``parameters`` so that their total norm is at most ``max_norm``.

        Returns:
            The norm before clipping and the factor, 0-d each. The factor is that of
            ``torch.nn.utils.clip_grad_norm_``: min(1, max_norm / (norm + 1e-6)).
        """
        members = list(parameters)
        norm = self.total_norm(members)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in members:
            if parameter.grad is not None:
                by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
        for (dtype, device), grads in by_kind.items():
            # a factor rounded to 16 bits could leave the norm above its bound
            torch._foreach_mul_(grads, factor.to(device=device, dtype=torch.promote_types(dtype, torch.float32)))
        return norm, factor


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter of an optimizer has a gradient on this rank."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
