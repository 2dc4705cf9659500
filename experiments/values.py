"""Values read from text: numbers, and the hyperparameters of a method by the types of its factory's arguments."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.numerics import class_groups
from fedjax_pfl.simulate import hyperparameters

NOUN: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def number(kind: type, name: str, text: str, whole: str | None = None) -> Any:
    """Reads an int or a float; `whole` is what the text is a part of.

    Raises:
      InputError: it is none.
    """
    hints = {"--participation": ", or a range as 0.1:1", "--width": ", or auto", "--devices": ", auto or all"}
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{name}={whole or text} must be {NOUN[kind]}{hints.get(name, '')}.") from None


def typed_all(factory: Callable, texts: dict[str, str]) -> dict[str, Any]:
    """Reads the values of hyperparameters by the types of a factory's arguments."""
    known, hints = hyperparameters(factory), typing.get_type_hints(factory)
    if texts and not known:
        raise InputError(
            f"{factory.__name__} has no hyperparameters, so --hparam {next(iter(texts))}=... means nothing."
        )
    for name in texts:
        choose(f"hyperparameter of {factory.__name__}", name, known)
    found = {name: typed(name, text, hints.get(name, type(known[name]))) for name, text in texts.items()}
    if "tasks" in found:
        found["tasks"] = class_groups.inline(found["tasks"])  # recorded, so that a resume does not need the file again
    return found


def typed(name: str, text: str, hint: Any) -> Any:
    """Reads one value; `none` is None where the type allows it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if text.lower() == "none" and type(None) in kinds:
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(f"--hparam {name}={text} must be {NOUN[bool]}.")
    return number(kind, f"--hparam {name}", text)


def parameters(factory: Callable) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a factory."""
    found = inspect.signature(factory).parameters
    return {name: p for name, p in found.items() if p.kind is p.KEYWORD_ONLY}
