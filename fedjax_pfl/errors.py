"""What a user can get wrong, said in one sentence before anything compiles."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

import jax


class InputError(ValueError):
    """A value the user gave that cannot work; the message is one sentence for the user."""


class ArchitectureError(InputError):
    """A method needs clients of one architecture, and there are several."""


def check(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raises InputError unless low <= value <= high (low < value with `open_low`); tracers pass."""
    if isinstance(value, jax.core.Tracer):
        return
    below = low < value if open_low else low <= value
    if not below or not (value < high if math.isinf(high) else value <= high):
        left = "(" if open_low else "["
        right = ")" if math.isinf(high) else "]"
        raise InputError(f"{name}={value} is outside its range {left}{low:g}, {high:g}{right}.")


def choose(name: str, value: str, allowed: Iterable[str]) -> str:
    """Returns `value` if it is allowed, else raises InputError with the nearest name and the whole list."""
    allowed = list(allowed)
    if value in allowed:
        return value
    near = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"Unknown {name} {value!r}: {hint}Choose one of {', '.join(allowed)}.")
