"""The registry of methods by their names on the command line."""

import functools
from collections.abc import Callable
from typing import Any

from fedjax_pfl import hyperparameters
from fedjax_pfl.types import Algorithm, Task

Factory = Callable[..., Algorithm]
# {name: factory}, factory(task, **hyperparameters) -> Algorithm
ALGORITHMS: dict[str, Factory] = {}
# names of the methods whose clients may have different architectures
SEVERAL_ARCHITECTURES: list[str] = []


def register(
    name: str, *, several_architectures: bool = False
) -> Callable[[Factory], Factory]:
    """Adds a factory to `ALGORITHMS`; the registered one checks its hyperparameters
    against its signature."""

    def decorate(factory: Factory) -> Factory:
        @functools.wraps(factory)
        def make(task: Task, **values: Any) -> Algorithm:
            hyperparameters.check(factory, values)
            made = factory(task, **values)
            return made._replace(one_architecture=not several_architectures)

        ALGORITHMS[name] = make
        if several_architectures:
            SEVERAL_ARCHITECTURES.append(name)
        return make

    return decorate
