"""Looks on while a Trainer trains: one process writes what it had, ranks compare what they have with that.

Ranks send each other nothing for it: a collective here could hide the one that they wait in.
"""

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_moeclip.binding import Callback
from lightning_moeclip.diagnosis.held_outside import held_outside
from lightning_moeclip.diagnosis.measures import (
    grad,
    norm,
    num_nonfinite,
    numbers,
    on_this_rank,
    relative_error,
    root_of_squares,
)
from lightning_moeclip.diagnosis.observations import GradientSeen, NormSeen, ParameterSeen, Sketch, StepSeen, Unfinished
from lightning_moeclip.diagnosis.sketch import Place, place_of, sketch
from lightning_moeclip.gradients.master_parameter import model_parameter
from lightning_moeclip.parallel.roles import spreadable_layers
from lightning_moeclip.strategy import MoEClipStrategy

__all__ = ["Comparer", "Recorder", "Writer"]


class Recorder(Callback):
    """What one process and ranks note alike: local gradients as autograd brings them, and each step.

    Args:
        folder: where steps are written and read.
        step_seed: of random numbers from the first step on.
    """

    def __init__(self, folder: Path, step_seed: int) -> None:
        self.folder, self.step_seed = folder, step_seed
        self.parameters: dict[str, nn.Parameter] = {}
        self.places: dict[str, Place] = {}
        self.outside: tuple[str, ...] = ()
        self.seen = StepSeen(step=0)
        self._arrivals: dict[str, int] = {}
        self._locals: dict[str, Tensor] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._announced: set[int] = set()  # optimizers of which Lightning has told that they are about to step

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # what it monitors may come from a validation that is not run
        self._watch_announced(trainer, pl_module)
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):
                optimizer.register_step_pre_hook(self._note_raw_step(trainer.strategy))
                optimizer.register_step_post_hook(lambda stepped, *_: self._announced.discard(id(stepped)))
        outside = held_outside(pl_module, trainer.optimizers)
        self.outside = tuple(outside)
        self.parameters = dict(pl_module.named_parameters()) | outside
        self.places = self._find_places(trainer, pl_module)
        self._keep_parameters()
        self._write()
        torch.manual_seed(self.step_seed)
        self.seen = StepSeen(step=1)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # also what was unfrozen since
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                self._hooks[name] = parameter.register_hook(self._note_arrival(name))

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen = replace(self.seen, losses=(*self.seen.losses, float(loss.detach())))

    def _watch_announced(self, trainer: Any, module: Any) -> None:
        """See gradients behind the module's own hook, which may still reduce them, and before they are clipped."""
        original = module.on_before_optimizer_step

        def on_before_optimizer_step(optimizer: Optimizer) -> None:
            original(optimizer)
            self._announced.add(id(optimizer))
            self._note_step(trainer.strategy, optimizer)

        module.on_before_optimizer_step = on_before_optimizer_step

    def _note_raw_step(self, strategy: Any) -> Any:
        """Before each step of an optimizer: see those that Lightning does not announce."""

        def note(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Lightning steps with a closure, within which it announces the step
            has_closure = len(args) > 1 or kwargs.get("closure") is not None  # the optimizer itself comes first
            if id(optimizer) not in self._announced and not has_closure:
                self._note_step(strategy, optimizer)

        return note

    def _note_step(self, strategy: Any, optimizer: Optimizer) -> None:
        held = {id(model_parameter(p)) for group in optimizer.param_groups for p in group["params"]}
        names = [name for name, p in self.parameters.items() if id(p) in held]
        norm = _clip_norm(strategy, [self.parameters[name] for name in names])
        self.seen = replace(self.seen, norms=(*self.seen.norms, norm))
        self._keep_gradients(names)
        for name in names:
            self._arrivals.pop(name, None)
            self._locals.pop(name, None)
        # now, since a rank may never come out of the step
        self._write()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.seen.norms:  # a micro-batch of a step to come
            return
        self._keep_parameters()
        self._write()
        self.seen = StepSeen(step=self.seen.step + 1)

    def unfinished(self) -> Unfinished:
        """The step at hand, for a rank that does not come to its end."""
        trainable = tuple(name for name, p in self.parameters.items() if p.requires_grad)
        return Unfinished(self.seen.step, trainable, {name: numbers(s) for name, s in list(self._locals.items())})

    def arrivals(self, name: str) -> int:
        """How often autograd brought a gradient of a parameter since it was last stepped."""
        return self._arrivals.get(name, 0)

    def local(self, name: str) -> Sketch:
        """Sketch of what autograd brought since then; empty where that is nothing."""
        return numbers(self._locals[name]) if name in self._locals else ()

    @abstractmethod
    def _keep_gradients(self, names: list[str]) -> None:
        """Note the gradients that an optimizer is about to take."""

    @abstractmethod
    def _keep_parameters(self) -> None:
        """Note the parameters as they are."""

    @abstractmethod
    def _write(self) -> None:
        """Leave what was seen of this step in the folder."""

    def _note_arrival(self, name: str) -> Any:
        def note(gradient: Tensor) -> None:
            part = sketch(name, on_this_rank(gradient), self.places[name])
            self._locals[name] = self._locals[name] + part if name in self._locals else part
            self._arrivals[name] = self.arrivals(name) + 1

        return note

    def _find_places(self, trainer: Any, module: nn.Module) -> dict[str, Place]:
        axis = trainer.strategy.mesh.experts if isinstance(trainer.strategy, MoEClipStrategy) else None
        spread = [] if axis is None else [layer for _, layer in spreadable_layers(module) if layer.expert_axis]
        own = {id(p) for layer in spread for p in layer.expert_parameters().values()}
        rank, size = (0, 1) if axis is None else (axis.rank, axis.size)
        return {
            name: place_of(p.detach(), expert_rank=rank, expert_size=size, is_spread=id(p) in own)
            for name, p in self.parameters.items()
        }


class Writer(Recorder):
    """Of one process: leaves tensors to compare with."""

    steps: tuple[StepSeen, ...] = ()

    @override
    def _keep_gradients(self, names: list[str]) -> None:
        grads = {name: grad(self.parameters[name]) for name in names}
        call = len(self.seen.norms) - 1
        torch.save(grads, self.folder / f"gradients.{self.seen.step}.{call}.pt")
        seen = []
        for name, g in grads.items():
            final = () if g is None else numbers(sketch(name, g, self.places[name]))
            alive = self.parameters[name].requires_grad
            size, bad = (0.0, 0) if g is None else (norm(g), num_nonfinite(g))
            one = GradientSeen(
                name=name,
                is_trainable=alive,
                is_missing=g is None,
                is_missing_in_one=g is None,
                error=0.0,
                ratio=1.0,
                residual=0.0,
                norm=size,
                num_nonfinite=bad,
                arrivals=self.arrivals(name),
                local=self.local(name),
                final=final,
                call=call,
            )
            seen.append(one)
        self.seen = replace(self.seen, gradients=(*self.seen.gradients, *seen))

    @override
    def _keep_parameters(self) -> None:
        values = {name: p.detach() for name, p in self.parameters.items()}
        torch.save(values, self.folder / f"parameters.{self.seen.step}.pt")
        seen = tuple(ParameterSeen(name, 0.0, num_nonfinite(value)) for name, value in values.items())
        self.seen = replace(self.seen, parameters=seen)

    @override
    def _write(self) -> None:
        self.steps = (*(s for s in self.steps if s.step != self.seen.step), self.seen)


class Comparer(Recorder):
    """Of a rank: compares with what ``Writer`` left, and leaves the numbers."""

    def __init__(self, folder: Path, step_seed: int, label: str) -> None:
        super().__init__(folder, step_seed)
        self.label = label

    @override
    def _keep_gradients(self, names: list[str]) -> None:
        path = self.folder / f"gradients.{self.seen.step}.{len(self.seen.norms) - 1}.pt"
        wanted = torch.load(path, mmap=True, weights_only=True) if path.exists() else {}
        whole = root_of_squares(g for g in wanted.values() if g is not None)
        seen = [self._compare_gradient(name, wanted.get(name), whole) for name in names]
        self.seen = replace(self.seen, gradients=(*self.seen.gradients, *seen))

    def _compare_gradient(self, name: str, whole: Tensor | None, norm_of_all: float) -> GradientSeen:
        parameter, place = self.parameters[name], self.places[name]
        gradient = grad(parameter)
        ref = None if whole is None or tuple(whole.shape) != place.shape else place.cut(whole)
        ratio = residual = float("nan")
        size = 0.0 if gradient is None else norm(gradient)
        if gradient is None or ref is None:
            error = 0.0 if gradient is None and ref is None else float("inf")
        else:
            error = relative_error(gradient, ref, norm_of_all)
            square = float((ref.abs() ** 2).sum())
            if size > 0 and square > 0:
                ratio = float((gradient * ref.conj()).sum().real) / square
                residual = norm(gradient - ratio * ref) / size
        return GradientSeen(
            name=name,
            is_trainable=parameter.requires_grad,
            is_missing=gradient is None,
            is_missing_in_one=whole is None,
            error=error,
            ratio=ratio,
            residual=residual,
            norm=size,
            num_nonfinite=0 if gradient is None else num_nonfinite(gradient),
            arrivals=self.arrivals(name),
            local=self.local(name),
            final=() if gradient is None else numbers(sketch(name, gradient, place)),
            call=len(self.seen.norms) - 1,
        )

    @override
    def _keep_parameters(self) -> None:
        path = self.folder / f"parameters.{self.seen.step}.pt"
        wanted = torch.load(path, mmap=True, weights_only=True) if path.exists() else {}
        norm_of_all = root_of_squares(wanted.values())
        seen = []
        for name, parameter in self.parameters.items():
            value, place = on_this_rank(parameter.detach()), self.places[name]
            is_same = name in wanted and tuple(wanted[name].shape) == place.shape
            error = relative_error(value, place.cut(wanted[name]), norm_of_all) if is_same else float("inf")
            seen.append(ParameterSeen(name, error, num_nonfinite(value)))
        self.seen = replace(self.seen, parameters=tuple(seen))

    @override
    def _write(self) -> None:
        torch.save(self.seen, self.folder / f"seen.{self.label}.{self.seen.step}.pt")


def _clip_norm(strategy: Any, parameters: list[nn.Parameter]) -> NormSeen:
    """The norm that clipping of this strategy would use."""
    try:
        if isinstance(strategy, MoEClipStrategy) and strategy.world_size > 1:
            return NormSeen(float(strategy.gradient_square()), is_square_part=True)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return NormSeen(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        told = str(error).partition("\n")[0][:200]
        return NormSeen(float("nan"), problem=f"{type(error).__name__}: {told}")
