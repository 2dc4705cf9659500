"""The registry of data sets that have a name."""

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_pfl.data.datasets import Dataset, checked
from fedjax_pfl.errors import InputError, choose

Loader = Callable[..., Dataset]
# {NAME, or KIND:ARGUMENT: description}
DESCRIPTIONS: dict[str, str] = {}
_LOADERS: dict[str, Loader] = {}


def register(name: str, description: str) -> Callable[[Loader], Loader]:
    """Registers a loader under a name.

    Args:
      name: such as `digits`, whose loader is called without an argument, or such as
        `npz:PATH`, whose loader gets what follows the colon. Options are passed by
        keyword to loaders that have an argument of their name.
      description: shown by `--list`.
    """

    def add(loader: Loader) -> Loader:
        DESCRIPTIONS[name], _LOADERS[name.partition(":")[0]] = description, loader
        return loader

    return add


def accepts(name: str, option: str) -> bool:
    """Returns whether the loader of a data set has an option."""
    kind = name if name in _LOADERS else name.partition(":")[0]
    return kind in _LOADERS and option in inspect.signature(_LOADERS[kind]).parameters


def load(name: str, **options: Any) -> Dataset:
    """Loads a registered data set, such as `digits` or `npz:mine.npz`.

    Raises:
      InputError: an unknown name, or what its loader raises.
    """
    kind, colon, argument = name.partition(":")
    kinds = {x.partition(":")[0] for x in DESCRIPTIONS if ":" in x}
    if not colon or kind not in kinds:
        choose("data set", name, DESCRIPTIONS)
    loader = _LOADERS[kind if colon else name]
    known = inspect.signature(loader).parameters
    for option, value in options.items():
        if value is not None and option not in {*known, "data_dir", "load"}:
            raise InputError(f"--{option} has no effect on {name}.")
    given = {x: value for x, value in options.items() if x in known}
    return checked(loader(*([argument] if colon else []), **given))
