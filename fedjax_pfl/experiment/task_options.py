"""Loss, mixing, schedule and sampling of a task by their names on the command line.

A name may have a value, as focal:2. FILE.py:NAME is a function of the user's own, with
the arguments of the field of `Task`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import augment, losses, user_code
from fedjax_pfl.engine import asynchronous
from fedjax_pfl.engine.sampling import power_of_choice
from fedjax_pfl.errors import InputError, choose
from fedjax_pfl.experiment import config as settings
from fedjax_pfl.types import Task

# {name: (value -> the field, the default value)}
LOSSES: dict[str, tuple[Callable[..., Any], float]] = {
    "cross_entropy": (lambda value, counts: None, 0.0),
    "label_smoothing": (lambda value, counts: losses.label_smoothing(value), 0.1),
    "focal": (lambda value, counts: losses.focal(value), 2.0),
    "class_balanced": (losses.class_balanced, 0.999),
}
MIXES: dict[str, tuple[Callable[..., Any], float]] = {
    "none": (lambda value: None, 0.0),
    "mixup": (augment.mixup, 0.2),
    "cutmix": (augment.cutmix, 1.0),
}
# of the learning rate over the rounds
SCHEDULES: dict[str, Callable[[int], Any]] = {
    "constant": lambda rounds: None,
    "cosine": lambda rounds: optax.cosine_decay_schedule(1.0, rounds),
    "warmup_cosine": lambda rounds: _after_warmup(rounds, -(-rounds // 10)),
    "step": lambda rounds: optax.piecewise_constant_schedule(
        1.0, {rounds // 2: 0.1, 3 * rounds // 4: 0.1}
    ),
}
SAMPLINGS: dict[str, tuple[Callable[..., Any], float]] = {
    "uniform": (lambda value, task: None, 0.0),
    "size": (
        lambda value, task: lambda key, t, history: jnp.asarray(task.sizes),
        0.0,
    ),
    "power_of_choice": (lambda value, task: _by_loss(value, task), 0.0),
}

# {name: (function, types of its numbers)}
RULES: dict[str, tuple[Callable[..., Any], Any]] = {
    "fedasync": (asynchronous.fedasync, (float,)),
    "fedbuff": (asynchronous.fedbuff, (int, float)),
}
STALENESS: dict[str, tuple[Callable[..., Any], Any]] = {
    "constant": (asynchronous.constant, ()),
    "polynomial": (asynchronous.polynomial, (float,)),
    "hinge": (asynchronous.hinge, (float, float)),
}


def chosen(config: settings.Config, class_counts: np.ndarray) -> dict[str, Any]:
    """Returns fields of `Task` of the settings.

    Args:
      class_counts: [N, C].
    """
    rounds = max(config.rounds, 1)
    return {
        "loss": _valued("loss", config.loss, LOSSES, class_counts),
        "mix": _valued("mix", config.mix, MIXES),
        "schedule": _named("schedule", config.schedule, SCHEDULES, rounds),
        "metrics": tuple(x for x in config.metrics.split(",") if x != "acc"),
    }


def rule(config: settings.Config) -> asynchronous.Rule | None:
    """Returns the rule of --asynchronous."""
    if config.asynchronous is None:
        return None
    weigh = _made("staleness", config.staleness, STALENESS)
    return _made("asynchronous", config.asynchronous, RULES)._replace(staleness=weigh)


def _made(kind: str, spec: str, known: Mapping[str, tuple[Any, Any]]) -> Any:
    """Returns the result of NAME:NUMBER:NUMBER by its function and the types of its
    numbers."""
    name, *words = spec.split(":")
    make, types = known[choose(kind, name, known)]
    if len(words) > len(types) or (name == "fedbuff" and not words):
        raise InputError(f"--{kind}={spec} has the wrong number of values.")
    return make(*map(settings.parse, types, [kind] * len(words), words))


def sampling(config: settings.Config, task: Task) -> Any:
    """Returns `Task.sampling` for the clients of a task."""
    return _valued("sampling", config.sampling, SAMPLINGS, task)


def _by_loss(value: float, task: Task) -> Any:
    """Returns the power of choice among `value` candidates, by default twice a round's
    clients."""
    most, n = max(task.cohort_sizes), task.num_clients
    candidates = int(value) or min(2 * most, n)
    if candidates != (value or candidates) or not most <= candidates <= n:
        raise InputError(
            f"`power_of_choice` needs a whole number of candidates in [{most}, {n}], "
            f"got {value:g}."
        )
    return power_of_choice(task.sizes, candidates)


def _named(kind: str, name: str, known: Mapping[str, Any], *given: Any) -> Any:
    if user_code.named(name):
        return user_code.load(kind, name)
    return known[choose(kind, name, known)](*given)


def _valued(kind: str, spec: str, known: Mapping[str, Any], *given: Any) -> Any:
    if user_code.named(spec):
        return user_code.load(kind, spec)
    name, _, value = spec.partition(":")
    make, default = known[choose(kind, name, known)]
    number = settings.parse(float, kind, value) if value else default
    return make(number, *given)


def _after_warmup(rounds: int, warmup: int) -> Callable[[Any], Any]:
    """Returns a linear growth to 1 in the first rounds, then half a cosine to 0."""
    decay = optax.cosine_decay_schedule(1.0, max(rounds - warmup, 1))
    return lambda t: jnp.where(t < warmup, (t + 1) / warmup, decay(t - warmup))
