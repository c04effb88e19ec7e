"""What a setting must be to count as a number, whatever a caller or a YAML file gives."""

import math
from numbers import Integral, Real
from typing import TypeGuard

__all__ = ["check_steps", "is_finite_number", "is_integer"]


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, neither NaN nor infinite; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer, of numpy too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_steps(name: str, value: object, *, advice: str, owner: str = "") -> None:
    """Refuse what is no number of steps.

    Args:
        name: of the setting.
        value: what was given.
        advice: a sentence that says what to write.
        owner: class whose argument it is, for the message.

    Raises:
        ValueError: it is no integer, or below 1.
    """
    if not is_integer(value) or value < 1:
        given = f"{owner}({name}={value!r})" if owner else f"{name}={value!r}"
        raise ValueError(f"{given} must be an integer from 1. {advice}")
