"""A method as a function of its traced hyperparameters and of the round."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import hyperparameters, optimizers
from fedjax_pfl.algorithms import SEVERAL_ARCHITECTURES
from fedjax_pfl.averaging import BODY_AND_HEAD
from fedjax_pfl.engine import contract
from fedjax_pfl.errors import ArchitectureError, ContractError, InputError
from fedjax_pfl.types import Algorithm, Array, PyTree, Task

Traced = dict[str, Array]  # the traced hyperparameters by name


def bound(
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any],
    lr_decay: float,
) -> tuple[Callable[[Traced, Array | int], Algorithm], dict[str, float]]:
    """Returns the method as a function of its traced hyperparameters and the round, and
    the values of these hyperparameters.

    Raises:
      InputError: the method does not take the hyperparameters, the task, or the
        clients' architectures.
    """
    hyperparameters.check(factory, hparams)
    known = hyperparameters.of(factory)
    hparams = hyperparameters.defaults(factory) | hparams
    _check(factory, task, hparams)
    task = task._replace(optimizer=optimizers.in_param_types(task.optimizer))
    traced = {
        name: float(value)
        for name, value in hparams.items()
        if known[name].traced and value is not None
    }
    static = {name: value for name, value in hparams.items() if name not in traced}
    values = traced | {"lr": float(task.lr), "lr_decay": float(lr_decay)}

    def algorithm(given: Traced, t: Array | int) -> Algorithm:
        free = {
            name: jnp.asarray(value, jnp.float32)
            for name, value in (values | given).items()
        }
        lr, decay = free.pop("lr"), free.pop("lr_decay")
        lr = lr * decay ** jnp.asarray(t, jnp.float32)
        with contract.named(factory):
            return factory(task._replace(lr=lr), **static, **free)

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
        if made.plain_sgd and not optimizers.plain_sgd(task.optimizer, _examples(task)):
            raise InputError(
                f"{hyperparameters.method_name(factory)} needs plain SGD, without "
                f"momentum, clipping or schedule: {made.plain_sgd}."
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
