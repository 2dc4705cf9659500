"""Errors for invalid input, and checks of ranges and names."""

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

T = TypeVar("T")


class InputError(ValueError):
    """An invalid value, found before anything compiles."""


class ArchitectureError(InputError):
    """A method for clients of one architecture, used with several."""


class ContractError(InputError):
    """A method whose functions return what the contract does not allow."""


class NoRoomError(InputError):
    """A run that needs more memory than there is."""


class DivergenceError(RuntimeError):
    """A loss or a state that is no longer finite."""


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
    """Raises InputError unless `value` is a number from `low` to `high`; tracers pass.

    Args:
      open_low: excludes `low`; `open_high` excludes `high`; infinity is never allowed.
      whole: allows integers only.
      why: the reason for the range, added to the message.
    """
    if isinstance(value, jax.core.Tracer):
        return
    value = plain(value)
    start, colon, field = name.rpartition(": ")
    name = f"{start}{colon}`{field}`"
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        noun = "an integer" if whole else "a number"
        raise InputError(f"{name} must be {noun}, got {value!r}.")
    number: Any = value  # mypy cannot compare numbers.Real
    above = low < number if open_low else low <= number
    below = number < high if open_high or math.isinf(high) else number <= high
    if not (above and below):
        ends = [
            format(x, "g" if isinstance(x, float) or abs(x) < 10**5 else ",")
            for x in (low, high)
        ]
        left = "(" if open_low else "["
        right = ")" if open_high or math.isinf(high) else "]"
        span, reason = f"{left}{', '.join(ends)}{right}", f": {why}" if why else ""
        raise InputError(f"{name} must be in {span}, got {number}{reason}.")


def plain(value: Any) -> Any:
    """Returns the Python scalar of an array of shape [], and any other value
    unchanged."""
    array = isinstance(value, np.ndarray | np.generic | jax.Array)
    return value.item() if array and value.ndim == 0 else value


def needed(name: str, value: T | None, why: str) -> T:
    """Returns an optional field of the task; raises InputError if it is None."""
    if value is None:
        raise InputError(f"This method needs {name}, {why}: give {name}= to `task`.")
    return value


def choose(name: str, value: str, allowed: Iterable[str]) -> str:
    """Returns `value` if it is allowed; else raises InputError with the most similar
    name and all allowed ones."""
    allowed = list(allowed)
    if isinstance(value, str) and value in allowed:
        return value
    near = nearest(str(value), allowed)
    hint = f"did you mean {near!r}? " if near else ""
    known = f"Choose one of {', '.join(allowed)}" if allowed else "There is none"
    raise InputError(f"Unknown {name} {value!r}: {hint}{known}.")


def check_shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns the shape of one input as a tuple; raises InputError unless it is a
    sequence of positive integers."""
    lengths = value if isinstance(value, tuple | list) and value else (None,)
    if not all(isinstance(x, int | np.integer) and x > 0 for x in lengths):
        raise InputError(
            f"`{name}` must be a shape, such as (28, 28, 1), got {value!r}."
        )
    return tuple(value)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """Returns the type and the first line of an exception's message."""
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


def nearest(value: str, allowed: Iterable[str]) -> str | None:
    """Returns the allowed name most similar to `value`, ignoring case, or None."""
    names = {name.lower(): name for name in reversed(list(allowed))}
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
    return names[near[0]] if near else None


def moved(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Returns the `__getattr__` of a module for names that it no longer has.

    Args:
      names: {old name: the new call}; an import of one raises ImportError, which names
        the call.
    """

    def find(name: str) -> NoReturn:
        if name in names:
            raise ImportError(f"{module}.{name} has gone: use {names[name]}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
