"""Hyperparameters of a method and values of an option, read from the signature of a
factory.

The keyword-only arguments of a factory are its hyperparameters. Their annotations give
kind, range and choices: `lam: Annotated[float, Ge(0)] = 1.0`, `order: Literal["paper",
"code"] = "paper"`, `steps: int | None = None`. Ranges use the package annotated-types.
Without an annotation the kind is the type of the default. The factories of an option
are annotated in the same way, see `options`.
"""

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax

from fedjax_pfl import errors
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Task

NOUNS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
}
# instances of these are values of the kind, too
_WIDER: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
# constraints of annotated-types, in lower case, and the end of the range they set
_ENDS = {"ge": "low", "gt": "low", "le": "high", "lt": "high"}


class Hyperparameter(NamedTuple):
    """One hyperparameter of a factory."""

    name: str
    kind: Any  # bool, int, float or str; else no value is checked
    default: Any
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    choices: tuple[Any, ...] = ()  # all allowed values; empty if any of the kind is
    optional: bool = False  # None is allowed, too

    @property
    def traced(self) -> bool:
        """True for floats, which are arguments of the compiled functions."""
        return self.kind is float

    @property
    def ranged(self) -> bool:
        """True if the annotation has a range; (-inf, inf) is that of finite numbers."""
        return self[3:7] != (-math.inf, math.inf, False, False)


def of(factory: Callable[..., Any]) -> dict[str, Hyperparameter]:
    """Returns the hyperparameters of a factory by name, in the order of its signature.

    Raises:
      InputError: an argument besides the task has no default or is not keyword-only.
    """
    parameters = list(inspect.signature(factory, eval_str=True).parameters.values())
    for i, p in enumerate(parameters):
        wrong = p.default is p.empty if p.kind is p.KEYWORD_ONLY else i > 0
        if wrong and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            raise InputError(
                f"{method_name(factory)}: the hyperparameter `{p.name}` must be "
                "keyword-only with a default: (task, *, name=default)."
            )
    return {p.name: _read(p) for p in parameters if p.kind is p.KEYWORD_ONLY}


def defaults(factory: Callable[..., Any]) -> dict[str, Any]:
    """Returns the default of each hyperparameter of a factory."""
    return {name: known.default for name, known in of(factory).items()}


def check(factory: Callable[..., Any], values: Any) -> None:
    """Raises InputError unless `values`, {name: value}, are hyperparameters of the
    factory of the right kinds and in range; tracers pass."""
    known = of(factory)
    try:
        for name, value in values.items():
            errors.choose("hyperparameter", name, known)
            check_value(known[name], value)
    except InputError as error:
        raise InputError(f"{method_name(factory)}: {error}") from None


def method_name(factory: Any) -> str:
    """Returns the name of a factory, of a functools.partial's function, or of a
    callable object's class."""
    return getattr(factory, "__name__", None) or method_name(
        getattr(factory, "func", type(factory))
    )


def shared(
    options: type[Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the fields of a NamedTuple to a factory's
    hyperparameters; the factory gets them as one argument, `on`.

    Annotations, defaults and the entries below `Args:` are those of the NamedTuple.
    """

    def decorate(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(task: Task, **values: Any) -> Any:
            own = {x: values.pop(x) for x in options._fields if x in values}
            return factory(task, on=options(**own), **values)

        known = inspect.signature(factory).parameters
        more = inspect.signature(options, eval_str=True).parameters
        make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p for p in known.values() if p.name != "on"]
            + [p.replace(kind=p.KEYWORD_ONLY) for p in more.values()]
        )
        entries = (inspect.getdoc(options) or "").split("Args:\n")[1].rstrip()
        doc = inspect.getdoc(factory) or ""
        start = doc if "Args:\n" in doc else f"{doc}\n\nArgs:\n"
        make.__doc__ = start.replace("Args:\n", f"Args:\n{entries}\n", 1)
        return make

    return decorate


def check_value(known: Hyperparameter, value: Any) -> None:
    """Raises InputError unless a value has the hyperparameter's kind and is in its
    range or among its choices; tracers pass."""
    free = isinstance(value, jax.core.Tracer) or known.kind not in NOUNS
    if free or (value is None and known.optional):
        return
    plain = errors.plain(value)
    kind = _WIDER.get(known.kind, known.kind)
    if isinstance(plain, bool) != (known.kind is bool) or not isinstance(plain, kind):
        noun = NOUNS[known.kind] + (" or None" if known.optional else "")
        raise InputError(f"`{known.name}` must be {noun}, got {plain!r}.")
    if known.choices:
        errors.choose(known.name, str(value), map(str, known.choices))
    elif known.ranged:
        low, high, open_low, open_high = known[3:7]
        errors.check(
            known.name, value, low, high, open_low=open_low, open_high=open_high
        )
    elif plain != plain:  # NaN, which is in no range
        raise InputError(f"`{known.name}` must be a number, got nan.")


def parse(kind: Any, name: str, value: str) -> Any:
    """Returns a text as a value of a kind; InputError if it is none."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        return kind(value)
    except (ValueError, KeyError):
        noun = NOUNS.get(kind, kind)
        raise InputError(f"`{name}` must be {noun}, got {value!r}.") from None


def from_text(known: Hyperparameter, value: Any) -> Any:
    """Returns a text as a value of a hyperparameter; others are unchanged."""
    if not isinstance(value, str):
        return value
    none = value.lower() == "none" and known.optional and "none" not in known.choices
    return None if none else parse(known.kind, known.name, value)


def typed(factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters with the types of a factory's arguments."""
    known = of(factory)
    for name in given:
        errors.choose(f"hyperparameter of {method_name(factory)}", name, known)
    return {name: from_text(known[name], value) for name, value in given.items()}


def arguments(
    factory: Callable[..., Any], given: Collection[str] = ()
) -> list[Hyperparameter]:
    """Returns the arguments of an option's factory in their order, but those `given` by
    the caller."""
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    return [_read(p) for p in parameters if p.name not in given]


def values(
    factory: Callable[..., Any], text: str | None, given: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the arguments of a factory in VALUE:VALUE... by name.

    Args:
      text: a value for the first arguments; None: for none of them.
      given: names of arguments that are not in the text.

    Raises:
      InputError: a value is missing, too many, of another kind or out of range.
    """
    known = arguments(factory, given)
    words = [] if text is None else text.split(":", max(len(known) - 1, 0))
    needed = [x.name for x in known if x.default is inspect.Parameter.empty]
    if len(words) > len(known) or len(words) < len(needed):
        wanted = ":".join(x.name.upper() for x in known) or "no value"
        raise InputError(f"must have {wanted}, got {text or 'none'}.")
    pairs = zip(known, words, strict=False)
    found = {argument.name: from_text(argument, word) for argument, word in pairs}
    for argument in known:
        if argument.name in found:
            check_value(argument, found[argument.name])
    return found


def _read(parameter: inspect.Parameter) -> Hyperparameter:
    kind, optional = parameter.annotation, False
    constraints: list[Any] = []
    choices: tuple[Any, ...] = ()
    while (origin := typing.get_origin(kind)) is not None:
        arguments = typing.get_args(kind)
        if origin is Annotated:
            kind = arguments[0]
            constraints += arguments[1:]
        elif origin is Literal:
            choices, kind = arguments, type(arguments[0])
        elif origin in (typing.Union, types.UnionType):
            kinds = [x for x in arguments if x is not types.NoneType]
            optional = optional or len(kinds) < len(arguments)
            kind = kinds[0] if len(kinds) == 1 else object
        else:
            kind = origin
    return Hyperparameter(
        parameter.name,
        type(parameter.default) if kind is parameter.empty else kind,
        parameter.default,
        **_range(constraints),
        choices=choices,
        optional=optional,
    )


def _range(constraints: list[Any]) -> dict[str, Any]:
    """Returns the range of the constraints, (-inf, inf) with none of its ends given,
    or {} without constraints."""
    ends = {"low": -math.inf, "high": math.inf, "open_low": True, "open_high": True}
    found: dict[str, Any] = {}
    for constraint in constraints:
        for name, end in _ENDS.items():
            if (bound := getattr(constraint, name, None)) is not None:
                found |= ends | found | {end: bound, f"open_{end}": name[1] == "t"}
    return found
