"""A method as a function of its traced hyperparameters and of the round."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import evaluation, hyperparameters, optimizers
from fedjax_pfl.algorithms import SEVERAL_ARCHITECTURES
from fedjax_pfl.averaging import BODY_AND_HEAD
from fedjax_pfl.engine import contract, frozen, sampling
from fedjax_pfl.errors import ArchitectureError, ContractError, InputError
from fedjax_pfl.types import Algorithm, Array, PyTree, Task

Traced = dict[str, Array]  # the traced hyperparameters by name


def _sets_rate(task: Task) -> bool:
    if task.work is None:
        return False
    return jax.eval_shape(task.work, jnp.int32(0), jnp.int32(0)).lr is not None


# options that a method may exclude -> does the task have them?
EXCLUDED: dict[str, Callable[[Task], bool]] = {
    "optimizer": lambda task: not optimizers.plain_sgd(task.optimizer, _examples(task)),
    "loss": lambda task: task.loss is not None,
    "label": lambda task: np.dtype(task.label.dtype).kind != "i",
    "positions": lambda task: task.label.shape != (),
    "mix": lambda task: task.mix is not None,
    "lr": _sets_rate,
    "work": lambda task: task.work is not None,
}


def headline(task: Task, made: Algorithm) -> tuple[str, str]:
    """Returns the primary score of a method on a task: its own where labels are
    classes."""
    kind = np.dtype(task.label.dtype).kind
    return evaluation.HEADLINES.get(kind, made.headline)


def bound(
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any],
    lr_decay: float,
) -> tuple[Callable[..., Algorithm], dict[str, float]]:
    """Returns the method as a function of its traced hyperparameters, the round and the
    task's frozen variables, and the values of these hyperparameters.

    Raises:
      InputError: the method does not take the hyperparameters, the task, or the
        clients' architectures.
    """
    hyperparameters.check(factory, hparams)
    known = hyperparameters.of(factory)
    hparams = hyperparameters.defaults(factory) | hparams
    _check(factory, task, hparams)
    task = task._replace(optimizer=optimizers.in_param_types(task.optimizer))
    recorded = sampling.reads_record(task)
    traced = {
        name: float(value)
        for name, value in hparams.items()
        if known[name].traced and value is not None
    }
    static = {name: value for name, value in hparams.items() if name not in traced}
    values = traced | {"lr": float(task.lr), "lr_decay": float(lr_decay)}

    def algorithm(
        given: Traced, t: Array | int, held: tuple[Array, ...] | None = None
    ) -> Algorithm:
        free = {
            name: jnp.asarray(value, jnp.float32)
            for name, value in (values | given).items()
        }
        lr, decay = free.pop("lr"), free.pop("lr_decay")
        lr = lr * decay ** jnp.asarray(t, jnp.float32)
        if task.schedule is not None:
            lr = lr * task.schedule(jnp.asarray(t))
        here = task if held is None else frozen.bind(task, held)
        with contract.named(factory):
            made = factory(here._replace(lr=lr), **static, **free)
            made = sampling.remembered(made, task.num_clients) if recorded else made
        return made._replace(headline=headline(task, made))

    return algorithm, values


def _check(
    factory: Callable[..., Algorithm], task: Task, hparams: dict[str, Any]
) -> None:
    """Raises InputError unless the factory makes an Algorithm for the task; nothing is
    traced."""
    try:
        with contract.named(factory):
            made = factory(task, **hparams)
            if not isinstance(made, Algorithm):
                raise ContractError(
                    f"the factory must return an Algorithm, got {type(made).__name__}."
                )
        if made.one_architecture and len(task.models) > 1:
            raise ArchitectureError
        for option, why in made.excludes.items():
            if EXCLUDED[option](task):
                raise InputError(
                    f"{hyperparameters.method_name(factory)} takes no `{option}` of "
                    f"this kind: {why}."
                )
    except ArchitectureError:
        name = hyperparameters.method_name(factory)
        raise InputError(
            f"{name} needs clients of one architecture, got {len(task.models)}: "
            f"methods for several are {', '.join(SEVERAL_ARCHITECTURES)}."
        ) from None


def _examples(task: Task) -> PyTree:
    """Returns a small tree with the structure of a model's parameters."""
    shapes = jax.eval_shape(task.models[0].init, jax.random.key(0))
    return {
        part: jax.tree.map(lambda x: np.zeros((1,) * x.ndim, np.float32), shapes[part])
        for part in BODY_AND_HEAD
    }
