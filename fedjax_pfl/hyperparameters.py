"""Hyperparameters of a method, read from its factory's signature: kind, range, choices,
traced or static.

The keyword-only arguments of a factory are its hyperparameters, and their annotations
the only source of what is known of them: `lam: Annotated[float, Ge(0)] = 1.0`, `order:
Literal["paper", "code"] = "paper"`, `steps: int | None = None`. The constraints are
those of the package annotated-types. An argument without an annotation has the type of
its default.
"""

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import annotated_types
import jax
import numpy as np

from fedjax_pfl import errors
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Algorithm, Task

NOUNS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
}


class Recorded(NamedTuple):
    """Annotates a hyperparameter that may name a file: what a run records instead, to
    need no file again."""

    value: Callable[[Any], Any]


class Hyperparameter(NamedTuple):
    """What is known of one hyperparameter."""

    name: str
    # bool, int, float or str; of any other annotation the type of the default, and no
    # value is checked
    kind: Any
    default: Any
    # the range of a number; closed and infinite on both sides where none is given
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    choices: tuple[Any, ...] = ()  # all allowed values; () where any of the kind is
    optional: bool = False  # None is allowed, too
    known: bool = True  # False: of another annotation
    recorded: Recorded | None = None

    @property
    def traced(self) -> bool:
        """Is it an argument of the compiled functions, as floats are, or a constant of
        the program?"""
        return self.known and self.kind is float

    @property
    def ranged(self) -> bool:
        """Has it a range? (-inf, inf) is one, that of finite numbers."""
        return (self.low, self.high, self.open_low, self.open_high) != (
            -math.inf,
            math.inf,
            False,
            False,
        )


def of(factory: Callable[..., Any]) -> dict[str, Hyperparameter]:
    """The keyword-only arguments of a factory, its hyperparameters, by name and in the
    order of its signature."""
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    return {p.name: _read(p) for p in parameters if p.kind is p.KEYWORD_ONLY}


def defaults(factory: Callable[..., Algorithm]) -> dict[str, Any]:
    """The hyperparameters of a factory with their defaults."""
    return {name: known.default for name, known in of(factory).items()}


def check(factory: Callable[..., Algorithm], values: Any) -> None:
    """Raises InputError unless `values`, {name: value}, are hyperparameters of the
    factory, of the kinds and in the ranges that its signature gives; tracers pass."""
    if not isinstance(values, dict):
        raise InputError(
            f"hparams must be a dict, {{name: value}}, not {type(values).__name__}."
        )
    known = of(factory)
    try:
        for name, value in values.items():
            check_place(factory, name)
            errors.choose("hyperparameter", name, known)
            check_value(known[name], value)
    except InputError as error:
        raise InputError(f"{method_name(factory)}: {error}") from None


def method_name(factory: Any) -> str:
    """The name of a factory, of what a functools.partial calls, or of a callable
    object's class."""
    return getattr(factory, "__name__", None) or method_name(
        getattr(factory, "func", type(factory))
    )


def check_place(factory: Callable[..., Algorithm], name: str) -> None:
    """Raises InputError for an argument of a factory that would be a hyperparameter
    after `*`."""
    # the first is the task
    others = list(inspect.signature(factory).parameters.values())[1:]
    found = next((p for p in others if p.name == name), None)
    if found is not None and found.kind is found.POSITIONAL_OR_KEYWORD:
        raise InputError(
            f"{name} is no hyperparameter, for these stand after `*` in the method's "
            "signature: write "
            f"(task, *, {found})."
        )


def shared(
    options: type[Any],
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Gives a factory the fields of a NamedTuple as further hyperparameters, which it
    gets together, as `on`.

    Their annotations, defaults and entries below `Args:` are those of the NamedTuple,
    whatever factories share them.
    """

    def decorate(factory: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        @functools.wraps(factory)
        def make(task: Task, **values: Any) -> Algorithm:
            given = {
                name: values.pop(name) for name in options._fields if name in values
            }
            return factory(task, on=options(**given), **values)

        hints, kind = (
            typing.get_type_hints(options, include_extras=True),
            inspect.Parameter.KEYWORD_ONLY,
        )
        own = [
            p for p in inspect.signature(factory).parameters.values() if p.name != "on"
        ]
        more = [
            inspect.Parameter(
                name,
                kind,
                default=options._field_defaults[name],
                annotation=hints[name],
            )
            for name in options._fields
        ]
        make.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        make.__doc__ = _with_arguments(
            inspect.getdoc(factory) or "", inspect.getdoc(options) or ""
        )
        return make

    return decorate


def _with_arguments(doc: str, other: str) -> str:
    """A docstring with what another one has below `Args:` at the end of its own."""
    paragraphs, entries = doc.split("\n\n"), other.split("Args:\n")[1]
    place = next(
        (i for i, text in enumerate(paragraphs) if text.startswith("Args:")), None
    )
    if place is None:
        paragraphs.insert(1, "Args:\n" + entries)
    else:
        paragraphs[place] += "\n" + entries
    return "\n\n".join(paragraphs)


def check_value(known: Hyperparameter, value: Any) -> None:
    """Raises InputError unless a value is of the kind, in the range or among the
    choices of what is known of it."""
    if (
        isinstance(value, jax.core.Tracer)
        or not known.known
        or (value is None and known.optional)
    ):
        return
    if not _is(value, known.kind):
        raise InputError(
            f"{known.name}={value!r} must be "
            f"{NOUNS[known.kind]}{' or None' if known.optional else ''}."
        )
    if known.choices:
        errors.choose(known.name, str(value), map(str, known.choices))
    elif known.ranged:
        errors.check(
            known.name,
            value,
            known.low,
            known.high,
            open_low=known.open_low,
            open_high=known.open_high,
        )


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, np.ndarray | np.generic | jax.Array) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    wider: dict[type, type] = {int: numbers.Integral, float: numbers.Real}
    return isinstance(value, wider.get(kind, kind))


def _read(parameter: inspect.Parameter) -> Hyperparameter:
    name, default, annotation = parameter.name, parameter.default, parameter.annotation
    if default is parameter.empty:
        raise InputError(
            f"The hyperparameter {name} has no default: give it one in the method's "
            "signature."
        )
    constraints: list[Any] = []
    choices: tuple[Any, ...] = ()
    optional = False
    while (origin := typing.get_origin(annotation)) in (
        Annotated,
        typing.Union,
        types.UnionType,
    ):
        if origin is Annotated:
            annotation, *more = typing.get_args(annotation)
            constraints += more
            continue
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        optional = optional or type(None) in typing.get_args(annotation)
        annotation = kinds[0] if len(kinds) == 1 else None
    if origin is Literal:
        choices = typing.get_args(annotation)
        annotation = type(choices[0])
    if annotation is parameter.empty:
        annotation = type(default)
    if annotation not in NOUNS:
        return Hyperparameter(
            name, type(default), default, optional=optional, known=False
        )
    recorded = next((one for one in constraints if isinstance(one, Recorded)), None)
    limits = _range(constraints)
    return Hyperparameter(
        name,
        annotation,
        default,
        **limits,
        choices=choices,
        optional=optional,
        recorded=recorded,
    )


def _range(constraints: list[Any]) -> dict[str, Any]:
    """The range that the constraints leave; an infinite end is open as soon as there is
    one."""
    found: dict[str, Any] = {}
    for constraint in constraints:
        for one in (
            constraint
            if isinstance(constraint, annotated_types.GroupedMetadata)
            else [constraint]
        ):
            for end, closed, opened in (("low", "ge", "gt"), ("high", "le", "lt")):
                for attribute in (closed, opened):
                    if isinstance(
                        one, getattr(annotated_types, attribute.capitalize())
                    ):
                        found |= {
                            end: getattr(one, attribute),
                            f"open_{end}": attribute == opened,
                        }
    if found:
        found = {
            "low": -math.inf,
            "high": math.inf,
            "open_low": True,
            "open_high": True,
        } | found
    return found
