"""One fault at one step on one rank, planted on purpose: what a run that watches itself must find."""

from lightning_moeclip.monitor.bounds import is_finite_number, is_integer
from lightning_moeclip.testing.faults import FAULTS, ScaleGrad, Stall
from lightning_moeclip.testing.timed_fault import Fault

__all__ = ["inject"]


def inject(
    fault: str,
    step: int,
    rank: int,
    *,
    parameter: str | None = None,
    factor: float = 1e6,
    seconds: float = 1.0,
) -> Fault:
    """A callback that plants one fault at a step on a rank, once in a fit; give it to the Trainer on every rank.

    ``"nan_grad"``: the first element of a parameter's gradient is NaN on that rank, before it is reduced; of a sparse
    one the first that is stored.
    ``"scale_grad"``: that rank's gradients of the step are multiplied by ``factor``, before they are reduced.
    ``"sign_flip"``: the reduced gradients change their sign on that rank alone, after the first backward of the step
    that reduces, and before ``on_after_backward`` of callbacks that come later in the list.
    ``"drop_reduce"``: that rank takes part in the reduction and keeps what it put in, its own gradient / W.
    ``"desync"``: the largest element of a parameter moves by one unit in the last place, away from zero, after the
    step. A 16-bit parameter takes its master along.
    ``"stall"``: that rank sleeps before the step.
    ``"exception"``: ``InjectedFault`` is raised before the step.

    All but ``"drop_reduce"`` work under any strategy that trains the module's own parameters, and all of them with
    accumulation (a step has several batches), manual optimization, spread experts and masters. Where there was nothing
    to act on, a gradient that did not come, say, the rank raises ``RuntimeError`` after the step, and so it does when
    training ends before. A fit that begins behind the step, as a resumed run does, warns on that rank and goes on.

    Args:
        fault: one of the above.
        step: ``trainer.global_step`` when the batch begins; with two optimizers it counts the steps of both, and the
            fault happens in the first batch that begins at ``step`` or behind it.
        rank: global rank on which it happens.
        parameter: name in the module. None takes all parameters; for "nan_grad" and "desync" the first dense one.
        factor: of "scale_grad".
        seconds: of "stall".

    Returns:
        The callback, whose ``fired`` is the step at which the batch began in which the fault happened, on its rank.

    Raises:
        ValueError: no such fault, a value out of range or of another fault; from ``fit`` on every rank: no such rank
            or parameter.
        TypeError: from ``fit``, for "drop_reduce" under another strategy.
    """
    if fault not in FAULTS:
        raise ValueError(f"inject({fault!r}, ...): no such fault. Use one of {', '.join(map(repr, FAULTS))}.")
    if not all(is_integer(number) and number >= 0 for number in (step, rank)):
        raise ValueError(f"inject({fault!r}, step={step!r}, rank={rank!r}): both count from 0. Write integers from 0.")
    if not (is_finite_number(seconds) and seconds > 0):
        raise ValueError(f"inject({fault!r}, seconds={seconds!r}) must be a positive number. The default is 1.0.")
    if not is_finite_number(factor):
        raise ValueError(f"inject({fault!r}, factor={factor!r}) must be a number. The default is 1e6.")
    if not isinstance(parameter, str | None):
        raise ValueError(f"inject({fault!r}, parameter={parameter!r}) must be the name of a parameter, or None.")
    kind = FAULTS[fault]
    _check_arguments_of(fault, parameter=parameter, factor=factor, seconds=seconds)
    if kind is ScaleGrad:
        return ScaleGrad(step, rank, parameter=parameter, factor=factor)
    if kind is Stall:
        return Stall(step, rank, seconds=seconds)
    return kind(step, rank, parameter=parameter)


def _check_arguments_of(fault: str, *, parameter: str | None, factor: float, seconds: float) -> None:
    """Refuse an argument that the fault would not look at."""
    ignored = {
        "parameter": parameter is not None and fault in ("stall", "exception"),
        "factor": factor != 1e6 and fault != "scale_grad",
        "seconds": seconds != 1.0 and fault != "stall",
    }
    for name, is_ignored in ignored.items():
        if is_ignored:
            raise ValueError(f"inject({fault!r}, {name}=...): this fault has no {name}. Leave it out.")
