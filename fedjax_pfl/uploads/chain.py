"""Options on what clients send, as a chain: `optax.chain` for uploads.

An option is data, the factory of an `Upload` and its numbers, so that the numbers are
traced as a method's hyperparameters are. They are named by the kind of the option:
`compress.fraction`, `private.noise`, and `compress_2.levels` of a second one.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedjax_pfl import hyperparameters, keys
from fedjax_pfl.errors import InputError
from fedjax_pfl.hyperparameters import Hyperparameter
from fedjax_pfl.types import Array, Client, PyTree, Task, Upload


class Option(NamedTuple):
    """A factory and the values of its arguments; made anew in each trace."""

    kind: str
    factory: Callable[..., Any]  # -> Upload, or a server's GradientTransformation
    values: dict[str, Any]

    @property
    def traced(self) -> dict[str, float]:
        """Values of the arguments annotated float, which are traced."""
        known = _arguments(self.factory)
        return {
            name: float(value)
            for name, value in self.values.items()
            if known[name].traced and value is not None
        }

    def made(self, given: Mapping[str, Any] | None = None) -> Any:
        """Returns the result of the factory; `given` replaces values."""
        return self.factory(**(self.values | dict(given or {})))


def option(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Option]]:
    """Returns a decorator by which a factory returns an `Option` of this kind.

    Annotations of the factory's arguments give their types and ranges, as those of a
    method's hyperparameters do.
    """

    def decorate(factory: Callable[..., Any]) -> Callable[..., Option]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Option:
            bound = inspect.signature(factory).bind(*args, **kwargs)
            bound.apply_defaults()
            known = _arguments(factory)
            for name, value in bound.arguments.items():
                hyperparameters.check_value(known[name], value)
            return Option(kind, factory, dict(bound.arguments))

        return make

    return decorate


def _arguments(factory: Callable[..., Any]) -> dict[str, Hyperparameter]:
    return {known.name: known for known in hyperparameters.arguments(factory)}


class Chain(NamedTuple):
    """Options on uploads in their order at the clients; at the server the order is
    reversed."""

    parts: tuple[Option | Upload, ...] = ()

    @property
    def named(self) -> dict[str, Option | Upload]:
        """The parts by name: the kind, and its number from the second on."""
        found: dict[str, Option | Upload] = {}
        for part in self.parts:
            kind = part.kind if isinstance(part, Option) else "upload"
            same = [name for name in found if name.split("_")[0] == kind]
            found[f"{kind}_{len(same) + 1}" if same else kind] = part
        return found


def chain(*parts: Option | Upload) -> Chain:
    """Returns options on what clients send, to be applied one after another.

    Args:
      parts: `top_k(0.1)`, `attack("sign_flip")`, `robust("median")`, `private()`, ...,
        or an `Upload` of one's own. An option that is private is the last.

    Raises:
      InputError: two options replace the weighted mean, or the order is another.
    """
    made = [part.made() if isinstance(part, Option) else part for part in parts]
    for part, given in zip(made, parts, strict=True):
        if not isinstance(part, Upload):
            raise InputError(f"`chain` takes options on uploads, got {given!r}.")
    rules = sum(part.combine is not None for part in made)
    if rules > 1:
        raise InputError(f"A chain has at most one rule for the mean, got {rules}.")
    if any(part.weight is not None for part in made[:-1]):
        raise InputError("`private` must be the last option of a chain.")
    if rules and made[-1].weight is not None:
        raise InputError("`private` needs the mean of the updates, got a robust rule.")
    return Chain(parts)


def numbers(options: Mapping[str, Any]) -> dict[str, float]:
    """Returns the traced numbers of options, {name.argument: value}."""
    return {
        f"{name}.{argument}": value
        for name, part in options.items()
        if isinstance(part, Option)
        for argument, value in part.traced.items()
    }


def instances(options: Mapping[str, Any], given: Mapping[str, Array]) -> dict[str, Any]:
    """Returns what the options make with traced numbers in place of their values."""

    def one(name: str, part: Any) -> Any:
        if not isinstance(part, Option):
            return part
        prefix = f"{name}."
        own = {
            k.removeprefix(prefix): x for k, x in given.items() if k.startswith(prefix)
        }
        return part.made(own)

    return {name: one(name, part) for name, part in options.items()}


def composed(parts: Mapping[str, Upload]) -> Upload:
    """Returns several changes of uploads as one."""
    each = list(parts.values())
    # a second option of a kind draws other numbers than the first
    again = [int(name.partition("_")[2] or 1) - 1 for name in parts]

    def init(like: PyTree) -> tuple[PyTree, PyTree]:
        pairs = [part.init(like) for part in each]
        return tuple(server for server, _ in pairs), tuple(row for _, row in pairs)

    def client(
        c: Client, update: PyTree, servers: PyTree, rows: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        new, seen = [], []
        for part, n, server, row in zip(each, again, servers, rows, strict=True):
            key = keys.fold(c.key, keys.Client.OPTION, n) if n else c.key
            update, row, known = part.client(c._replace(key=key), update, server, row)
            new.append(row)
            seen.append(known)
        return update, tuple(new), tuple(seen)

    def server(
        key: Array, mean: PyTree, seen: PyTree, active: Array, servers: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Array]]:
        new, shown = list(servers), dict[str, Array]()
        for i, part in reversed(list(enumerate(each))):
            if part.server is None:
                continue
            mine = keys.fold(key, keys.Server.OPTION, again[i]) if again[i] else key
            mean, new[i], more = part.server(mine, mean, seen[i], active, servers[i])
            shown |= more
        return mean, tuple(new), shown

    def check(task: Task) -> None:
        for part in each:
            if part.check is not None:
                part.check(task)

    def last(field: str) -> Any:
        found = [x for x in (getattr(part, field) for part in each) if x is not None]
        return found[-1] if found else None

    return Upload(
        init,
        client,
        server if last("server") else None,
        weight=last("weight"),
        combine=last("combine"),
        size=last("size"),
        check=check,
    )


def random_like(key: Array, tree: PyTree) -> PyTree:
    """Draws standard normal numbers, independent in every leaf, in the leaves'
    types."""
    leaves, structure = jax.tree.flatten(tree)
    draws = [
        jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, draws)
