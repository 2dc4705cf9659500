"""A method by its name: one of this package, or a factory of the user's own in a file
or a module."""

from collections.abc import Callable

from fedjax_pfl import user_code
from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import choose
from fedjax_pfl.types import Algorithm, Method


def find(name: str) -> Callable[..., Algorithm | Method]:
    """Returns the factory of a method.

    Args:
      name: in ALGORITHMS, or FILE.py:FACTORY, or package.module:FACTORY.

    Raises:
      InputError: there is none; the message says what was looked for.
    """
    if ":" in name:
        return user_code.load("algo", name)
    return ALGORITHMS[choose("algo", name, ALGORITHMS)]
