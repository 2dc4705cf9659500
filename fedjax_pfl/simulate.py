"""An experiment from its task to its rounds: what a user of the library calls."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.data.datasets import Dataset, checked, prepared
from fedjax_pfl.data.federate import public_classes
from fedjax_pfl.engine import callables, validate
from fedjax_pfl.engine.batch import vectorized
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.program import Program, Round, program
from fedjax_pfl.engine.results import Result, record
from fedjax_pfl.engine.rounds import Compiled, compiled, rounds, rounds_at_once
from fedjax_pfl.engine.sampling import sample
from fedjax_pfl.engine.xla import compiler_options
from fedjax_pfl.errors import DivergenceError, InputError, check, choose
from fedjax_pfl.hyperparameters import (
    check as check_hyperparameters,
    defaults as hyperparameters,
)
from fedjax_pfl.types import Array, Federation, Model, PyTree, State, Task

__all__ = [
    "Compiled",
    "DivergenceError",
    "Program",
    "Result",
    "Round",
    "compiled",
    "compiler_options",
    "curve",
    "hyperparameters",
    "program",
    "record",
    "rounds",
    "rounds_at_once",
    "sample",
    "task",
    "vectorized",
    "with_public",
]


# by a task's data set, counts and model
_GIVEN = ("models", "sizes", "class_counts", "num_classes", "input")


def task(
    dataset: Dataset,
    class_counts: np.ndarray | Array,
    model: Model | Sequence[Model],
    *,
    lr: float,
    batch_size: int,
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd,
    **options: Any,
) -> Task:
    """Makes a Task of a data set, a partition's class counts and a model.

    Args:
      class_counts: [N, C] training examples of each client (`Federation.class_counts`).
      model: of every client, or several architectures: client i has model i mod G,
        unless `architecture` [N] is given. One Model listed twice is one architecture,
        as in --model=mlp,mlp; those of two calls of `model` are two.
      optimizer: lr -> optax.GradientTransformation.
      options: further fields of Task: epochs, steps (given alone, in place of epochs),
        rounds, participation, ..., not those that the arguments give.
    """
    checked(dataset)
    models = (
        tuple(model)
        if isinstance(model, Sequence) and not isinstance(model, Model | str)
        else (model,)
    )
    for each in models:
        callables.model(each, dataset)
    for name in options:
        choose(
            "option of a task",
            name,
            [field for field in Task._fields if field not in _GIVEN],
        )
    if options.get("steps") is not None:
        options = {"epochs": None} | options
    counts = validate.class_counts(class_counts, dataset.num_classes)
    example = jax.ShapeDtypeStruct(
        dataset.x.shape[1:], jax.dtypes.canonicalize_dtype(dataset.x.dtype)
    )
    made = Task(
        models,
        # without any, `validate.task` says so
        architecture=np.arange(len(counts)) % max(len(models), 1),
        sizes=counts.sum(axis=1),
        class_counts=counts,
        num_classes=dataset.num_classes,
        input=example,
        prepare=dataset.prepare,
        lr=lr,
        optimizer=optimizer,
        batch_size=batch_size,
        superclass=dataset.superclass,
    )
    return _distinct(validate.task(made._replace(**options)))


def _distinct(task: Task) -> Task:
    """The task with each Model once."""
    distinct = {id(model): model for model in task.models}
    places = np.array([list(distinct).index(id(model)) for model in task.models])
    return task._replace(
        models=tuple(distinct.values()), architecture=places[task.architecture]
    )


def with_public(task: Task, public: Dataset) -> Task:
    """The task with a pool of public examples, those of `federate(..., public=public)`;
    where every y is -1 they have no labels.

    Raises:
      InputError: they cannot be prepared, or prepared are not like the clients' own
        examples.
    """
    kind = jax.dtypes.canonicalize_dtype(public.x.dtype)  # as the federation has it
    classes, batch = public_classes(public), jax.ShapeDtypeStruct(public.x.shape, kind)
    own, pool = task.prepared, prepared(public)
    if (own.shape[1:], own.dtype) != (pool.shape[1:], pool.dtype):
        raise InputError(
            "Public examples must be like the clients' own, "
            f"{own.dtype}{list(own.shape[1:])} prepared, but those of "
            f"{public.name} are {pool.dtype}{list(pool.shape[1:])}."
        )
    return task._replace(
        public=batch, prepare_public=public.prepare, public_classes=classes
    )


def curve(
    program: Program,
    key: Array,
    traced: Traced,
    federation: Federation,
    *,
    rounds: int,
    eval_every: int = 1,
) -> tuple[State, Round, dict[str, Array], dict[str, Array]]:
    """A whole experiment as one pure function of its key and its traced
    hyperparameters, for jax.vmap over seeds and values.

    Args:
      traced: hyperparameters by name; those that are left out are the program's.

    Returns:
      The last state; what is known of the rounds, [rounds, ...]; the scores before
      each, {name: [rounds, N]} (NaN where round t is not evaluated); the scores after
      the last round, {name: [N]}.

    Raises:
      InputError: numbers of rounds, or values of hyperparameters, that cannot be.
    """
    validate.rounds(rounds, eval_every, 0, None, 1)
    if program.on_host:
        raise InputError(
            "This program keeps its clients on the host, where nothing is traced: take "
            "simulate.rounds."
        )
    _check_traced(program, traced)
    if program.task is None:  # of several runs, which have a key each
        validate.kind_of_key(key)
    else:
        validate.key(key)
        validate.federation(program.task, federation)
    traced = {
        name: jnp.asarray(value, float) for name, value in program.traced.items()
    } | traced

    def run(state: State, t: Array) -> dict[str, Array]:
        return program.evaluate(key, traced, federation, state, t)

    def step(state: State, t: Array) -> tuple[State, PyTree]:
        evaluated = (
            (t % eval_every == 0) | (t == rounds - 1) if eval_every else jnp.bool(False)
        )
        shapes = jax.eval_shape(run, state, t)
        nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
        pre = jax.lax.cond(evaluated, run, lambda *_: nothing, state, t)
        state, metrics = program.round(key, traced, federation, state, t, evaluated)
        return state, (metrics, pre)

    state, (metrics, pre) = jax.lax.scan(
        step, program.init(key, traced), jnp.arange(rounds)
    )
    return state, metrics, pre, run(state, jnp.int32(rounds))


def _check_traced(program: Program, values: Traced) -> None:
    """InputError for values that are not of the program's traced hyperparameters, or
    out of their ranges; tracers pass."""
    if not isinstance(values, dict):
        raise InputError(
            f"traced={values!r} must be {{name: value}}: {{}} for the program's own "
            "values."
        )
    for name, value in values.items():
        choose("traced hyperparameter", name, program.traced)
        if program.task is not None and np.ndim(value):
            raise InputError(
                f"{name} is {list(np.shape(value))}: it must be one value; jax.vmap is "
                "for several."
            )
        if name in ("lr", "lr_decay") and not isinstance(value, jax.core.Tracer):
            check(name, value, 0, math.inf, open_low=True)
    if program.static is not None:
        own = {
            name: value
            for name, value in values.items()
            if name not in ("lr", "lr_decay")
        }
        check_hyperparameters(program.static["method"], own)
