"""A user's module made ready for ``verify``: float64, without dropout and its own callbacks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_moeclip.binding import LightningModule, pl
from lightning_moeclip.diagnosis.held_outside import held_outside
from lightning_moeclip.diagnosis.verify_job import silence_dropout
from lightning_moeclip.parallel.roles import read_roles

__all__ = ["Preparation"]

_MAKERS = ("setup", "configure_model")  # hooks that may make layers, in the order in which Lightning calls them


class Preparation:
    """Prepares a module now, and again behind each hook of it that may make layers.

    Args:
        module: of the user; its hooks are replaced on the instance.
        seed: of the random numbers of a hook that makes layers. Strategies seed before it and one process does not, so
            that without this it would make other weights.
        notes_gaps: note how near two logits of a router come to each other.

    Attributes:
        silenced: paths of the modules whose dropout was set to zero.
        gaps: smallest difference of two router logits of one token, over the largest logit, by router.
    """

    def __init__(self, module: Any, seed: int, *, notes_gaps: bool) -> None:
        self.silenced: tuple[str, ...] = ()
        self.gaps: dict[str, float] = {}
        self._module, self._seed, self._notes_gaps = module, seed, notes_gaps
        self._left_out: tuple[str, ...] = ()
        self._watched: set[str] = set()
        for hook in _MAKERS:
            if getattr(type(module), hook) is not getattr(LightningModule, hook):
                setattr(module, hook, partial(self._make_layers, getattr(module, hook)))
        module.configure_optimizers = partial(self._make_optimizers, module.configure_optimizers)
        if type(module).configure_callbacks is not LightningModule.configure_callbacks:
            module.configure_callbacks = partial(self._leave_out, module.configure_callbacks)
        self._prepare()

    def notes(self, trainer: Any) -> tuple[str, ...]:
        """What was left out, as sentences."""
        notes = []
        if self._left_out:
            notes.append(f"callbacks of configure_callbacks() are left out: {', '.join(self._left_out)}")
        # callback_metrics could tell whether it is there, and computes it with collectives to do so
        for monitor in sorted({str(c.monitor) for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}):
            notes.append(f"no validation is run: ReduceLROnPlateau is stepped only where training logs {monitor}")
        return tuple(notes)

    def _prepare(self) -> None:
        self.silenced = tuple(dict.fromkeys((*self.silenced, *silence_dropout(self._module))))
        self._module.double()
        if self._notes_gaps:
            self._watch_routers()

    def _make_layers(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        pl.seed_everything(self._seed, verbose=False)
        original(*args, **kwargs)
        self._prepare()

    def _make_optimizers(self, original: Callable[[], Any]) -> Any:
        """Have parameters that only an optimizer holds in float64 too."""
        made = original()
        optimizers = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.optim.Optimizer)]
        for parameter in held_outside(self._module, optimizers).values():
            if parameter.is_floating_point():
                parameter.data = parameter.data.double()
        return made

    def _leave_out(self, original: Callable[[], Any]) -> list[Any]:
        made = original()
        listed = made if isinstance(made, (list, tuple)) else [made]
        self._left_out = tuple(dict.fromkeys(type(callback).__name__ for callback in listed))
        return []

    def _watch_routers(self) -> None:
        for name, role in read_roles(self._module).items():
            path, weight = name.rpartition(".")[0], self._module.get_parameter(name)
            if role.kind == "router" and weight.ndim == 2 and path not in self._watched:
                self._watched.add(path)
                hook = _note_gap(path, weight.shape[0], self.gaps)
                self._module.get_submodule(path).register_forward_hook(hook)


def _note_gap(path: str, num_experts: int, gaps: dict[str, float]) -> Callable[..., None]:
    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        leaves = tree_leaves(getattr(output, "logits", output))
        logits = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0]
        logits = [x.detach() for x in logits if x.shape[-1] == num_experts and x.numel()]
        if logits and num_experts > 1:
            ordered = logits[0].sort(dim=-1).values
            gap = float(ordered.diff(dim=-1).min() / ordered.abs().max().clamp(min=1e-300))
            gaps[path] = min(gap, gaps.get(path, gap))

    return note
