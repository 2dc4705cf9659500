"""Simulated time: seconds that clients with given speeds would take.

Nothing in a synchronous run depends on it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pfl import user_code
from fedjax_pfl.errors import InputError

# {name: (rng, N, value, value) -> [N]}
DISTRIBUTIONS: dict[str, Callable[..., np.ndarray]] = {
    "lognormal": lambda rng, n, median, sigma: (
        median * np.exp(sigma * rng.normal(size=n))
    ),
    "uniform": lambda rng, n, low, high: rng.uniform(low, high, n),
}
MEGABIT = 1e6 / 8  # bytes


class Clients(NamedTuple):
    """Speeds of N clients."""

    per_second: np.ndarray | None = None  # [N] examples; None: training takes no time
    megabits: np.ndarray | None = None  # [N] both ways; None: messages take no time


def speeds(spec: str, num_clients: int, seed: int, name: str = "speeds") -> np.ndarray:
    """Returns a positive number per client, [N].

    Args:
      spec: a number for all, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, file:PATH of a
        text with a number per client, or FILE.py:FUNCTION of a client's id.
      name: of the setting, which has a random stream of its own.

    Raises:
      InputError: the text is none of these, or a number is not positive.
    """
    kind, _, rest = spec.partition(":")
    if kind == "file":
        text = Path(rest).expanduser().read_text(encoding="utf-8")
        found = _numbers(name, spec, text.split())
    elif kind in DISTRIBUTIONS:
        values = _numbers(name, spec, rest.split(":"))
        if len(values) != 2:
            raise InputError(f"--{name}={spec} must have two numbers after {kind}.")
        rng = np.random.default_rng([seed, *name.encode()])
        found = DISTRIBUTIONS[kind](rng, num_clients, *values)
    elif user_code.named(spec):
        function = user_code.load("speeds", spec)
        with user_code.blamed("speeds", spec):
            found = np.array([float(function(id)) for id in range(num_clients)])
    else:
        found = np.repeat(_numbers(name, spec, [spec]), num_clients)
    if found.shape != (num_clients,) or not np.all(np.isfinite(found) & (found > 0)):
        raise InputError(
            f"--{name}={spec} must give {num_clients} positive numbers, one per client."
        )
    return found


def _numbers(name: str, spec: str, words: list[str]) -> np.ndarray:
    try:
        return np.array([float(word) for word in words])
    except ValueError:
        raise InputError(
            f"--{name}={spec} must be a number, lognormal:MEDIAN:SIGMA, "
            "uniform:LOW:HIGH, file:PATH or FILE.py:FUNCTION."
        ) from None


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
