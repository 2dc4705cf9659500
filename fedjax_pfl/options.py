"""Options NAME:VALUE:VALUE... of a run: factories with annotated arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fedjax_pfl import hyperparameters, user_code
from fedjax_pfl.errors import InputError, choose

Factory = Callable[..., Any]


class Options(dict[str, Factory]):
    """Factories of one setting by name.

    Values are the arguments of a factory in their order, read as a method's are by
    `hyperparameters`. The caller gives the other arguments.

    Attributes:
      kind: the setting, in messages.
      given: names of the arguments that the caller gives.
      own: makes the option of a user's function FILE.py:NAME, its first argument, and
        of what the caller gives; None: the function itself is the option.
      makes: types of what `own` may return.
      listed: texts are NAME:VALUE,VALUE,... of one value each, and make a list.
    """

    def __init__(
        self,
        kind: str,
        factories: Mapping[str, Factory],
        given: Collection[str] = (),
        own: Factory | None = None,
        makes: tuple[type, ...] = (),
        listed: bool = False,
    ):
        super().__init__(factories)
        self.kind, self.given, self.listed = kind, given, listed
        self.own, self.makes = own, makes

    def read(self, text: str) -> Factory:
        """Returns a function of the caller's arguments, by keyword, that makes the
        option of a text.

        Raises:
          InputError: an unknown name, or a value that its factory does not take.
        """
        name, colon, rest = text.partition(":")
        if name not in self and user_code.named(text):
            function = user_code.load(self.kind, text)
            if self.own is None:
                return lambda **given: function
            return self._own(text, _called(self.own, {"function": function}))
        if self.listed:
            each = [self._read(name, f"{colon}{word}") for word in rest.split(",")]
            return lambda **given: [make(**given) for make in each]
        return self._read(name, f"{colon}{rest}")

    def _own(self, text: str, make: Factory) -> Factory:
        """Returns the user's factory with messages that name it."""

        def checked(**given: Any) -> Any:
            with user_code.blamed(self.kind, text):
                found = make(**given)
                if self.makes and not isinstance(found, self.makes):
                    wanted, got = self.makes[0].__name__, type(found).__name__
                    raise InputError(f"It must return {wanted}, got {got}.")
                return found

        return checked

    def _read(self, name: str, text: str) -> Factory:
        factory = self[choose(self.kind, name, self)]
        given = text[1:] if text else None
        try:
            values = hyperparameters.values(factory, given, self.given)
        except InputError as error:
            raise InputError(f"--{self.kind}={name}{text}: {error}") from None
        return _called(factory, values)

    def arguments(self, name: str) -> list[hyperparameters.Hyperparameter]:
        """Returns the values of an option in their order."""
        return hyperparameters.arguments(self[name], self.given)

    def forms(self) -> list[str]:
        """Returns each name with its values: defaults, or NAMES of those without."""
        return [form(name, self.arguments(name)) for name in self]


def form(name: str, known: Sequence[hyperparameters.Hyperparameter]) -> str:
    """Returns NAME:VALUE:VALUE..., with the defaults of an option as values."""
    empty = (None, inspect.Parameter.empty)
    words = [x.name.upper() if x.default in empty else _text(x.default) for x in known]
    return ":".join([name, *words])


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _called(factory: Factory, values: Mapping[str, Any]) -> Factory:
    """Returns a function of keywords that calls a factory with these values and those
    of the keywords that it takes."""
    takes = inspect.signature(factory).parameters

    def make(**given: Any) -> Any:
        return factory(**values, **{x: given[x] for x in takes if x in given})

    return make
