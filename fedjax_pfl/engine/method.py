"""A method and its hyperparameters: checked, then bound as a function of the traced
ones and of the round."""

import traceback
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedjax_pfl import hyperparameters
from fedjax_pfl.algorithms import SEVERAL_ARCHITECTURES
from fedjax_pfl.engine import callables, contract
from fedjax_pfl.errors import ArchitectureError, ContractError, InputError, in_one_line
from fedjax_pfl.types import Algorithm, Array, Task

Traced = dict[str, Array]  # the traced hyperparameters by name


def bound(
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any],
    lr_decay: float,
) -> tuple[Callable[[Traced, Array | int], Algorithm], dict[str, float]]:
    """The method as a function of its traced hyperparameters and the round, and their
    values.

    Raises:
      InputError: a hyperparameter, the task, or the clients' architectures are not as
        the method takes them.
    """
    hyperparameters.check(factory, hparams)
    known = hyperparameters.of(factory)
    hparams = hyperparameters.defaults(factory) | hparams
    try:
        with contract.named(factory):
            # what depends on the task is checked here, before anything is traced
            made = _made(factory, task, hparams)
            contract.check_algorithm(made)
        if made.one_architecture and len(task.models) > 1:
            raise ArchitectureError
    except ArchitectureError:
        name = hyperparameters.method_name(factory)
        raise InputError(
            f"{name} needs clients of one architecture, and there are "
            f"{len(task.models)}: methods for several are "
            f"{', '.join(SEVERAL_ARCHITECTURES)}."
        ) from None
    task = task._replace(optimizer=callables.guarded(task.optimizer))
    traced = {
        name: float(value)
        for name, value in hparams.items()
        if known[name].traced and value is not None
    }
    static = {name: value for name, value in hparams.items() if name not in traced}

    values = traced | {"lr": float(task.lr), "lr_decay": float(lr_decay)}

    def algorithm(traced: Traced, t: Array | int) -> Algorithm:
        traced = {
            name: jnp.asarray(value, jnp.float32)
            for name, value in (values | traced).items()
        }
        free = {
            name: value
            for name, value in traced.items()
            if name not in ("lr", "lr_decay")
        }
        lr = traced["lr"] * traced["lr_decay"] ** jnp.asarray(t, jnp.float32)
        with contract.named(factory, "the factory"):
            return factory(task._replace(lr=lr), **static, **free)

    return algorithm, values


def _made(
    factory: Callable[..., Algorithm], task: Task, hparams: dict[str, Any]
) -> Algorithm:
    """What a factory returns; ContractError where it fails, for it may be the user's
    own."""
    try:
        return factory(task, **hparams)
    except InputError:
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        where = contract.own_line(factory, error) or f"{last.filename}:{last.lineno}"
        raise ContractError(
            f"the factory fails for this task ({in_one_line(error)}, at {where})."
        ) from error
