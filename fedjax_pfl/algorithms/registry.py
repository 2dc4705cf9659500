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

_CLASSES = "it needs one class per example"
_PUBLIC = ("fedmd", "sim_pfd", "topk_pfd", "mnfl_het", "feddf", "pfeddf")
_ROWS = "its targets belong to single examples"
_LABELS = "its loss reads the class of each example"
_OWN = "its loss is part of the method"
_RATE = "its equations have one learning rate"
# option of a task -> methods whose derivation excludes it, and why
EXCLUDES: dict[str, dict[str, str]] = {
    "optimizer": dict.fromkeys(
        ("scaffold", "fednova"),
        "its equations hold for plain SGD, without momentum, clipping or schedule",
    ),
    "loss": dict.fromkeys(
        ("mocha", "pfedc", "privacy_pfedc", "feddva", "fedem", "fedrod", "fedpcl"), _OWN
    ),
    "mix": dict.fromkeys(
        ("mocha", "pfedc", "privacy_pfedc", "fedproto", "fd", "fedem", "fedrod"),
        _LABELS,
    )
    | dict.fromkeys(
        ("fedntd", "fedpac", "feddva", "fedas", "fedtgp", "fedl2g"), _LABELS
    )
    | dict.fromkeys(("gpfl", "fedsr", "fedpcl"), _LABELS)
    | dict.fromkeys(_PUBLIC, _ROWS),
    "positions": dict.fromkeys(
        ("mocha", "feddva", "fedem", "knn_per", "pfedfda", *_PUBLIC), _ROWS
    ),
    "lr": dict.fromkeys(("apfl", "per_fedavg", "pfedme", "fedma", "pfedma"), _RATE),
    "work": {"mocha": "its local work is `frac` of the examples"},
}

# settings of a run that only these methods read
_READ_BY = {
    "public": _PUBLIC,
    "shared_model": ("fml", "fedkd", "fedapen", "fedmrl", "pfedafm"),
}
_OPTIMIZER = ("optimizer", "momentum", "weight_decay", "clip")
# settings of a run that a method does not read
_UNREAD = {
    "mocha": (*_OPTIMIZER, "batch_size", "epochs", "steps", "drop_last"),
    "pfedhn": _OPTIMIZER,
}


def unread(name: str) -> set[str]:
    """Returns the settings that a method of this package does not read."""
    if name not in ALGORITHMS:
        return set()
    others = {setting for setting, names in _READ_BY.items() if name not in names}
    return others | set(_UNREAD.get(name, ()))


# methods that run without one class per example: regression, several labels
ON_TARGETS = frozenset(
    (
        *("local", "fedavg", "fedavg_ft", "fedprox", "scaffold", "fednova", "feddyn"),
        *("fedadmm", "fedma", "pfedma", "fedper", "fedrep", "lg_fedavg", "fedbabu"),
        *("fedbn", "ditto", "apfl", "pfedme", "per_fedavg", "fedamp", "fedfomo"),
        *("fedala", "fedphp", "pfedhn", "fedcp", "pfedafm", "moon", "feddbe"),
        *("apple", "cfl", "fedcross", "fedcac", "fedmtl", "pfedsim", "pfl_da"),
        *("floco", "fedap", "pfedla"),
    )
)


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
            excludes = {x: why[name] for x, why in EXCLUDES.items() if name in why}
            if name not in ON_TARGETS:
                excludes["label"] = _CLASSES
            return made._replace(
                one_architecture=not several_architectures, excludes=excludes
            )

        ALGORITHMS[name] = make
        if several_architectures:
            SEVERAL_ARCHITECTURES.append(name)
        return make

    return decorate
