"""Lists of experts that another library has shared out: between a rank's own, numbered from 0, and all of the layer.

The whole of a list is what a model built with ``ep_size=1`` has: every expert under its own number. One process can
load it, and any number of ranks takes its part.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.parallel.interop import ExpertList, expert_lists

__all__ = ["RankExperts"]

Gather = Callable[[Tensor], Sequence[Tensor]]
GatherObjects = Callable[[Any], Sequence[Any]]


class RankExperts:
    """The way between a rank's own lists and whole ones.

    What makes whole is a collective: every rank calls it at the same point, and what it sends depends on no rank's own
    data.

    Args:
        rank: place of this rank among those that share the experts out.
        gather: tensors of all these ranks by rank, of one shape and dtype; a collective.
        gather_objects: picklable values of all these ranks by rank; a collective.
    """

    def __init__(self, rank: int, gather: Gather, gather_objects: GatherObjects) -> None:
        self._rank = rank
        self._gather = gather
        self._gather_objects = gather_objects
        self._list_of: dict[int, ExpertList] = {}  # by id of the parameter

    def learn(self, root: nn.Module) -> list[ExpertList]:
        """Remember which parameters of ``root`` are in which list; returns the lists."""
        lists = expert_lists(root)
        for name, parameter in root.named_parameters():
            self._list_of |= {id(parameter): experts for experts in lists if experts.holds(name)}
        return lists

    def whole_model_state(self, state: Mapping[str, Any], root: nn.Module) -> dict[str, Any]:
        """``state`` of ``root`` with every expert under its own number; lists that are whole already are left alone."""
        whole = dict(state)
        for experts in expert_lists(root):
            members = _members(whole, experts)
            if members and max(members) < experts.num_local:
                whole = self._widen(whole, experts)
        return whole

    def _widen(self, state: Mapping[str, Any], experts: ExpertList) -> dict[str, Any]:
        held = {name: value for name, value in state.items() if experts.holds(name)}
        by_rank: dict[str, Sequence[Any]] = {}
        for name, value in held.items():
            by_rank[name] = self._gather(value) if isinstance(value, Tensor) else self._gather_objects(value)
        everyone = {
            _renumbered(name, experts, rank * experts.num_local): by_rank[name][rank]
            for rank in range(experts.size)
            for name in held
        }
        whole: dict[str, Any] = {}
        for name, value in state.items():  # a state dict is in the order of the module
            whole |= everyone if name in held else {name: value}
        return whole

    def own_model_state(self, state: Mapping[str, Any], root: nn.Module) -> dict[str, Any]:
        """This rank's part of a ``state`` with whole lists, numbered from 0.

        Raises:
            ValueError: there are some of the experts of a list and not all of them.
        """
        own = dict(state)
        for experts in expert_lists(root):
            members = _members(own, experts)
            first, total = self._rank * experts.num_local, experts.num_local * experts.size
            if members and members != set(range(total)):
                raise ValueError(
                    f"The state has {len(members)} experts of {experts.path} and the layer has {total} on "
                    f"{experts.size} ranks: it may be that of one rank, as a run leaves that failed and could not ask "
                    "the others. Load a checkpoint with all of them."
                )
            mine = {
                name: _renumbered(name, experts, -first)
                for name in own
                if experts.holds(name) and first <= _index(name, experts) < first + experts.num_local
            }
            own = {mine.get(name, name): v for name, v in own.items() if name in mine or not experts.holds(name)}
        return own

    def whole_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """State dict of ``optimizer`` with the moments of all experts, in the order of a module that has them all."""
        if not self._concerns(optimizer):
            return dict(state)
        numbered = _Numbered(state)
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            moments: list[Any] = []
            for experts, run in self._runs(group["params"], saved["params"]):
                held = [state["state"].get(place) for place in run]
                moments += held if experts is None else chain.from_iterable(self._moments_by_rank(held))
            numbered.add(saved, moments)
        return numbered.state

    def own_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """State dict of ``optimizer`` with this rank's part of one with the moments of all experts.

        Raises:
            ValueError: a group has another number of parameters than this optimizer with all experts.
        """
        if not self._concerns(optimizer):
            return dict(state)
        numbered = _Numbered(state)
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            runs = self._runs(group["params"], range(len(group["params"])))
            wanted = sum(len(run) * (1 if experts is None else experts.size) for experts, run in runs)
            if len(saved["params"]) != wanted:
                raise ValueError(
                    f"The saved group {index} has {len(saved['params'])} parameters, and this optimizer's has {wanted} "
                    "with the experts of all ranks. Make the optimizer of the same parameters as in the run that saved."
                )
            places = iter(saved["params"])
            own: list[int] = []
            for experts, run in runs:
                parts = [list(islice(places, len(run))) for _ in range(1 if experts is None else experts.size)]
                own += parts[0 if experts is None else self._rank]
            numbered.add(saved, [state["state"].get(place) for place in own])
        return numbered.state

    def _concerns(self, optimizer: Optimizer) -> bool:
        held = (p for group in optimizer.param_groups for p in group["params"])
        return any(id(model_parameter(p)) in self._list_of for p in held)

    def _runs(
        self, parameters: Sequence[nn.Parameter], places: Sequence[int]
    ) -> list[tuple[ExpertList | None, list[int]]]:
        """Places one after the other whose parameters are in one list, or in none."""
        runs: list[tuple[ExpertList | None, list[int]]] = []
        for parameter, place in zip(parameters, places, strict=True):
            experts = self._list_of.get(id(model_parameter(parameter)))
            if runs and runs[-1][0] is experts:
                runs[-1][1].append(place)
            else:
                runs.append((experts, [place]))
        return runs

    def _moments_by_rank(self, held: list[dict[str, Any] | None]) -> list[list[dict[str, Any] | None]]:
        """Moments of the same parameters on each rank; an expert that was idle so far has none."""
        told = self._gather_objects([None if value is None else _told(value) for value in held])
        by_rank: list[list[Any]] = [[None if v is None else dict(v) for v in of_rank] for of_rank in told]
        for place, value in enumerate(held):
            blanks = {
                key: blank
                for of_rank in told
                if of_rank[place] is not None
                for key, blank in of_rank[place].items()
                if isinstance(blank, _Blank)
            }
            for key, blank in sorted(blanks.items()):
                part = (value or {}).get(key)
                parts = self._gather(part if isinstance(part, Tensor) else blank.zeros())
                for rank, whole in enumerate(parts):
                    if by_rank[rank][place] is not None:
                        by_rank[rank][place][key] = whole
        return by_rank


class _Numbered:
    """A state dict of an optimizer whose parameters are numbered anew, one after the other."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state: dict[str, Any] = {**state, "state": {}, "param_groups": []}
        self._number = 0

    def add(self, saved: Mapping[str, Any], moments: Sequence[Any]) -> None:
        """Append a group with the options of ``saved``; None for a parameter without state."""
        places = range(self._number, self._number + len(moments))
        self.state["param_groups"].append({**saved, "params": list(places)})
        self.state["state"] |= {place: value for place, value in zip(places, moments, strict=True) if value is not None}
        self._number += len(moments)


class _Blank:
    """Stands for a tensor that travels by itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _told(moments: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of an optimizer's state with blanks for its tensors, but for numbers such as a step count."""
    tensors = {k: _Blank(v) if v.ndim > 0 else v.detach().cpu() for k, v in moments.items() if isinstance(v, Tensor)}
    return {**moments, **tensors}


def _index(name: str, experts: ExpertList) -> int:
    return int(name[len(experts.path) + 1 :].partition(".")[0])


def _members(state: Mapping[str, Any], experts: ExpertList) -> set[int]:
    return {_index(name, experts) for name in state if experts.holds(name)}


def _renumbered(name: str, experts: ExpertList, offset: int) -> str:
    _, dot, rest = name[len(experts.path) + 1 :].partition(".")
    return f"{experts.path}.{_index(name, experts) + offset}{dot}{rest}"
