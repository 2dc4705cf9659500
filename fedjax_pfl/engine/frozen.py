"""Frozen variables of a task's models, as arguments of a round.

They are neither constants of the program nor in a state: every device has one copy for
all clients, which methods reach through the models they are given.
"""

import jax

from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Federation, Model, Task


def values(task: Task) -> tuple[Array, ...]:
    """Returns the frozen arrays of the task's models; an array of several models
    occurs once."""
    found: dict[int, Array] = {}
    for frozen in filter(None, (model.frozen for model in _models(task))):
        found |= {id(x): x for x in jax.tree.leaves(frozen.values)}
    return tuple(found.values())


def bind(task: Task, given: tuple[Array, ...] | None) -> Task:
    """Returns the task with models that compute with other arrays of the same shapes.

    Args:
      given: arrays in the order of `values`, such as `Federation.frozen`.

    Raises:
      InputError: `given` is None, and a model has frozen variables.
    """
    known = values(task)
    if not known:
        return task
    if given is None:
        raise InputError(
            "The federation must have the frozen variables of the task's models: use "
            "simulate.with_frozen(federation, task)."
        )
    arrays = {id(x): new for x, new in zip(known, given, strict=True)}

    def bound(model: Model) -> Model:
        if model.frozen is None:
            return model
        new = jax.tree.map(lambda x: arrays[id(x)], model.frozen.values)
        features, head, apply = model.frozen.functions(new)
        frozen = model.frozen._replace(values=new)
        return model._replace(features=features, head=head, apply=apply, frozen=frozen)

    made = {id(model): bound(model) for model in _models(task)}
    shared = None if task.shared is None else made[id(task.shared)]
    return task._replace(
        models=tuple(made[id(model)] for model in task.models), shared=shared
    )


def with_frozen(federation: Federation, task: Task | None) -> Federation:
    """Adds the frozen variables of the task's models to a federation; without a task
    nothing."""
    if task is None:
        return federation
    return federation._replace(frozen=values(task) or None)


def _models(task: Task) -> list[Model]:
    shared = () if task.shared is None else (task.shared,)
    return list({id(model): model for model in (*task.models, *shared)}.values())
