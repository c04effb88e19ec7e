"""The regions of one module while it trains: their boundaries, their factors, and whose parameters are whose."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_moeclip.gradients.boundary import Region, attach, forget_compiled
from lightning_moeclip.gradients.graph_check import find_leaks
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.gradients.region_scales import RegionScales
from lightning_moeclip.parallel.regions import resolve_regions
from lightning_moeclip.parallel.roles import Towers
from lightning_moeclip.parallel.rules import warn_on_first_rank

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
        self._module = module
        self._specs = specs
        self._chains = [tuple(regions[place] for place in (*chain, i)) for i, chain in enumerate(ancestors)]
        self._row: dict[int, tuple[int, nn.Parameter]] = {}
        self._is_checking, self._has_checked, self._has_updated = True, False, False
        self._find_parameters()

    def _find_parameters(self) -> None:
        """Whose parameters are whose; they are kept, so that no other gets the id of one."""
        # of nested regions the innermost one counts
        for index, spec in sorted(enumerate(self._specs), key=lambda item: len(item[1].ancestors)):
            self._row |= {id(p): (index, p) for boundary in spec.modules for p in boundary.parameters()}

    def divisors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the gradients of each parameter in a region have to be divided by: 0-d, changed in place.

        Asked for whenever a plan is made: parameters that have come into a region are looked for, and losses checked.
        """
        self._find_parameters()
        self._is_checking, self._has_checked, self._has_updated = True, False, False
        rows = {name: self.row_of(parameter) for name, parameter in parameters.items()}
        return {name: self.scales.totals[row - 1] for name, row in rows.items() if row}

    def row_of(self, parameter: nn.Parameter) -> int:
        """Row of ``scales`` for a parameter, or for the master that an optimizer steps in its place."""
        index, _ = self._row.get(id(model_parameter(parameter)), (-1, None))
        return index + 1

    def check(self, loss: Tensor) -> None:
        """Look at the graph of a loss of the first training step that updates anything for gradients past a boundary.

        Raises:
            RuntimeError: there is one.
        """
        if not self._is_checking:
            return
        self._has_checked = True
        owners = {key: self._chains[index] for key, (index, _) in self._row.items()}
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        leaks = find_leaks(loss, owners, names)
        if leaks:
            raise RuntimeError(
                "Gradients go past the boundaries of regions, whose loss scale would be wrong for them. "
                f"{' '.join(leaks)} Or name other regions=[...]."
            )

    def after_update(self) -> None:
        """After an update of the scales, of which a training step may have several."""
        self._has_updated = self._has_checked

    def begin_step(self) -> None:
        """Before a training step: losses are taken to be made as those of the first that updated anything."""
        if self._has_updated:
            self._is_checking = False

    def detach(self) -> None:
        """Remove the boundaries."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            forget_compiled()
        self._handles.clear()
