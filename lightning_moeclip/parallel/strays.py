"""Tensors that a module uses and nobody registers: in lists, in loss objects, in buffers that are trained.

``nn.Module`` knows what is assigned to its attributes as a Parameter or a module, and nothing else. What hides in a
plain list or in an object that is no module is not in ``parameters()``: not in the optimizer, not in a checkpoint, and
a wrapper such as DDP never reduces its gradient.
"""

from collections.abc import Iterator
from itertools import islice
from types import ModuleType

import torch
from torch import Tensor, nn

__all__ = ["stray_tensors"]

# what nn.Module keeps its own books in, and what holds the whole run
_OWN = frozenset(vars(nn.Module())) | {"_trainer", "trainer", "_fabric", "_compiled_call_impl"}
# objects of these packages hold no tensors of the user's that are trained, or all of them (a Trainer, an optimizer)
_FOREIGN = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy", "tensorboard"}
_MAX_DEPTH = 4
_MAX_ITEMS, _MAX_OBJECTS = 1_000, 20_000  # looked at of one container or object, and of all of them


def stray_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Leaf tensors that require a gradient and are no parameters of ``module``, by the path at which it holds them.

    Looked into are the attributes of all its modules, and in them modules that are not registered, lists, tuples, sets,
    dicts and plain objects, down to a bounded depth. Properties are not called, and nothing is changed.

    Args:
        module: the user's.
    """
    return _Search(module).found


class _Search:
    """One walk, in which everything is looked at once."""

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[str, Tensor] = {}
        self._registered = {id(parameter) for parameter in module.parameters()}
        modules = list(module.named_modules())
        self._seen = {id(layer) for _, layer in modules}
        # kept, so that no new object gets the id of one that was seen
        self._kept: list[object] = []
        self._num_left = _MAX_OBJECTS
        for name, buffer in module.named_buffers():
            self._take(name, buffer)
        for path, layer in modules:
            for name, value in vars(layer).items():
                if name not in _OWN:
                    self._look(f"{path}.{name}".removeprefix("."), value, _MAX_DEPTH)

    def _look(self, path: str, value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            self._take(path, value)
            return
        if depth == 0 or self._num_left <= 0 or _is_plain(value) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        self._num_left -= 1
        if isinstance(value, nn.Module):
            for name, tensor in [*value.named_parameters(), *value.named_buffers()]:
                self._take(f"{path}.{name}", tensor)
            return
        for name, part in islice(_parts(value), _MAX_ITEMS):
            self._look(f"{path}{name}", part, depth - 1)

    def _take(self, path: str, tensor: Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._registered:
            self._registered.add(id(tensor))
            self.found[path] = tensor


def _is_plain(value: object) -> bool:
    """Whether it holds nothing: a number, a string, a function, a class."""
    return value is None or isinstance(value, (int, float, complex, str, bytes, type, ModuleType, torch.dtype))


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What a container or an object holds, by what is put behind its path."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    if type(value).__module__.split(".")[0] in _FOREIGN:
        return
    yield from ((f".{name}", part) for name, part in list(getattr(value, "__dict__", {}).items()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)
