"""The round loop: sample, gather, round, scatter, evaluate."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pfl import evaluate
from fedjax_pfl.data.datasets import Dataset, checked
from fedjax_pfl.engine import multihost, validate
from fedjax_pfl.engine.program import Program, at_home, compiled, hyperparameters, program
from fedjax_pfl.engine.sampling import cohort_size, sample
from fedjax_pfl.errors import choose
from fedjax_pfl.types import Array, Federation, Model, PyTree, State, Task

__all__ = [
    "DivergenceError",
    "Program",
    "Result",
    "cohort_size",
    "curve",
    "hyperparameters",
    "program",
    "record",
    "rounds",
    "sample",
    "task",
]


TOGETHER = 16  # rounds that go to the devices at once, at most
SECONDS = 0.1  # and about how long those take, since nothing is heard of them meanwhile


class DivergenceError(RuntimeError):
    """A client's loss or state is not finite any more, or the server's."""


def task(
    dataset: Dataset,
    class_counts: np.ndarray | Array,
    model: Model,
    *,
    lr: float,
    batch_size: int,
    optimizer: Callable[..., Any] = optax.sgd,
    **options: Any,
) -> Task:
    """Makes a Task of a data set, a partition's class counts and a model.

    Args:
      class_counts: [N, C] training examples of each client (`Federation.class_counts`).
      optimizer: lr -> optax.GradientTransformation.
      options: further fields of Task: epochs, steps, rounds, participation, ...
    """
    checked(dataset)
    validate.model(model, dataset)
    for name in options:
        choose("option of a task", name, Task._fields)
    counts = validate.class_counts(class_counts, dataset.num_classes)
    sizes, shape, classes = counts.sum(axis=1), dataset.x.shape[1:], dataset.num_classes
    made = Task(model, sizes, counts, classes, shape, dataset.prepare, lr, optimizer, batch_size)
    return validate.task(made._replace(**{"superclass": dataset.superclass} | options))


def curve(
    program: Program, key: Array, numbers: dict[str, Array], federation: Federation, *, rounds: int, eval_every: int = 1
) -> tuple[State, PyTree, PyTree]:
    """A whole experiment as one pure function of its key and its numbers, for jax.vmap over seeds and values.

    Returns:
      The last state; the rounds' metrics [rounds, ...] with the scores before each under "pre" (NaN where round t is
      not evaluated); the scores after the last round.
    """
    run = lambda state, t: program.evaluate(key, numbers, federation, state, t)

    def step(state: State, t: Array) -> tuple[State, PyTree]:
        evaluated = (t % eval_every == 0) | (t == rounds - 1) if eval_every else jnp.bool(False)
        shapes = jax.eval_shape(run, state, t)
        nothing = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
        pre = jax.lax.cond(evaluated, run, lambda *_: nothing, state, t)
        state, metrics = program.round(key, numbers, federation, state, t, evaluated)
        return state, metrics | {"pre": pre}

    state, metrics = jax.lax.scan(step, program.init(key, numbers), jnp.arange(rounds))
    return state, metrics, run(state, jnp.int32(rounds))


class Result(NamedTuple):
    """What `rounds` yields for a round: host arrays, and the state after it, valid until the next is asked for."""

    round: int
    state: State | None  # None where not wanted, see `rounds`
    metrics: PyTree | None  # None in the closing row
    pre: dict[str, np.ndarray] | None  # {name: [N]}, scores before the round, where evaluated


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
) -> Iterator[Result]:
    """Runs an experiment round by round from `start`, and closes with the scores after the last round.

    Each function is compiled once; the state's buffers are donated to the next round. Every `eval_every`-th round and
    the last are evaluated, none but the closing one if it is 0. The state is sure to be there after every
    `state_every`-th round and the last: of short rounds between those and evaluations several go to the devices at
    once, since starting one can take as long as itself.

    Raises:
      DivergenceError: an active client's loss or state, or the server's, is not finite; that round is not yielded.
    """
    validate.rounds(rounds, eval_every, start, state, state_every)
    if program.task is not None:
        validate.federation(program.task, federation)
    init, scores, step = compiled(program)
    numbers = {name: jnp.asarray(value, float) for name, value in program.numbers.items()}
    if program.mesh is not None:  # once: a jitted function would copy them to the devices at every call
        key, numbers, federation = multihost.replicate((key, numbers, federation), program.mesh)
    if state is None:
        state = init(key, numbers)
    together = program.functions is not None and 1 not in (eval_every, state_every)
    step, few, t = (_several(program) if together else _single(step)), 1, start
    while t < rounds:
        wanted = bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)
        pre = multihost.fetch(scores(key, numbers, federation, state, np.int32(t))) if wanted else None
        count = min(few, _free(t, rounds, eval_every, state_every)) if together else 1
        begin = time.perf_counter()
        state, metrics = step(key, numbers, federation, state, np.int32(t), np.bool_(wanted), np.int32(count))
        metrics = multihost.fetch(metrics)
        if together and t > start:  # the first round is compiled, too
            few = multihost.largest(min(TOGETHER, max(1, int(SECONDS * count / (time.perf_counter() - begin)))))
        for i in range(count):
            one = _without_padding(jax.tree.map(lambda x, i=i: x[i], metrics), len(federation.train.size))
            _check_finite(t + i, one)
            yield Result(t + i, None if i < count - 1 else state, one, None if i else pre)
        t += count
    yield Result(rounds, state, None, multihost.fetch(scores(key, numbers, federation, state, np.int32(rounds))))


def _free(t: int, rounds: int, eval_every: int, state_every: int) -> int:
    """The rounds from t on to the first after which the state is wanted, or before which scores are."""
    ends = [rounds, (t // state_every + 1) * state_every]
    if eval_every:
        ends += [(t // eval_every + 1) * eval_every, max(rounds - 1, t + 1)]
    return min(ends) - t


def _single(step: Callable[..., tuple[State, PyTree]]) -> Callable[..., tuple[State, PyTree]]:
    """A jitted round as `_several` has it, for one."""

    def run(key, numbers, federation, state, t, evaluated, _) -> tuple[State, PyTree]:
        state, metrics = step(key, numbers, federation, state, t, evaluated)
        return state, jax.tree.map(lambda x: x[None], metrics)

    return run


def _several(program: Program) -> Callable[..., tuple[State, PyTree]]:
    """Rounds t to t + count - 1, jitted; `evaluated` is of the first, the metrics are [TOGETHER, ...].

    However many, each is the same compiled code: a resumed run need not take as many at once.
    """
    assert program.functions is not None
    step = jax.jit(program.functions.round)  # traced once, for the shapes and in the loop

    def run(homes, key, numbers, federation, state: State, t, evaluated, count) -> tuple[State, PyTree]:
        def one(i: Array, carry: tuple[State, PyTree]) -> tuple[State, PyTree]:
            state, metrics = carry
            state, found = step(homes, key, numbers, federation, state, t + i, evaluated & (i == 0))
            return state, jax.tree.map(lambda all, x: all.at[i].set(x), metrics, found)

        shapes = jax.eval_shape(step, homes, key, numbers, federation, state, t, evaluated)[1]
        metrics = jax.tree.map(lambda x: jnp.zeros((TOGETHER, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, count, one, (state, metrics))

    return functools.partial(jax.jit(run, donate_argnums=4), at_home(program))


def _without_padding(metrics: PyTree, num_clients: int) -> PyTree:
    """Round metrics of the cohort's clients only, by id."""
    ids = metrics["ids"]
    real = np.argsort(ids)[: np.sum(ids < num_clients)]
    return jax.tree.map(lambda x: x[real] if x.shape[:1] == ids.shape else x, metrics)


def _check_finite(t: int, metrics: PyTree) -> None:
    # the loss may be of another model than the one that is kept, as Ditto's is
    found = {"loss": ~np.isfinite(metrics["loss"]), "state (or the server's)": ~metrics["finite"]}
    for what, bad in found.items():
        if (bad := bad & metrics["active"]).any():
            ids = ", ".join(map(str, metrics["ids"][bad][:20]))
            raise DivergenceError(
                f"The {what} of client {ids} is not finite in round {t}: lower --lr, or clip gradients with --clip."
            )


def record(result: Result, test_sizes: np.ndarray) -> dict[str, Any]:
    """The row of a metrics table for one round: statistics over clients, without per-client vectors.

    Args:
      test_sizes: [N] test examples.

    Returns:
      round, loss (mean over participants), participants, traffic, and for every score pre/NAME (macro),
      pre/NAME_micro, _std, _worst10 and _best10, likewise post/.
    """
    row: dict[str, Any] = {"round": result.round}
    if result.metrics is not None:
        m = result.metrics
        active, ids = m["active"], m["ids"]
        row |= {"loss": float(np.mean(m["loss"][active])), "participants": int(active.sum())}
        sent = {name: x for name, x in m["traffic"]._asdict().items() if x is not None}
        row |= {f"traffic/{name}": int(np.asarray(x, np.int64).sum()) for name, x in sent.items()}
        row |= _statistics("post", {k: np.where(active, v, np.nan) for k, v in m["post"].items()}, test_sizes[ids])
        known = ("loss", "post", "traffic", "ids", "active", "finite")
        row |= {name: float(np.mean(x[active]) if np.ndim(x) else x) for name, x in m.items() if name not in known}
    return row | _statistics("pre", result.pre or {}, test_sizes)


def _statistics(point: str, scores: dict[str, np.ndarray], weights: np.ndarray) -> dict[str, float]:
    row = {}
    for name, values in scores.items():
        for statistic, value in evaluate.statistics(values, weights).items():
            if not math.isnan(value):
                row[f"{point}/{name}" + ("" if statistic == "macro" else f"_{statistic}")] = value
    return row
