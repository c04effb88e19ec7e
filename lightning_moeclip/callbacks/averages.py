"""What a callback that averages weights knows of its average, beside the weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_moeclip.binding import Callback, pl
from lightning_moeclip.state.live import GetAndSet

__all__ = ["counters_of_averages"]

_AVERAGING = (pl.callbacks.StochasticWeightAveraging, pl.callbacks.WeightAveraging)
_PLAIN = (int, float, bool, type(None))
# places in the run, whose own counters go forward: with older ones a step of several batches is averaged twice
_CLOCKS = {"_latest_update_step", "_latest_update_epoch"}


def counters_of_averages(callbacks: Iterable[Callback]) -> dict[str, GetAndSet]:
    """Get and set the tensors and plain numbers of callbacks that average weights, for a ``LiveState``.

    An average that goes back without the number of models in it would weigh the next one wrongly. Other callbacks
    keep their numbers, which may be of the run and not of the weights, and so do the steps and epochs in which
    Lightning's averages were last updated.

    Args:
        callbacks: all of the trainer; its averaging ones are those of Lightning and all that hold an
            ``AveragedModel``.
    """
    return {
        f"{index} {type(callback).__name__}": _counters_of(callback)
        for index, callback in enumerate(callbacks)
        if isinstance(callback, _AVERAGING) or any(isinstance(v, AveragedModel) for v in vars(callback).values())
    }


def _counters_of(callback: Callback) -> GetAndSet:
    def read() -> dict[str, Any]:
        held = {name: value for name, value in vars(callback).items() if name not in _CLOCKS}
        tensors = {name: value.detach() for name, value in held.items() if isinstance(value, Tensor)}
        return tensors | {name: value for name, value in held.items() if type(value) in _PLAIN}

    @torch.no_grad()
    def write(kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            live = getattr(callback, name, None)
            if isinstance(live, Tensor) and isinstance(value, Tensor) and _is_alike(live, value):
                live.copy_(value)  # in place: others may hold it
            else:
                setattr(callback, name, value)

    return read, write


def _is_alike(live: Tensor, kept: Tensor) -> bool:
    return live.shape == kept.shape and live.dtype == kept.dtype
