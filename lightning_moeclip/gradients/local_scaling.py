"""The regions of one module while it trains: their boundaries, their factors, and whose parameters are whose."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.boundary import Region, attach, forget_compiled
from lightning_moeclip.gradients.graph_check import find_leaks
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.region_scales import RegionScales
from lightning_moeclip.parallel.checks import warn_on_first_rank
from lightning_moeclip.parallel.regions import resolve_regions
from lightning_moeclip.parallel.roles import Towers

__all__ = ["LocalScaling"]


class LocalScaling:
    """Boundaries around the regions of a module; ``detach`` takes them away again.

    Attributes:
        scales: factors of the regions.
    """

    def __init__(
        self,
        module: nn.Module,
        paths: Sequence[str] | None,
        *,
        towers: Towers | None = None,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        """Attach the boundaries, which must be there before a compiled module is first called.

        Args:
            module: the user's module.
            paths: module paths of the regions; None takes projection heads and experts.
            towers: module paths by tower, which tell a projection head.
            growth_interval: clean steps between two doublings of a factor.
            device: of the module.

        Raises:
            ValueError: the regions cannot be bounded, see ``resolve_regions``.
        """
        specs = resolve_regions(module, paths, towers=towers)
        if not specs:
            warn_on_first_rank(
                "loss_scaling='local' found no projection head and no experts, so one scale serves the whole model. "
                "Name the modules that shall have their own: MoEClipPrecision(..., regions=['image.head'])."
            )
        places = {spec.name: index for index, spec in enumerate(specs)}
        regions = [Region(spec.name, device=device) for spec in specs]
        ancestors = [[places[name] for name in spec.ancestors] for spec in specs]
        self.scales = RegionScales(regions, ancestors=ancestors, growth_interval=growth_interval, device=device)
        self._handles = [
            handle for spec, region in zip(specs, regions, strict=True) for handle in attach(spec.modules, region)
        ]
        # of nested regions the innermost one
        self._row: dict[int, int] = {}
        for index, spec in sorted(enumerate(specs), key=lambda item: len(item[1].ancestors)):
            self._row |= dict.fromkeys(spec.parameters, index)
        self._chains = [tuple(regions[place] for place in (*chain, i)) for i, chain in enumerate(ancestors)]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._is_checked = False

    def divisors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the gradients of each parameter in a region have to be divided by: 0-d, changed in place."""
        return {name: self.scales.totals[self._row[id(p)]] for name, p in parameters.items() if id(p) in self._row}

    def row_of(self, parameter: nn.Parameter) -> int:
        """Row of ``scales`` for a parameter, or for the master that an optimizer steps in its place."""
        return self._row.get(id(model_parameter(parameter)), -1) + 1

    def check(self, loss: Tensor) -> None:
        """Look once at the graph of a loss for gradients that pass by a boundary.

        Raises:
            RuntimeError: there is one.
        """
        if self._is_checked:
            return
        self._is_checked = True
        owners = {parameter: self._chains[row] for parameter, row in self._row.items()}
        leaks = find_leaks(loss, owners, self._names)
        if leaks:
            raise RuntimeError(
                "Gradients go past the boundaries of regions, whose loss scale would be wrong for them. "
                f"{' '.join(leaks)} Or name other regions=[...]."
            )

    def detach(self) -> None:
        """Remove the boundaries."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            forget_compiled()
        self._handles.clear()
