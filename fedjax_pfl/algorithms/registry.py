"""The registry of methods by their names on the command line."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from fedjax_pfl import hyperparameters
from fedjax_pfl.types import Algorithm, Method, Task

Factory = Callable[..., Algorithm | Method]
# {name: factory}, factory(task, **hyperparameters) -> Algorithm or Method
ALGORITHMS: dict[str, Factory] = {}
# names of the methods whose clients may have different architectures
SEVERAL_ARCHITECTURES: list[str] = []
# options of a task that each method excludes, by name, and why
EXCLUDES: dict[str, dict[str, str]] = {}

# reasons by which methods exclude options of a task, as ends of an error's sentence
CLASSES = "it needs one class per example"
OWN_LOSS = "its loss is part of the method"
ONE_RATE = "its equations have one learning rate"
PLAIN_SGD = "its equations hold for plain SGD, without momentum, clipping or schedule"
READS_LABELS = "its loss reads the class of each example"
ROW_TARGETS = "its targets belong to single examples"

# settings of a run that only these methods read
_READ_BY = {
    "public": ("fedmd", "sim_pfd", "topk_pfd", "mnfl_het", "feddf", "pfeddf"),
    "shared_model": ("fml", "fedkd", "fedapen", "fedmrl", "pfedafm"),
}
_OPTIMIZER = (
    *("optimizer", "momentum", "weight_decay", "clip"),
    *("lr", "lr_decay", "schedule"),
)
# settings of a run that a method does not read
_UNREAD = {
    "mocha": (*_OPTIMIZER, "batch_size", "epochs", "steps", "drop_last", "augment"),
    "pfedhn": _OPTIMIZER,
    "feddva": ("model",),
}

F = TypeVar("F", bound=Factory)


def unread(name: str) -> set[str]:
    """Returns the settings that a method of this package does not read."""
    if name not in ALGORITHMS:
        return set()
    others = {setting for setting, names in _READ_BY.items() if name not in names}
    return others | set(_UNREAD.get(name, ()))


def register(
    name: str,
    *,
    several_architectures: bool = False,
    targets: bool = False,
    trainings: int = 0,
    excludes: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[F], F]:
    """Adds a factory to `ALGORITHMS` with the facts of the method; the registered one
    checks its hyperparameters against its signature.

    Args:
      several_architectures: whether clients may differ in their networks.
      targets: whether labels may be other than one class per example, as in regression.
      trainings: as of `Method`; 0: what the factory gives.
      excludes: as of `Method`.
    """
    excluded = dict(excludes) if targets else {**excludes, "label": CLASSES}

    def decorate(factory: F) -> F:
        @functools.wraps(factory)
        def make(task: Task, **values: Any) -> Algorithm | Method:
            hyperparameters.check(factory, values)
            made = factory(task, **values)
            facts: dict[str, Any] = {
                "one_architecture": not several_architectures,
                "excludes": excluded,
            }
            if isinstance(made, Method) and trainings:
                facts["trainings"] = trainings
            return made._replace(**facts)

        ALGORITHMS[name], EXCLUDES[name] = make, excluded
        if several_architectures:
            SEVERAL_ARCHITECTURES.append(name)
        return make  # type: ignore[return-value]

    return decorate
