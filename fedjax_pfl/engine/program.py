"""One experiment as pure functions of its key and its numbers.

Key streams: key -> (init; round t -> (sampling, server, clients)). The sampling stream does not depend on the method,
so two methods with one key see the same clients and, for their main local training, the same batches.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from fedjax_pfl import evaluate, local, trees
from fedjax_pfl.engine import multihost, validate
from fedjax_pfl.engine.cohort import AXIS, Cohort, deal, make_mesh, sharded, unmarked
from fedjax_pfl.engine.sampling import cohort_size, sample
from fedjax_pfl.types import Algorithm, Array, PyTree, State, Task

INIT, ROUND, SAMPLING, SERVER, CLIENTS = range(5)


class Parts(NamedTuple):
    """What the functions of a Program are made of, for clients whose rows are at hand: ids and rows are [S, ...]."""

    init: Callable[..., State]  # (key, numbers) -> State[N], rows by client id
    draw: Callable[..., tuple[Array, Array]]  # (key, t) -> the round's ids and which are active
    train: Callable[..., tuple[State, PyTree]]  # (key, numbers, federation, State, ids, active, t, evaluated)
    score: Callable[..., dict[str, Array]]  # (key, numbers, federation, State, ids, t) -> {name: [S]}


class Homes(NamedTuple):
    """Where the clients' rows lie over several devices: R of them, N rounded up to a multiple of the devices."""

    client: Array  # [R] int32, whose row it is; N or more: nobody's
    row: Array  # [R] int32, the row of each client
    steps: Array  # [N] int32, by which they were dealt out


class Functions(NamedTuple):
    """Those of a Program, with the clients' homes as one more argument, at first: what is compiled of them serves every
    partition that has arrays of the same shapes."""

    init: Callable[..., State]
    round: Callable[..., tuple[State, PyTree]]
    evaluate: Callable[..., dict[str, Array]]
    predict: Callable[..., Array]


class Program(NamedTuple):
    """One experiment as pure functions; `numbers` are its traced floats (see `program`), t [] int32 is the round."""

    numbers: dict[str, float]
    init: Callable[..., State]  # (key, numbers) -> State
    round: Callable[..., tuple[State, PyTree]]  # (key, numbers, federation, State[N], t, evaluated) -> State, metrics
    evaluate: Callable[..., dict[str, Array]]  # (key, numbers, federation, State[N], t) -> {name: [N]}
    predict: Callable[..., Array]  # (key, numbers, federation, State[N], t, client id [], raw x [B, *input]) -> outputs
    place: Callable[[State], State]  # rows by client id -> rows as the other functions take them, over the devices
    by_id: Callable[[State], State]  # and back; both change nothing on a single device
    parts: Parts
    functions: Functions | None  # to be jitted; None where the rows are NumPy arrays and nothing can be (`offload`)
    homes: Homes | None = None  # None on a single device
    mesh: Any = None  # jax.sharding.Mesh of several devices
    task: Task | None = None  # that it was made for


def hyperparameters(factory: Callable[..., Algorithm]) -> dict[str, Any]:
    """The keyword arguments of a factory with their defaults."""
    parameters = inspect.signature(factory).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def program(
    factory: Callable[..., Algorithm] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    devices: int = 1,
) -> Program:
    """Makes an experiment of a method and a task.

    Over several devices the rows of State.clients lie dealt out by work, N rounded up to a multiple of the devices:
    `by_id` gives them in the clients' order. Round metrics come in the order of their "ids", padding included; "finite"
    [S] is False for whom the state, or the server's, is not finite any more.
    The devices may be those of several processes, which call the same functions with the same arguments:
    `multihost.fetch` brings results to every host, as `simulate.rounds` does by itself.

    The floats among the hyperparameters, `lr` and `lr_decay` (the factor by which lr shrinks a round) become
    `numbers`, arguments of every function, so that other values need no new compilation and can be vmapped over.

    Raises:
      InputError: for an unknown hyperparameter, a value out of range, or devices that cannot be had (`clients.take`).
    """
    factory, task = validate.method(factory), validate.task(task)
    validate.layout(lr_decay, width, devices)
    algorithm, numbers = _bound(factory, task, hparams or {}, lr_decay)
    mesh, n = make_mesh(devices), task.num_clients
    homes = None if mesh is None else _homes(task, devices)
    everybody = cohort_size(task) == n  # then each stays at home and no row has to move
    parts = _parts(algorithm, task, width, mesh)
    free = (lambda *args: args) if mesh is None else (lambda *args: unmarked(args))

    def place(homes: Homes | None, state: State) -> State:
        rows = state.clients if homes is None else trees.gather(state.clients, jnp.minimum(homes.client, n - 1))
        return _sharded(state._replace(clients=rows), mesh)

    def by_id(state: State) -> State:
        return state if homes is None else state._replace(clients=trees.gather(state.clients, homes.row[:n]))

    def init(homes, key: Array, numbers: dict[str, Array]) -> State:
        return place(homes, parts.init(key, numbers))

    def round(homes, key, numbers, federation, state: State, t, evaluated) -> tuple[State, PyTree]:
        homes, key, numbers, federation = free(homes, key, numbers, federation)
        state, t, evaluated = free(state, t, evaluated)
        ids, active = parts.draw(homes, key, t)
        at = ids if homes is None else sharded(jnp.asarray(homes.row)[ids], mesh, P())
        # told to all, as the sum over devices is anyway: else the indices would travel, leaf by leaf
        rows = state.clients if everybody else sharded(trees.gather(state.clients, at), mesh, P())
        new, metrics = parts.train(key, numbers, federation, State(state.server, rows), ids, active, t, evaluated)
        if everybody:
            clients = trees.where(active, new.clients, state.clients)
        else:
            moved = sharded(new.clients, mesh, P())  # told to all at once: the indices then need not travel
            clients = trees.scatter(state.clients, at, moved, sharded(active, mesh, P()))
        return _sharded(State(new.server, clients), mesh), metrics

    def scores(homes, key, numbers, federation, state: State, t) -> dict[str, Array]:
        homes, key, numbers, federation, state, t = free(homes, key, numbers, federation, state, t)
        ids = jnp.arange(n, dtype=jnp.int32) if homes is None else jnp.asarray(homes.client)
        found = parts.score(key, numbers, federation, state, ids, t)
        return found if homes is None else trees.gather(found, homes.row[:n])

    def predict(homes, key, numbers, federation, state: State, t, id, x) -> Array:
        method, ids = algorithm(numbers, t), jnp.asarray(id, jnp.int32)[None]
        options = {"key": clients_key(key, t), "round": t, "evaluated": jnp.bool(True), "width": 1}
        alone = Cohort(federation, task.prepare, ids, ids >= 0, **options)

        def client(c, row):
            return method.predict(state.server, row, c)(task.prepare(x), jnp.ones(x.shape[0], bool))

        at = ids if homes is None else jnp.asarray(homes.row)[ids]
        return alone.map(client, trees.gather(state.clients, at))[0]

    functions = Functions(init, round, scores, predict)
    bound = [functools.partial(f, homes) for f in functions]
    placed, drawn = (functools.partial(f, homes) for f in (jax.jit(place), parts.draw))
    return Program(numbers, *bound, placed, by_id, parts._replace(draw=drawn), functions, homes, mesh, task)  # type: ignore


def compiled(program: Program) -> tuple[Callable, Callable, Callable]:
    """Its init, evaluate and round, jitted; the round overwrites the state it is given."""
    f, homes = program.functions, at_home(program)
    if f is None:
        return program.init, program.evaluate, program.round
    jitted = jax.jit(f.init), jax.jit(f.evaluate), jax.jit(f.round, donate_argnums=4)
    init, scores, step = (functools.partial(function, homes) for function in jitted)
    return init, scores, step


def at_home(program: Program) -> Homes | None:
    """The clients' homes, on all devices."""
    return None if program.homes is None else multihost.replicate(program.homes, program.mesh)


def _bound(factory: Callable[..., Algorithm], task: Task, hparams: dict[str, Any], lr_decay: float):
    """The method as a function of its numbers and the round, and the numbers."""
    defaults = hyperparameters(factory)
    validate.hyperparameters(factory, hparams)
    hparams = defaults | hparams
    factory(task, **hparams)  # ranges are checked on the host, before anything is traced
    is_number = {name: isinstance(value, float) or isinstance(defaults[name], float) for name, value in hparams.items()}
    static = {name: value for name, value in hparams.items() if not is_number[name]}
    numbers = {name: float(value) for name, value in hparams.items() if is_number[name]}

    def algorithm(numbers: dict[str, Array], t: Array | int) -> Algorithm:
        free = {name: value for name, value in numbers.items() if name not in ("lr", "lr_decay")}
        lr = numbers["lr"] * numbers["lr_decay"] ** jnp.asarray(t, float)
        return factory(task._replace(lr=lr), **static, **free)

    return algorithm, numbers | {"lr": float(task.lr), "lr_decay": float(lr_decay)}


def _parts(algorithm: Callable[..., Algorithm], task: Task, width: int, mesh: Any) -> Parts:
    """`draw` takes the clients' homes as well, at first."""
    n = task.num_clients
    free = (lambda *args: args) if mesh is None else (lambda *args: unmarked(args))

    def cohort(key, federation, ids, active, t, evaluated) -> Cohort:
        options = {"key": clients_key(key, t), "width": width, "mesh": mesh}
        return Cohort(federation, task.prepare, ids, active, round=t, evaluated=evaluated, **options)

    def init(key: Array, numbers: dict[str, Array]) -> State:
        return trees.copied(algorithm(numbers, 0).init(jax.random.fold_in(key, INIT)))

    def draw(homes: Homes | None, key: Array, t: Array) -> tuple[Array, Array]:
        """A sample, dealt out to the devices: if it is everybody, each stays where its row lies."""
        ids, active = sample(jax.random.fold_in(_round_key(key, t), SAMPLING), task)
        if homes is None:
            return ids, active
        work = jnp.where(active, jnp.asarray(homes.steps)[ids], 0)
        places = jnp.asarray(homes.client) if len(ids) == n else deal(work, mesh.size)
        known, at = places < len(ids), jnp.minimum(places, len(ids) - 1)
        return jnp.where(known, ids[at], n + places - len(ids)), active[at] & known

    def train(key, numbers, federation, here: State, ids, active, t, evaluated) -> tuple[State, PyTree]:
        key, numbers, federation, here, ids, active = free(key, numbers, federation, here, ids, active)
        method, present = algorithm(numbers, t), cohort(key, federation, ids, active, t, evaluated)
        new, metrics = method.round(jax.random.fold_in(_round_key(key, t), SERVER), here, present)
        finite = trees.finite(new.clients, len(ids)) & trees.finite(jax.tree.map(lambda x: x[None], new.server), 1)
        metrics |= {"traffic": method.traffic(here, present, metrics), "finite": finite}
        return new, metrics | {"ids": ids, "active": active}

    def score(key, numbers, federation, here: State, ids, t) -> dict[str, Array]:
        key, numbers, federation, here, ids = free(key, numbers, federation, here, ids)
        method = algorithm(numbers, t)

        def client(c, row):
            return evaluate.client(c, method.predict(here.server, row, c), method.score)

        return cohort(key, federation, ids, ids < n, t, jnp.bool(True)).map(client, here.clients)

    return Parts(init, draw, train, score)


def _homes(task: Task, devices: int) -> Homes:
    """The clients, dealt out by their steps."""
    steps = local.planned(task, task.sizes)[0].astype(np.int32)
    client = np.asarray(jax.jit(deal, static_argnums=1)(steps, devices))
    return Homes(client, np.argsort(client).astype(np.int32), steps)  # type: ignore[arg-type]  # on the host


def _sharded(state: State, mesh: Any) -> State:
    """The server's part on every device, the clients' rows each on one."""
    return State(sharded(state.server, mesh, P()), sharded(state.clients, mesh, P(AXIS)))


def _round_key(key: Array, t: Array | int) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, ROUND), t)


def clients_key(key: Array, t: Array | int) -> Array:
    """What the keys of round t's clients are drawn from."""
    return jax.random.fold_in(_round_key(key, t), CLIENTS)
