"""What a user can get wrong, said in one sentence before anything compiles."""

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
T = TypeVar("T")


class InputError(ValueError):
    """A value the user gave that cannot work; the message is one sentence for the
    user."""


class ArchitectureError(InputError):
    """A method needs clients of one architecture, and there are several."""


class ContractError(InputError):
    """A method does not return what the contract asks for."""


class NoRoomError(InputError):
    """A run takes more memory than there is."""


class DivergenceError(RuntimeError):
    """A client's loss or state is not finite any more, or the server's."""


def check(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
    whole: bool = False,
    why: str = "",
) -> None:
    """Raises InputError unless `value` is a number with low <= value <= high; tracers
    pass.

    Args:
      open_low: `low` itself is outside, as `high` is with `open_high`; infinity always
        is.
      whole: only whole numbers will do.
      why: the reason of the range, for the message.
    """
    if isinstance(value, jax.core.Tracer):
        return
    given, value = (
        value,
        value.item()
        if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0
        else value,
    )
    if isinstance(value, bool) or not isinstance(
        value, numbers.Integral if whole else numbers.Real
    ):
        raise InputError(
            f"{name}={given!r} must be {'a whole number' if whole else 'a number'}."
        )
    number: Any = value  # which mypy cannot compare
    below = low < number if open_low else low <= number
    if not below or not (
        number < high if open_high or math.isinf(high) else number <= high
    ):
        span = interval(low, high, open_low=open_low, open_high=open_high)
        raise InputError(
            f"{name}={value} is outside its range {span}{why and f': {why}'}."
        )
    if not whole and abs(number) > FLOAT32_MAX:
        raise InputError(
            f"{name}={value} is infinite in float32, with which it is computed."
        )


def needed(name: str, value: T | None, why: str) -> T:
    """Returns a field of the task that may be left out; InputError, which says why the
    method needs it, if it was."""
    if value is None:
        raise InputError(f"This method needs {name}, {why}: give {name}= to `task`.")
    return value


def interval(
    low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> str:
    """A range as text, such as [0, inf)."""
    bounds = [
        format(x, "g" if isinstance(x, float) or abs(x) < 10**5 else ",")
        for x in (low, high)
    ]
    left = "(" if open_low else "["
    right = ")" if open_high or math.isinf(high) else "]"
    return f"{left}{', '.join(bounds)}{right}"


def choose(name: str, value: str, allowed: Iterable[str]) -> str:
    """Returns `value` if it is allowed, else raises InputError with the nearest name
    and the whole list."""
    allowed = list(allowed)
    if isinstance(value, str) and value in allowed:
        return value
    near = _of_file(name, str(value)) or nearest(str(value), allowed)
    hint = f"did you mean {near!r}? " if near else ""
    known = f"Choose one of {', '.join(allowed)}" if allowed else "There is none"
    raise InputError(f"Unknown {name} {value!r}: {hint}{known}.")


def _of_file(name: str, value: str) -> str | None:
    """How the user's own file is named, where it alone is given for a part of a run."""
    if value.endswith(".py") and name in ("algo", "model", "data set", "partition"):
        return f"{value}:NAME"
    start = {"data set": "npz:", "partition": "file:"}.get(name)
    return f"{start}{value}" if start and value.endswith(".npz") else None


def check_shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns a shape of one input as a tuple; InputError unless all its lengths are
    whole numbers from 1 on."""
    lengths = value if isinstance(value, tuple | list) and value else (None,)
    if not all(isinstance(x, int | np.integer) and x > 0 for x in lengths):
        raise InputError(f"{name}={value!r} must be a shape, such as (28, 28, 1).")
    return tuple(value)


def first_line(error: BaseException) -> str:
    """What an exception says first; of one that says nothing its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """The type of an exception, and what it says first."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def nearest(value: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that is most like `value`, whatever the case, or None if none
    is."""
    names = {name.lower(): name for name in reversed(list(allowed))}
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
    return names[near[0]] if near else None
