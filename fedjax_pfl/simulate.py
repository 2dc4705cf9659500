"""The round loop: sample, gather, round, scatter, evaluate."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl.data.datasets import Dataset, checked
from fedjax_pfl.engine import memory, multihost, validate
from fedjax_pfl.engine.memory import Memory
from fedjax_pfl.engine.method import Numbers
from fedjax_pfl.engine.program import Program, Round, program
from fedjax_pfl.engine.results import Result, check_finite, record, without_padding
from fedjax_pfl.engine.sampling import cohort_size, sample
from fedjax_pfl.errors import DivergenceError, InputError, choose
from fedjax_pfl.hyperparameters import defaults as hyperparameters
from fedjax_pfl.types import Array, Federation, Model, PyTree, State, Task

__all__ = [
    "Compiled",
    "DivergenceError",
    "Program",
    "Result",
    "Round",
    "cohort_size",
    "compiled",
    "curve",
    "hyperparameters",
    "program",
    "record",
    "rounds",
    "sample",
    "task",
    "with_public",
]


TOGETHER = 16  # rounds that go to the devices at once, at most
SECONDS = 0.1  # and about how long those take, since nothing is heard of them meanwhile


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
      model: of every client, or several architectures: client i has model i mod G, unless
        `architecture` [N] is given.
      optimizer: lr -> optax.GradientTransformation.
      options: further fields of Task: epochs, steps, rounds, participation, ...
    """
    checked(dataset)
    models = tuple(model) if isinstance(model, Sequence) and not isinstance(model, Model) else (model,)
    for each in models:
        validate.model(each, dataset)
    for name in options:
        choose("option of a task", name, Task._fields)
    counts = validate.class_counts(class_counts, dataset.num_classes)
    example = jax.ShapeDtypeStruct(dataset.x.shape[1:], dataset.x.dtype)
    made = Task(
        models,
        architecture=np.arange(len(counts)) % len(models),
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
    return validate.task(made._replace(**options))


def with_public(task: Task, public: Dataset) -> Task:
    """The task with a pool of public examples, those of `federate(..., public=public)`.

    Raises:
      InputError: prepared, they are not like the clients' own examples.
    """
    batch = jax.ShapeDtypeStruct(public.x.shape, public.x.dtype)
    own = jax.eval_shape(task.prepare, jax.ShapeDtypeStruct((1, *task.input.shape), task.input.dtype))
    pool = jax.eval_shape(public.prepare, batch)
    if (own.shape[1:], own.dtype) != (pool.shape[1:], pool.dtype):
        raise InputError(
            f"Public examples must be like the clients' own, {own.dtype}{list(own.shape[1:])} prepared, but those of "
            f"{public.name} are {pool.dtype}{list(pool.shape[1:])}."
        )
    return task._replace(public=batch, prepare_public=public.prepare, public_classes=public.num_classes)


def curve(
    program: Program, key: Array, numbers: Numbers, federation: Federation, *, rounds: int, eval_every: int = 1
) -> tuple[State, Round, dict[str, Array], dict[str, Array]]:
    """A whole experiment as one pure function of its key and its numbers, for jax.vmap over seeds
    and values.

    Returns:
      The last state; what is known of the rounds, [rounds, ...]; the scores before each, {name:
      [rounds, N]} (NaN where round t is not evaluated); the scores after the last round, {name:
      [N]}.
    """

    def run(state: State, t: Array) -> dict[str, Array]:
        return program.evaluate(key, numbers, federation, state, t)

    def step(state: State, t: Array) -> tuple[State, PyTree]:
        evaluated = (t % eval_every == 0) | (t == rounds - 1) if eval_every else jnp.bool(False)
        shapes = jax.eval_shape(run, state, t)
        nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
        pre = jax.lax.cond(evaluated, run, lambda *_: nothing, state, t)
        state, metrics = program.round(key, numbers, federation, state, t, evaluated)
        return state, (metrics, pre)

    state, (metrics, pre) = jax.lax.scan(step, program.init(key, numbers), jnp.arange(rounds))
    return state, metrics, pre, run(state, jnp.int32(rounds))


class Compiled(NamedTuple):
    """What `rounds` runs, compiled ahead of time."""

    init: Callable[..., State]  # (key, numbers, placement)
    evaluate: Callable[..., dict[str, Array]]  # (key, numbers, federation, State, t)
    step: Callable[
        ..., tuple[State, Round]
    ]  # (key, numbers, federation, State, t, evaluated, count): metrics [count, ...]
    memory: Memory  # of the larger of evaluation and step


def compiled(
    program: Program, key: Array, federation: Federation, *, eval_every: int = 1, state_every: int = 1
) -> Compiled:
    """Compiles the functions that `rounds` runs with these arguments, and accounts for their
    memory."""
    if program.on_host:
        return Compiled(program.init, program.evaluate, _single(program.round), Memory(None, None, None))
    key, numbers, federation = _arguments(program, key, federation)
    init = jax.jit(program.init).lower(key, numbers, federation.placement).compile()
    shapes = jax.eval_shape(program.init, key, numbers, federation.placement)
    where = init.output_shardings
    state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, where)
    t = np.int32(0)
    together = 1 not in (eval_every, state_every)
    run = _several(program) if together else _single(program.round)
    given = (key, numbers, federation, state, t)
    step = jax.jit(run, donate_argnums=3).lower(*given, np.bool_(True), np.int32(1)).compile()
    evaluate = jax.jit(program.evaluate).lower(*given).compile()
    devices = 1 if program.mesh is None else len(program.mesh.local_devices)
    return Compiled(init, evaluate, step, memory.of([evaluate, step], devices=devices))


def _arguments(program: Program, key: Array, federation: Federation) -> tuple[Array, Numbers, Federation]:
    """Key, numbers and federation as the compiled functions take them."""
    numbers = {name: jnp.asarray(value, float) for name, value in program.numbers.items()}
    if not program.on_host:
        federation = federation._replace(placement=program.placement)
    if program.mesh is not None:  # once: a jitted function would copy them to the devices at every call
        key, numbers, federation = multihost.replicate((key, numbers, federation), program.mesh)
    return key, numbers, federation


def rounds(
    program: Program,
    key: Array,
    federation: Federation,
    *,
    rounds: int,
    eval_every: int = 1,
    start: int = 0,
    state: State | None = None,
    state_every: int = 1,
    functions: Compiled | None = None,
    until: Callable[[], bool] | None = None,
) -> Iterator[Result]:
    """Runs an experiment round by round from `start`, and closes with the scores after the last
    round.

    Each function is compiled once; the state's buffers are donated to the next round. Every
    `eval_every`-th round and the last are evaluated, none but the closing one if it is 0. The state
    is sure to be there after every `state_every`-th round and the last: of short rounds between
    those and evaluations several go to the devices at once, since starting one can take as long as
    itself.

    Args:
      functions: what `compiled` returned for the same arguments; None: compiled here.
      until: asked before each round; True: there is no further one, only the closing scores. The
        state is then sure to be there after each evaluated round, too.

    Raises:
      DivergenceError: an active client's loss or state, or the server's, is not finite; that round
        is not yielded.
    """
    validate.rounds(rounds, eval_every, start, state, state_every)
    if program.task is not None:
        validate.federation(program.task, federation)
    run = functions or compiled(program, key, federation, eval_every=eval_every, state_every=state_every)
    key, numbers, federation = _arguments(program, key, federation)
    if state is None:
        state = run.init(key, numbers, federation.placement)
    together = not program.on_host and 1 not in (eval_every, state_every)
    few, t = 1, start
    while t < rounds and not (until is not None and until()):
        wanted = bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)
        pre = multihost.fetch(run.evaluate(key, numbers, federation, state, np.int32(t))) if wanted else None
        alone = not together or (wanted and until is not None)
        count = 1 if alone else min(few, _free(t, rounds, eval_every, state_every))
        begin = time.perf_counter()
        state, metrics = run.step(key, numbers, federation, state, np.int32(t), np.bool_(wanted), np.int32(count))
        metrics = multihost.fetch(metrics)
        if together:
            few = multihost.largest(min(TOGETHER, max(1, int(SECONDS * count / (time.perf_counter() - begin)))))
        for i in range(count):
            one = without_padding(jax.tree.map(lambda x, i=i: x[i], metrics), len(federation.train.size))
            check_finite(t + i, one)
            yield Result(t + i, None if i < count - 1 else state, one, None if i else pre)
        t += count
    yield Result(t, state, None, multihost.fetch(run.evaluate(key, numbers, federation, state, np.int32(t))))


def _free(t: int, rounds: int, eval_every: int, state_every: int) -> int:
    """The rounds from t on to the first after which the state is wanted, or before which scores
    are."""
    ends = [rounds, (t // state_every + 1) * state_every]
    if eval_every:
        ends += [(t // eval_every + 1) * eval_every, max(rounds - 1, t + 1)]
    return min(ends) - t


def _single(step: Callable[..., tuple[State, Round]]) -> Callable[..., tuple[State, Round]]:
    """A round as `_several` has it, for one."""

    def run(
        key: Array, numbers: Numbers, federation: Federation, state: State, t: Array, evaluated: Array, _: Array
    ) -> tuple[State, Round]:
        state, metrics = step(key, numbers, federation, state, t, evaluated)
        return state, jax.tree.map(lambda x: x[None], metrics)

    return run


def _several(program: Program) -> Callable[..., tuple[State, Round]]:
    """Rounds t to t + count - 1; `evaluated` is of the first, the metrics are [TOGETHER, ...].

    However many, each is the same compiled code: a resumed run need not take as many at once.
    """
    step = jax.jit(program.round)  # traced once, for the shapes and in the loop

    def run(
        key: Array, numbers: Numbers, federation: Federation, state: State, t: Array, evaluated: Array, count: Array
    ) -> tuple[State, Round]:
        def one(i: Array, carry: tuple[State, Round]) -> tuple[State, Round]:
            state, metrics = carry
            state, found = step(key, numbers, federation, state, t + i, evaluated & (i == 0))
            return state, jax.tree.map(lambda all, x: all.at[i].set(x), metrics, found)

        shapes = jax.eval_shape(step, key, numbers, federation, state, t, evaluated)[1]
        metrics = jax.tree.map(lambda x: jnp.zeros((TOGETHER, *x.shape), x.dtype), shapes)
        state, metrics = jax.lax.fori_loop(0, count, one, (state, metrics))
        return state, metrics

    return run
