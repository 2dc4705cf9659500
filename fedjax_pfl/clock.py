"""Simulated time: seconds that clients with given speeds would take.

Nothing in a synchronous run depends on it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Ge, Gt

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError
from fedjax_pfl.options import Factory, Options

MEGABIT = 1e6 / 8  # bytes


class Clients(NamedTuple):
    """Speeds of N clients."""

    per_second: np.ndarray | None = None  # [N] examples; None: training takes no time
    megabits: np.ndarray | None = None  # [N] both ways; None: messages take no time


def constant(value: Annotated[float, Gt(0)], num_clients: int) -> np.ndarray:
    """Returns the same number for all clients."""
    return np.full(num_clients, value)


def lognormal(
    median: Annotated[float, Gt(0)],
    sigma: Annotated[float, Ge(0)],
    num_clients: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws median exp(sigma z), z ~ N(0, 1)."""
    return median * np.exp(sigma * rng.normal(size=num_clients))


def uniform(
    low: Annotated[float, Gt(0)],
    high: Annotated[float, Gt(0)],
    num_clients: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws numbers in [low, high]."""
    if low > high:
        raise InputError(f"`low` must be at most high={high:g}, got {low:g}.")
    return rng.uniform(low, high, num_clients)


def file(path: str, num_clients: int) -> np.ndarray:
    """Reads a text with a number per client."""
    try:
        words = Path(path).expanduser().read_text(encoding="utf-8").split()
        return np.array([float(word) for word in words])
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None


def _of_ids(function: Any, num_clients: int) -> np.ndarray:
    return np.array([float(function(id)) for id in range(num_clients)])


_FACTORIES = (constant, lognormal, uniform, file)
SPEEDS, BANDWIDTHS = (
    Options(name, {x.__name__: x for x in _FACTORIES}, ("num_clients", "rng"), _of_ids)
    for name in ("speeds", "bandwidths")
)


def speeds(spec: str, num_clients: int, seed: int, name: str = "speeds") -> np.ndarray:
    """Returns a positive number per client, [N].

    Args:
      spec: a number for all, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, file:PATH of a
        text with a number per client, or FILE.py:FUNCTION of a client's id.
      name: of the setting, which has a random stream of its own.

    Raises:
      InputError: the text is none of these, or a number is not positive.
    """
    make = read(spec, name)
    rng = np.random.default_rng([seed, *name.encode()])
    with user_code.blamed(name, spec):
        found = make(num_clients=num_clients, rng=rng)
    if found.shape != (num_clients,) or not np.all(np.isfinite(found) & (found > 0)):
        raise InputError(
            f"--{name}={spec} must give {num_clients} positive numbers, one per client."
        )
    return found


def read(spec: str, name: str) -> Factory:
    """Returns a function of `num_clients` and `rng` that makes the numbers; InputError
    if the text is none of those of `speeds`."""
    plain = re.fullmatch(r"[-+]?(\d|\.\d|nan|inf).*", spec)
    known = {"speeds": SPEEDS, "bandwidths": BANDWIDTHS}[name]
    return known.read(f"constant:{spec}" if plain else spec)


def clients(
    per_second: str | None, megabits: str | None, num_clients: int, seed: int
) -> Clients:
    """Returns the clients of --speeds and --bandwidths."""
    given = {"speeds": per_second, "bandwidths": megabits}
    found = [
        None if spec is None else speeds(spec, num_clients, seed, name)
        for name, spec in given.items()
    ]
    return Clients(*found)


def seconds(
    clients: Clients, examples: np.ndarray, sent: np.ndarray | float
) -> np.ndarray:
    """Returns the time of a round of each client, [N].

    Args:
      examples: [N] that local training processes, repetitions included.
      sent: [N] or [], bytes received and sent.
    """
    found = np.zeros(len(examples))
    if clients.per_second is not None:
        found = found + examples / clients.per_second
    if clients.megabits is not None:
        found = found + sent / (MEGABIT * clients.megabits)
    return found
