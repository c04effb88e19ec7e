"""Factors of regions: which region an overflow is blamed on, and how its factor falls and grows.

A region multiplies the cotangent that enters it at its outputs by its factor a and divides what leaves it at its
inputs, so that inside gradients are T = S a times the true ones (S the loss scale, a the product over the regions that
contain it). All factors are powers of two: nothing is rounded outside 16-bit under- and overflow.

Everything here is computed from sums over all ranks, on the device, without waiting for it.

* **Blame.** A region is to blame for a skipped step when the cotangent that came in was finite on every rank and a
  gradient of its parameters or the cotangent that went out was not on some rank. Of nested regions the innermost is. It
  halves its factor; the loss scale is halved only when no region is to blame, or when a factor cannot fall further.
* **Growth.** After ``growth_interval`` clean steps T is doubled. A region that overflowed at some T goes back there
  only after several times that interval, and doubles its patience each time that it overflows there again: spikes that
  come back cost fewer and fewer steps.
* **Underflow.** While more than 1 % of a region's gradients are exact zeros, and the last doubling brought some of them
  back, T is doubled after ten clean steps already, up to where it has overflowed. Zeros that doubling does not bring
  back, such as those of an expert without tokens, are left alone.
* A growth of the loss scale, or of a region around it, leaves T of a region where it was.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_moeclip.gradients.boundary import Region
from lightning_moeclip.gradients.report import LossScale

__all__ = ["BAD", "MODEL", "NUM_FIELDS", "NUM_ZEROS", "SIZE", "RegionScales"]

MODEL = "model"  # what is in no region

# columns of the table that ranks sum: gradients that are not finite, zeros among how many, and a region's events
BAD, NUM_ZEROS, SIZE, INCOMING, INSIDE, NUM_CROSSINGS, NUM_FIELDS = range(7)

_UNDERFLOW_FLOOR = 0.01
_EARLY_INTERVAL = 10
_COUNT_EVERY_N_STEPS = 10
_FIRST_PATIENCE, _LONGEST_PATIENCE = 4.0, 1024.0
_LIMIT = 2.0**24  # of a factor and of its inverse: as far apart as the smallest and the largest of float16
_STATE = ("factor", "tracker", "limit", "patience", "nonzero", "num_overflows", "underflow")


class RegionScales:
    """The factors of all regions of a module, and what is known of each; row 0 stands for the rest of the model.

    Attributes:
        regions: in the order of rows 1, 2, ...
        totals: [R] 0-d tensors, the product of a region's factor and those around it, changed in place.
        num_steps: updates so far, the same on all ranks.
    """

    def __init__(
        self,
        regions: Sequence[Region] = (),
        *,
        ancestors: Sequence[Sequence[int]] | None = None,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start with factors of 1.

        Args:
            regions: the boundaries, without the rest of the model.
            ancestors: for each region the places in ``regions`` of those that contain it, outermost first; None when
                none contains another.
            growth_interval: clean steps between two doublings.
            device: of the gradients.
        """
        self.regions = tuple(regions)
        self.growth_interval = growth_interval
        number = len(self.regions)
        self._ancestors = tuple(map(tuple, ancestors)) if ancestors is not None else ((),) * number
        self._outermost_first = sorted(range(number), key=lambda index: len(self._ancestors[index]))
        contains = torch.zeros(number, number)
        for inner, outers in enumerate(self._ancestors):
            for outer in outers:
                contains[outer, inner] = 1.0
        self._contains = contains.to(device)
        # the loss scale, at 0, is the parent of a region that no other contains
        self._parent = torch.tensor([outers[-1] + 1 if outers else 0 for outers in self._ancestors], device=device)
        self.totals = [torch.ones((), device=device) for _ in self.regions]
        self.num_steps = 0
        self._is_checked = not self.regions

        def per_region(value: float, rows: int = number) -> Tensor:
            return torch.full((rows,), value, dtype=torch.float32, device=device)

        self.factor, self.tracker = per_region(1.0), per_region(0.0)
        self.limit, self.patience = per_region(torch.inf), per_region(_FIRST_PATIENCE)
        self.nonzero = per_region(0.0)  # share of gradients that are not zero, when T was last doubled
        self.num_overflows, self.underflow = per_region(0.0, number + 1), per_region(torch.nan, number + 1)

    @property
    def names(self) -> list[str]:
        """Names of the regions, without the rest of the model."""
        return [region.name for region in self.regions]

    @property
    def is_counting(self) -> bool:
        """Whether zeros are counted in this step, which reads all gradients once more."""
        return self.num_steps % _COUNT_EVERY_N_STEPS == 0 or not self._is_checked

    def add_events(self, table: Tensor) -> None:
        """Put what the boundaries saw since the last update into this rank's table.

        Args:
            table: [1 + R, NUM_FIELDS].
        """
        if self.regions:
            table[1:, INCOMING : NUM_CROSSINGS + 1] = torch.stack([region.events for region in self.regions])

    @torch.no_grad()
    def update(self, table: Tensor, *, scale: Tensor, growth: Tensor) -> Tensor:
        """Judge a step and change the factors.

        Args:
            table: [1 + R, NUM_FIELDS], summed over all ranks and backwards of the step.
            scale: 0-d, S that the step was taken with.
            growth: 0-d, what S would be multiplied by if no region were to blame: 2, 1 or 1/2.

        Returns:
            0-d, whether a region is to blame: S stays as it is.

        Raises:
            RuntimeError: in the first step, on every rank: a region's parameters have gradients, and nothing has passed
                its boundary.
        """
        if not self._is_checked:
            self._check_crossings(table)
        overflowed = table[:, BAD].sum() > 0
        blamed = self._blamed(table) & overflowed
        is_blamed = blamed.any()
        self.num_steps += 1
        self.num_overflows += torch.cat([(overflowed & ~is_blamed).unsqueeze(0), blamed])
        is_counted = table[:, SIZE] > 0
        shares = (table[:, NUM_ZEROS] / table[:, SIZE]).float()
        self.underflow.copy_(torch.where(is_counted, shares, self.underflow))
        if self.regions:
            self._change(blamed, ~overflowed, is_counted[1:], scale=scale, growth=growth)
            self._write()
            self.forget_events()
        return is_blamed

    def forget_events(self) -> None:
        """Let go of what the boundaries saw since the last update."""
        for region in self.regions:
            region.events.zero_()

    def _check_crossings(self, table: Tensor) -> None:
        """The one place that waits for the device, once in a run."""
        self._is_checked = True
        for region, row in zip(self.regions, table[1:].tolist(), strict=True):
            if row[SIZE] > row[NUM_ZEROS] and row[NUM_CROSSINGS] == 0:
                raise RuntimeError(
                    f"Parameters of the region {region.name!r} have gradients, but no forward of the module was seen: "
                    "its weights are used by another function, so its loss scale would divide what it never "
                    f"multiplied. Call the module itself, or leave {region.name!r} out of regions=[...]."
                )

    def _blamed(self, table: Tensor) -> Tensor:
        went_wrong = (table[1:, BAD] > 0) | (table[1:, INSIDE] > 0)
        candidates = went_wrong & (table[1:, INCOMING] == 0) & (self.factor > 1 / _LIMIT)
        return candidates & ((self._contains @ candidates.float()) == 0)

    def _change(self, blamed: Tensor, is_clean: Tensor, is_counted: Tensor, *, scale: Tensor, growth: Tensor) -> None:
        total = torch.stack(self.totals) * scale
        self.patience.copy_(
            torch.where(blamed & (total >= self.limit), (2 * self.patience).clamp(max=_LONGEST_PATIENCE), self.patience)
        )
        self.limit.copy_(torch.where(blamed, total, self.limit))
        self.tracker += is_clean
        nonzero = (1 - self.underflow[1:]).nan_to_num(0.0)  # not counted yet
        is_below_limit = 2 * total < self.limit
        wait = self.growth_interval * torch.where(is_below_limit, 1.0, self.patience)
        helped = (nonzero > 1.01 * self.nonzero) | (nonzero == 0)
        is_early = is_counted & is_below_limit & helped
        is_early &= (self.underflow[1:] > _UNDERFLOW_FLOOR) & (self.tracker >= _EARLY_INTERVAL)
        grows = is_clean & (is_early | (self.tracker >= wait)) & (2 * self.factor <= _LIMIT)
        self.nonzero.copy_(torch.where(grows, nonzero, self.nonzero))
        self.tracker.masked_fill_(grows | blamed, 0.0)
        own = torch.where(grows, 2.0, 1.0)
        around = torch.cat([growth.clamp(min=1.0).unsqueeze(0).float(), own])
        change = torch.where(blamed, 0.5, own / around[self._parent])
        self.factor.copy_((self.factor * change).clamp(1 / _LIMIT, _LIMIT))

    def _write(self) -> None:
        """Give the boundaries and the reducer their factors."""
        for index in self._outermost_first:
            factor, outers = self.factor[index], self._ancestors[index]
            self.regions[index].scale.copy_(factor)
            self.totals[index].copy_(factor * self.totals[outers[-1]] if outers else factor)

    def report(self, scale: Tensor) -> dict[str, LossScale]:
        """Scale and rates of the rest of the model, under ``MODEL``, and of every region.

        Args:
            scale: 0-d, S.
        """
        overflow = self.num_overflows / max(self.num_steps, 1)
        scales = [scale.clone(), *(scale * total for total in self.totals)]
        rows = zip([MODEL, *self.names], scales, overflow.unbind(), self.underflow.clone().unbind(), strict=True)
        return {name: LossScale(*values) for name, *values in rows}

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that changes, by name."""
        return {
            "names": self.names,
            "num_steps": self.num_steps,
            **{name: getattr(self, name).clone() for name in _STATE},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over a state by the names of its regions; one that it does not know starts anew.

        Args:
            state: of ``state_dict``; None, as a stock plugin saves, starts all anew.
        """
        blank = RegionScales(self.regions, ancestors=self._ancestors, device=self.factor.device)
        state = blank.state_dict() if state is None else state
        self.num_steps = state["num_steps"]
        rows = {name: row for row, name in enumerate(state["names"])}
        for name in _STATE:
            own, saved = getattr(self, name), state[name]
            own.copy_(getattr(blank, name))
            shift = len(own) - len(self.regions)  # 1 where row 0 is the rest of the model
            own[:shift].copy_(saved[:shift])
            for index, region in enumerate(self.regions):
                if region.name in rows:
                    own[shift + index] = saved[shift + rows[region.name]].to(own.device)
        self.forget_events()
        self._write()
