"""The round loop: sample, gather, round, scatter, evaluate.

Key streams: key -> (init; round t -> (sampling, server, clients)). The sampling stream does not depend on the method,
so two methods with one key see the same clients and, for their main local training, the same batches.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from fedjax_pfl import evaluate, hosts, trees
from fedjax_pfl.checks import BadInput, check, choose
from fedjax_pfl.clients import AXIS, Cohort, deal, make_mesh, sharded, unmarked
from fedjax_pfl.data.sources import Dataset
from fedjax_pfl.types import Algorithm, Array, Federation, Model, PyTree, State, Task

INIT, ROUND, SAMPLING, SERVER, CLIENTS = range(5)


class Program(NamedTuple):
    """One experiment as pure functions; `numbers` are its traced floats (see `program`), t [] int32 is the round."""

    numbers: dict[str, float]
    init: Callable[..., State]  # (key, numbers) -> State
    round: Callable[..., tuple[State, PyTree]]  # (key, numbers, federation, State[N], t, evaluated) -> State, metrics
    evaluate: Callable[..., dict[str, Array]]  # (key, numbers, federation, State[N], t) -> {name: [N]}
    predict: Callable[..., Array]  # (key, numbers, federation, State[N], t, client id [], raw x [B, *input]) -> outputs
    place: Callable[[State], State]  # rows by client id -> rows as the other functions take them, over the devices
    by_id: Callable[[State], State]  # and back; both change nothing on a single device
    mesh: Any = None  # jax.sharding.Mesh of several devices


class Diverged(RuntimeError):
    """A client's loss is not finite any more."""


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
    counts = np.asarray(class_counts)
    sizes, shape, classes = counts.sum(axis=1), dataset.x.shape[1:], dataset.num_classes
    made = Task(model, sizes, counts, classes, shape, dataset.prepare, lr, optimizer, batch_size)
    return made._replace(**{"superclass": dataset.superclass} | options)


def cohort_size(task: Task) -> int:
    """S, the largest number of clients of a round: max(1, floor(rho N))."""
    return max(1, math.floor(task.participation[1] * task.num_clients + 1e-9))


def sample(key: Array, task: Task) -> tuple[Array, Array]:
    """Draws a round's clients: ids [S] distinct, active [S].

    With participation (low, high) their number is uniform on {max(1, floor(low N)), ..., floor(high N)}.
    """
    n, most = task.num_clients, cohort_size(task)
    least = max(1, math.floor(task.participation[0] * n + 1e-9))
    key_ids, key_number = jax.random.split(key)
    number = jax.random.randint(key_number, (), min(least, most), most + 1)
    order = jax.random.permutation(key_ids, n).astype(jnp.int32)
    if most == n:  # everybody has a place, so nothing needs gathering
        return jnp.arange(n, dtype=jnp.int32), jnp.argsort(order) < number
    return order[:most], jnp.arange(most) < number


def check_task(task: Task) -> None:
    """Raises BadInput for numbers that no method can work with."""
    low, high = task.participation
    check("participation", low, 0, 1, open_low=True)
    check("participation", high, 0, 1, open_low=True)
    if low > high:
        raise BadInput(f"participation={low}:{high} is a range from high to low: write it as {high}:{low}.")
    check("lr", task.lr, 0, math.inf, open_low=True)
    check("batch_size", task.batch_size, 1, math.inf)
    check("rounds", task.rounds, 0, math.inf)
    if (task.epochs is None) == (task.steps is None):
        raise BadInput("Local work is either epochs or steps: give exactly one of the two.")
    check("epochs", task.epochs or 0, 0, math.inf)
    check("steps", task.steps or 0, 0, math.inf)


def program(
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    devices: int = 1,
) -> Program:
    """Makes an experiment of a method and a task.

    Over several devices the rows of State.clients lie dealt out by work, N rounded up to a multiple of the devices:
    `by_id` gives them in the clients' order. Round metrics come in the order of their "ids", padding included.
    The devices may be those of several processes, which call the same functions with the same arguments: `hosts.fetch`
    brings results to every host, as `rounds` does by itself.

    The floats among the hyperparameters, `lr` and `lr_decay` (the factor by which lr shrinks a round) become
    `numbers`, arguments of every function, so that other values need no new compilation and can be vmapped over.

    Raises:
      BadInput: for an unknown hyperparameter, a value out of range, or devices that cannot be had (`clients.take`).
    """
    defaults = hyperparameters(factory)
    for name in hparams or {}:
        choose("hyperparameter", name, defaults)
    hparams = defaults | (hparams or {})
    check_task(task)
    factory(task, **hparams)  # ranges are checked on the host, before anything is traced
    is_number = {name: isinstance(value, float) or isinstance(defaults[name], float) for name, value in hparams.items()}
    static = {name: value for name, value in hparams.items() if not is_number[name]}
    numbers = {name: float(value) for name, value in hparams.items() if is_number[name]}
    numbers |= {"lr": float(task.lr), "lr_decay": float(lr_decay)}

    def algorithm(numbers: dict[str, Array], t: Array | int) -> Algorithm:
        free = {name: value for name, value in numbers.items() if name not in ("lr", "lr_decay")}
        lr = numbers["lr"] * numbers["lr_decay"] ** jnp.asarray(t, float)
        return factory(task._replace(lr=lr), **static, **free)

    mesh, n = make_mesh(devices), task.num_clients
    order = np.asarray(deal(jnp.asarray(task.sizes), devices)) if mesh else np.arange(n)  # the clients of the rows
    row = np.argsort(order)  # of each client; those past N are padding

    free = (lambda *args: args) if mesh is None else (lambda *args: unmarked(args))

    def place(state: State) -> State:
        rows = state.clients if mesh is None else trees.gather(state.clients, np.minimum(order, n - 1))
        return _sharded(state._replace(clients=rows), mesh)

    def by_id(state: State) -> State:
        return state if mesh is None else state._replace(clients=trees.gather(state.clients, row[:n]))

    def cohort(key, federation, ids, active, t, evaluated, mesh=mesh) -> Cohort:
        key, options = jax.random.fold_in(_round_key(key, t), CLIENTS), {"width": width, "mesh": mesh}
        return Cohort(federation, task.prepare, ids, active, key=key, round=t, evaluated=evaluated, **options)

    def init(key: Array, numbers: dict[str, Array]) -> State:
        return place(trees.copied(algorithm(numbers, 0).init(jax.random.fold_in(key, INIT))))

    def places(ids: Array, active: Array) -> tuple[Array, Array]:
        """A sample, dealt out to the devices: everybody stays where its row lies."""
        if mesh is None:
            return ids, active
        work = jnp.where(active, jnp.asarray(task.sizes)[ids], 0)
        dealt = jnp.asarray(order, jnp.int32) if len(ids) == n else deal(work, devices)
        known, at = dealt < len(ids), jnp.minimum(dealt, len(ids) - 1)
        return jnp.where(known, ids[at], n + dealt - len(ids)), active[at] & known

    def round(key, numbers, federation, state: State, t, evaluated) -> tuple[State, PyTree]:
        key, numbers, federation, state, t, evaluated = free(key, numbers, federation, state, t, evaluated)
        method = algorithm(numbers, t)
        ids, active = places(*sample(jax.random.fold_in(_round_key(key, t), SAMPLING), task))
        present = cohort(key, federation, ids, active, t, evaluated)
        everybody = ids.shape == order.shape  # at home: no row has to move
        at = sharded(jnp.asarray(row)[ids], mesh, P())
        here = State(state.server, state.clients if everybody else trees.gather(state.clients, at))
        new, metrics = method.round(jax.random.fold_in(_round_key(key, t), SERVER), here, present)
        metrics = metrics | {"traffic": method.traffic(here, present, metrics), "ids": ids, "active": active}
        if everybody:
            clients = trees.where(active, new.clients, state.clients)
        else:
            moved = sharded(new.clients, mesh, P())  # told to all at once: the indices then need not travel
            clients = trees.scatter(state.clients, at, moved, present.active)
        return _sharded(State(new.server, clients), mesh), metrics

    def scores(key, numbers, federation, state: State, t) -> dict[str, Array]:
        key, numbers, federation, state, t = free(key, numbers, federation, state, t)
        method = algorithm(numbers, t)
        ids = jnp.asarray(order, jnp.int32)
        everybody = cohort(key, federation, ids, ids < n, t, jnp.bool(True))

        def client(c, row):
            return evaluate.client(c, method.predict(state.server, row, c), method.score)

        return trees.gather(everybody.map(client, state.clients), row[:n])

    def predict(key, numbers, federation, state: State, t, id, x) -> Array:
        method, ids = algorithm(numbers, t), jnp.asarray(id, jnp.int32)[None]
        alone = cohort(key, federation, ids, ids >= 0, t, jnp.bool(True), mesh=None)

        def client(c, row):
            return method.predict(state.server, row, c)(task.prepare(x), jnp.ones(x.shape[0], bool))

        return alone.map(client, trees.gather(state.clients, jnp.asarray(row)[ids]))[0]

    return Program(numbers, init, round, scores, predict, place, by_id, mesh)


def _sharded(state: State, mesh: Any) -> State:
    """The server's part on every device, the clients' rows each on one."""
    return State(sharded(state.server, mesh, P()), sharded(state.clients, mesh, P(AXIS)))


def _round_key(key: Array, t: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, ROUND), t)


def hyperparameters(factory: Callable[..., Algorithm]) -> dict[str, Any]:
    """The keyword arguments of a factory with their defaults."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


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
    state: State
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
    state=None,
) -> Iterator[Result]:
    """Runs an experiment round by round from `start`, and closes with the scores after the last round.

    Each function is compiled once; the state's buffers are donated to the next round. Every `eval_every`-th round and
    the last are evaluated, none but the closing one if it is 0.

    Raises:
      Diverged: when an active client's loss is not finite, after yielding nothing of that round.
    """
    step = jax.jit(program.round, donate_argnums=3)
    scores = jax.jit(program.evaluate)
    numbers = {name: jnp.asarray(value, float) for name, value in program.numbers.items()}
    if program.mesh is not None:  # once: a jitted function would copy it to the devices at every call
        federation = hosts.replicate(federation, program.mesh)
    if state is None:
        state = jax.jit(program.init)(key, numbers)
    for t in range(start, rounds):
        wanted = bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)
        pre = hosts.fetch(scores(key, numbers, federation, state, jnp.int32(t))) if wanted else None
        state, metrics = step(key, numbers, federation, state, jnp.int32(t), jnp.bool(wanted))
        metrics = _without_padding(hosts.fetch(metrics), len(federation.train.size))
        _check_finite(t, metrics)
        yield Result(t, state, metrics, pre)
    yield Result(rounds, state, None, hosts.fetch(scores(key, numbers, federation, state, jnp.int32(rounds))))


def _without_padding(metrics: PyTree, num_clients: int) -> PyTree:
    """Round metrics of the cohort's clients only, by id."""
    ids = metrics["ids"]
    real = np.argsort(ids)[: np.sum(ids < num_clients)]
    return jax.tree.map(lambda x: x[real] if x.shape[:1] == ids.shape else x, metrics)


def _check_finite(t: int, metrics: PyTree) -> None:
    bad = metrics["active"] & ~np.isfinite(metrics["loss"])
    if bad.any():
        ids = ", ".join(map(str, metrics["ids"][bad][:20]))
        raise Diverged(
            f"The loss of client {ids} is not finite in round {t}: lower --lr, or clip gradients with --clip."
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
        known = ("loss", "post", "traffic", "ids", "active")
        row |= {name: float(np.mean(x[active]) if np.ndim(x) else x) for name, x in m.items() if name not in known}
    return row | _statistics("pre", result.pre or {}, test_sizes)


def _statistics(point: str, scores: dict[str, np.ndarray], weights: np.ndarray) -> dict[str, float]:
    row = {}
    for name, values in scores.items():
        for statistic, value in evaluate.statistics(values, weights).items():
            if not math.isnan(value):
                row[f"{point}/{name}" + ("" if statistic == "macro" else f"_{statistic}")] = value
    return row
