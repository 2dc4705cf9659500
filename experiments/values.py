"""Values read from text: numbers, and the hyperparameters of a method by the types of
its factory's arguments."""

from collections.abc import Callable
from typing import Any

from fedjax_pfl import hyperparameters
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.hyperparameters import Hyperparameter

NOUN: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def if_several(text: str) -> str:
    """What follows a sentence on a value that may have been meant as several."""
    return "; values apart by commas are for experiments.sweep" if "," in text else ""


def number(kind: type, name: str, text: str, whole: str | None = None) -> Any:
    """Reads an int or a float; `whole` is what the text is a part of.

    Raises:
      InputError: it is none.
    """
    hints = {
        "--participation": ", or a range as 0.1:1",
        "--width": ", or auto",
        "--devices": ", auto or all",
    }
    try:
        return kind(text)
    except ValueError:
        raise InputError(
            f"{name}={whole or text} must be "
            f"{NOUN[kind]}{hints.get(name, if_several(text))}."
        ) from None


def typed_all(factory: Callable, texts: dict[str, str]) -> dict[str, Any]:
    """Reads the values of hyperparameters by the types of a factory's arguments."""
    known = hyperparameters.of(factory)
    for name in texts:
        if not known:
            raise InputError(
                f"{factory.__name__} has no hyperparameters, so --hparam {name}=... "
                "means nothing."
            )
        choose(f"hyperparameter of {factory.__name__}", name, known)
    return {
        name: _recorded(known[name], typed(known[name], text))
        for name, text in texts.items()
    }


def _recorded(known: Hyperparameter, value: Any) -> Any:
    return value if known.recorded is None else known.recorded.value(value)


def typed(known: Hyperparameter, text: str) -> Any:
    """Reads one value; `none` is None where the type allows it."""
    if text.lower() == "none" and known.optional and "none" not in known.choices:
        return None
    if known.kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(f"--hparam {known.name}={text} must be {NOUN[bool]}.")
    return number(known.kind, f"--hparam {known.name}", text)
