"""An experiment from its task to its rounds: the functions for users of the library."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.data.datasets import Dataset, checked, label_type, prepared
from fedjax_pfl.data.partition import Partition, class_counts as counts_of
from fedjax_pfl.engine import validate
from fedjax_pfl.engine.batch import vectorized
from fedjax_pfl.engine.frozen import with_frozen
from fedjax_pfl.engine.method import Traced, as_arrays
from fedjax_pfl.engine.parts import Round
from fedjax_pfl.engine.phases import Phase, phases
from fedjax_pfl.engine.program import Program, program
from fedjax_pfl.engine.results import Result, record
from fedjax_pfl.engine.rounds import Compiled, compiled, rounds, rounds_at_once
from fedjax_pfl.engine.sampling import sample
from fedjax_pfl.engine.xla import compiler_options
from fedjax_pfl.errors import DivergenceError, InputError, choose
from fedjax_pfl.hyperparameters import defaults as hyperparameters
from fedjax_pfl.types import (
    Array,
    Context,
    Federation,
    History,
    Model,
    PyTree,
    RunState,
    Task,
    Work,
)

__all__ = [
    "Compiled",
    "Context",
    "DivergenceError",
    "Phase",
    "Program",
    "Result",
    "Round",
    "compiled",
    "compiler_options",
    "curve",
    "hyperparameters",
    "phases",
    "program",
    "record",
    "rounds",
    "rounds_at_once",
    "sample",
    "task",
    "vectorized",
    "with_frozen",
    "with_public",
    "with_validation",
]

VAL = "val/"  # prefix of scores on validation examples


def task(
    dataset: Dataset,
    class_counts: np.ndarray | Array | Federation | Partition,
    model: Model | Sequence[Model],
    *,
    lr: float,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    drop_last: bool = False,
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd,
    schedule: Callable[[Array], Array] | None = None,
    loss: Callable[[Array, Array, Array], Array] | None = None,
    augment: Callable[[Array, Array], Array] | None = None,
    mix: Callable[..., tuple[Array, Array]] | None = None,
    per_example: Callable[[Array, PyTree, Array], PyTree] | None = None,
    rounds: int | None = None,
    participation: float | tuple[float, float] = 1.0,
    sampling: Callable[[Array, Array, History], Array] | None = None,
    work: Callable[[Array, Array], Work] | None = None,
    metrics: str | Sequence[str] = (),
    bn_stats: str = "aggregate",
    architecture: np.ndarray | Sequence[int] | None = None,
    shared: Model | None = None,
    malicious: np.ndarray | None = None,
    loop: str = "dynamic",
) -> Task:
    """Makes a Task from a data set, a partition's class counts and a model.

    Args:
      class_counts: [N, C] training labels of each client (`Federation.class_counts`),
        or the Federation or the Partition, from which examples of several labels take
        the clients' sizes.
      model: of every client, or several architectures: client i has model i mod G,
        unless `architecture` [N] is given. One Model listed twice is one architecture.
      epochs: local epochs per round; default: 1, without `steps`.
      steps: local steps per round, in place of epochs.
      optimizer: lr -> optax.GradientTransformation.
      metrics: further scores of logits, or `lora_error`, names in `evaluation.FURTHER`,
        or one name. `acc` is always among the scores of classes.

    The other arguments are the fields of `Task`.

    Raises:
      InputError: a value is invalid, or data, model and counts do not fit.
    """
    checked(dataset)
    several = isinstance(model, Sequence) and not isinstance(model, Model | str)
    models: tuple[Any, ...] = tuple(model) if several else (model,)
    for each in models:
        validate.model(each, dataset)
    sizes = getattr(class_counts, "train_sizes", None)
    if isinstance(class_counts, Federation):
        sizes = np.asarray(class_counts.train.size)
    if isinstance(class_counts, Partition):
        class_counts = counts_of(class_counts, dataset)
    counts = validate.class_counts(class_counts, dataset.num_classes)
    if architecture is None:
        # `validate.task` raises if there is no model
        architecture = np.arange(len(counts)) % max(len(models), 1)
    dtype = jax.dtypes.canonicalize_dtype(dataset.x.dtype)
    made = Task(
        models,
        architecture=np.asarray(architecture),
        sizes=counts.sum(axis=1) if sizes is None else sizes,
        class_counts=counts,
        num_classes=dataset.num_classes,
        input=jax.ShapeDtypeStruct(dataset.x.shape[1:], dtype),
        label=jax.ShapeDtypeStruct(dataset.y.shape[1:], label_type(dataset.y)),
        prepare=dataset.prepare,
        superclass=dataset.superclass,
        lr=lr,
        batch_size=batch_size,
        epochs=1 if epochs is None and steps is None else epochs,
        steps=steps,
        drop_last=drop_last,
        optimizer=optimizer,
        schedule=schedule,
        loss=loss,
        augment=augment,
        mix=mix,
        per_example=per_example,
        rounds=rounds,
        participation=participation,  # type: ignore[arg-type]  # `validate` makes a pair
        sampling=sampling,
        work=work,
        metrics=metrics,  # type: ignore[arg-type]  # likewise
        bn_stats=bn_stats,
        shared=shared,
        malicious=malicious,
        loop=loop,
    )
    found = validate.task(made)
    distinct = {id(model): model for model in found.models}
    index = np.array([list(distinct).index(id(model)) for model in found.models])
    return found._replace(
        models=tuple(distinct.values()), architecture=index[found.architecture]
    )


def with_public(task: Task, public: Dataset) -> Task:
    """Adds a pool of public examples to a task, that of `federate(..., public=public)`;
    their labels are not used.

    Raises:
      InputError: prepared, they are not like the clients' examples.
    """
    own, pool = task.prepared, prepared(public)
    if (own.shape[1:], own.dtype) != (pool.shape[1:], pool.dtype):
        raise InputError(
            f"Public examples must be {own.dtype}{list(own.shape[1:])} after "
            f"`prepare`, as those of clients, got {pool.dtype}{list(pool.shape[1:])}."
        )
    dtype = jax.dtypes.canonicalize_dtype(public.x.dtype)  # as in the federation
    return task._replace(
        public=jax.ShapeDtypeStruct(public.x.shape, dtype),
        prepare_public=public.prepare,
    )


def with_validation(program: Program, federation: Federation) -> Program:
    """Returns the program that also scores validation examples, as `val/NAME`, if the
    federation has room for any."""
    inner = program.evaluate

    def evaluate(context: Context, state: RunState) -> dict[str, Array]:
        f = context.federation
        held_out = inner(context._replace(federation=f._replace(test=f.val)), state)
        found = inner(context, state)
        known = {x: values for x, values in held_out.items() if not x.startswith(VAL)}
        return found | {VAL + name: values for name, values in known.items()}

    has_some = federation.val.index.shape[-1] > 0
    return program._replace(evaluate=evaluate) if has_some else program


def curve(
    program: Program,
    key: Array,
    traced: Traced,
    federation: Federation,
    *,
    rounds: int,
    eval_every: int = 1,
) -> tuple[RunState, Round, dict[str, Array], dict[str, Array]]:
    """Runs an experiment as one pure function of its key and its traced
    hyperparameters, for jax.vmap over seeds and values.

    Args:
      traced: hyperparameters by name; the others are the program's.

    Returns:
      the last state; the results of the rounds, [rounds, ...]; the scores before each
      round, {name: [rounds, N]} (NaN where it is not evaluated); the scores after the
      last round, {name: [N]}. The scores on validation examples are `val/NAME`.

    Raises:
      InputError: numbers of rounds or names of hyperparameters are invalid.
    """
    validate.rounds(rounds, eval_every, 0, None, 1, program.most_rounds)
    for name in traced:
        choose("traced hyperparameter", name, program.traced)
    if program.task is not None:  # else of several runs, which have a key each
        validate.key(key)
        validate.federation(program.task, federation)
    context = Context(key, as_arrays(program.traced | traced), federation, 0)
    evaluate = with_validation(program, federation).evaluate

    def run(state: RunState, t: Array) -> dict[str, Array]:
        return evaluate(context._replace(t=t), state)

    def step(
        state: RunState, t: Array
    ) -> tuple[RunState, tuple[Round, dict[str, Array]]]:
        evaluated = jnp.bool(False)
        if eval_every:
            evaluated = (t % eval_every == 0) | (t == rounds - 1)
        shapes = jax.eval_shape(run, state, t)
        nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
        pre = jax.lax.cond(evaluated, run, lambda *_: nothing, state, t)
        state, metrics = program.round(context._replace(t=t), state, evaluated)
        return state, (metrics, pre)

    start = program.init(key, context.traced)
    state, (metrics, pre) = jax.lax.scan(step, start, jnp.arange(rounds))
    return state, metrics, pre, run(state, jnp.int32(rounds))
