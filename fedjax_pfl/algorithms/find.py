"""A method by its name: one of this package, or a factory of the user's own in a file or a
module."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_pfl.algorithms import ALGORITHMS
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.types import Algorithm


def find(name: str) -> Callable[..., Algorithm]:
    """The factory of a method.

    Args:
      name: in ALGORITHMS, or FILE.py:FACTORY, or package.module:FACTORY.

    Raises:
      InputError: there is none; the message says what was looked for.
    """
    place, colon, factory = name.rpartition(":")
    if not colon:
        return ALGORITHMS[choose("algo", name, ALGORITHMS)]
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place, name)
    found: Callable[..., Algorithm] | None = getattr(module, factory, None)
    if not callable(found):
        functions = [x for x, value in vars(module).items() if callable(value) and not x.startswith("_")]
        raise InputError(f"algo={name}: there is no function {factory!r}, only {', '.join(functions) or 'none'}.")
    return found


def digest(name: str) -> str | None:
    """SHA-256 of the file of a user's own method; None for one of this package or of a module."""
    place, _, _ = name.rpartition(":")
    if not place.endswith(".py"):
        return None
    return hashlib.sha256(Path(place).expanduser().read_bytes()).hexdigest()


def _from_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise InputError(f"algo={path}: there is no such file.")
    name = f"_own_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]}"
    if name not in sys.modules:  # a method is looked up several times in a run
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever is wrong with the user's file
            raise InputError(f"{path} cannot be imported ({type(error).__name__}: {error}).") from error
        sys.modules[name] = module
    return sys.modules[name]


def _from_package(place: str, name: str) -> Any:
    try:
        return importlib.import_module(place)
    except Exception as error:  # no such module, no name of one, or whatever is wrong with the user's
        raise InputError(f"algo={name}: {place!r} cannot be imported ({error}).") from error
