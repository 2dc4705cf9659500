"""One experiment as pure functions of its key and its traced hyperparameters.

Key streams: see `keys.Run` and `keys.Round`. The sampling stream does not depend on the
method, so two methods with one key see the same clients and, for their main local
training, the same batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from fedjax_pfl import architectures, evaluation, hyperparameters, keys, traffic, trees
from fedjax_pfl.engine import contract, validate
from fedjax_pfl.engine.cohort import Cohort, Transform
from fedjax_pfl.engine.method import Traced, bound
from fedjax_pfl.engine.placement import (
    AXIS,
    Placement,
    StateRows,
    arrange,
    make_mesh,
    placement,
    segments,
    sharded,
    slices,
    without_mesh,
)
from fedjax_pfl.engine.sampling import sample, shares
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Federation,
    PyTree,
    Scores,
    State,
    Task,
    Traffic,
)


class Round(NamedTuple):
    """What is known of a round: the method's Metrics and what the engine adds; [S] in
    the order of `ids`."""

    loss: Array  # [S]
    post: dict[str, Array]  # {score: [S]}
    clients: dict[str, Array]  # {name: [S]}
    server: dict[str, Array]  # {name: any shape}
    traffic: Traffic
    ids: Array  # [S] int32, padding included
    active: Array  # [S] bool
    finite: Array  # [S] bool: is the client's state finite, and the server's?


class Parts(NamedTuple):
    """What the functions of a Program are made of, for clients whose rows are at hand:
    ids and rows are [S, ...]."""

    init: Callable[..., State]  # (key, traced) -> State[N], rows by client id
    # (placement, key, t) -> the round's ids and which are active
    draw: Callable[..., tuple[Array, Array]]
    # (key, traced, federation, State, ids, active, t, evaluated)
    train: Callable[..., tuple[State, Round]]
    # (key, traced, federation, State, ids, t, lengths) -> {name: [S]}
    score: Callable[..., dict[str, Array]]
    traced: dict[str, float]  # the traced hyperparameters
    placement: Placement | None
    lengths: tuple[int, ...]  # places per architecture in a round
    mesh: Mesh | None


class Program(NamedTuple):
    """One experiment as pure functions; `traced` are its traced hyperparameters (see
    `program`), t [] is the round."""

    traced: dict[str, float]
    init: Callable[..., State]  # (key, traced, placement=None) -> State
    # (key, traced, federation, State[N], t, evaluated) -> State, Round
    round: Callable[..., tuple[State, Round]]
    # (key, traced, federation, State[N], t) -> {name: [N]}
    evaluate: Callable[..., dict[str, Array]]
    predict: Callable[
        ..., PyTree
        # (key, traced, federation, State[N], t, client id: int, raw x [B, *input]) ->
        # outputs
    ]
    # rows by client id -> rows as the other functions take them, over the devices
    place: Callable[[State], State]
    # and back; both change nothing on a single device with one architecture
    unplace: Callable[[State], State]
    # belongs into Federation.placement where one compiled program serves several
    placement: Placement | None = None
    mesh: Mesh | None = None  # of several devices
    # rows are NumPy arrays in the host's memory, and no function can be traced
    on_host: bool = False
    task: Task | None = None  # that it was made for
    # what else: method, hyperparameters that are not traced, width, transform
    static: dict[str, Any] | None = None


def program(
    factory: Callable[..., Algorithm] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    devices: int = 1,
    transform: Transform | None = None,
    checked: bool = True,
) -> Program:
    """Makes an experiment of a method and a task.

    The hyperparameters that are floats by their annotation, `lr` and `lr_decay` become
    `traced`, arguments of every function, so that other values need no new compilation
    and can be vmapped over.

    Over several devices, and with several architectures, the rows of State.clients lie
    in the order of the placement: `unplace` gives them in the clients' order. The
    devices may be those of several processes, which call the same functions with the
    same arguments: `multihost.fetch` brings results to every host, as `simulate.rounds`
    does by itself.

    Args:
      factory: the method, or its name.
      hparams: its hyperparameters, those that are not its defaults.
      lr_decay: the factor by which lr shrinks a round.
      width: clients trained at once on each device, by vmap; 1: one after another.
      devices: how many share the clients of a round; of a CPU `autotune.split_cpu`
        makes several.
      transform: (key, upload, default) -> upload, what is done to every client's upload
        before the server averages it (`types.Cohort.mean`), such as clipping or noise.
      checked: whether shapes of one round are evaluated at once, so that a method's
        mistakes are found here; else they are when the round is traced.

    Raises:
      InputError: for an unknown hyperparameter, a value out of range, devices that
        cannot be had (`placement.take`), or a method that breaks the contract.
    """
    factory = validate.method(factory)
    hyperparameters.check(factory, {} if hparams is None else hparams)
    task = validate.task(task)
    validate.layout(lr_decay, width, devices)
    made = parts(
        factory,
        task,
        hparams,
        lr_decay=lr_decay,
        width=width,
        devices=devices,
        transform=transform,
    )
    values = hyperparameters.defaults(factory) | (hparams or {})
    static = {name: value for name, value in values.items() if name not in made.traced}
    static |= {"method": factory, "width": width, "transform": transform}
    found = _program(
        made, task, devices, _predict(factory, task, hparams, lr_decay)
    )._replace(static=static)
    if checked:
        contract.check_shapes(
            task, found.traced, found.init, found.round, found.evaluate
        )
    return found


def _program(
    on: Parts, task: Task, devices: int, predict: Callable[..., PyTree]
) -> Program:
    n, mesh = task.num_clients, on.mesh
    everybody = max(task.cohort_sizes) == n  # then each stays where its row lies
    whole = segments(task, n, devices)
    free: Callable[..., Any] = (
        (lambda *args: args) if mesh is None else (lambda *args: without_mesh(args))
    )

    def given(federation: Federation) -> Placement | None:
        return on.placement if federation.placement is None else federation.placement

    rows: Callable[[Placement | None], StateRows] = lambda where: StateRows(
        task, where, devices
    )

    def place(state: State, where: Placement | None = None) -> State:
        return _sharded(
            rows(on.placement if where is None else where).place(state), mesh
        )

    def init(key: Array, traced: Traced, where: Placement | None = None) -> State:
        return place(on.init(key, traced), where)

    def round(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        evaluated: Array,
    ) -> tuple[State, Round]:
        key, traced, federation, state, t, evaluated = free(
            key, traced, federation, state, t, evaluated
        )
        ids, active = on.draw(given(federation), key, t)
        home = rows(given(federation))
        at = sharded(home.of(ids), mesh, P())
        # on every device, as the sum over them is anyway: else the indices would
        # travel, leaf by leaf
        here = (
            state.clients
            if everybody
            else sharded(home.gather(state.clients, at, on.lengths), mesh, P())
        )
        new, known = on.train(
            key,
            traced,
            federation,
            State(state.server, here),
            ids,
            active,
            t,
            evaluated,
        )
        if everybody:
            clients = home.keep(new.clients, state.clients, active)
        else:  # on all devices at once: the indices then need not travel
            moved, on_all = sharded((new.clients, active), mesh, P())
            clients = home.scatter(state.clients, at, moved, on_all, on.lengths)
        return _sharded(State(new.server, clients), mesh), known

    def scores(
        key: Array, traced: Traced, federation: Federation, state: State, t: Array
    ) -> dict[str, Array]:
        key, traced, federation, state, t = free(key, traced, federation, state, t)
        where = given(federation)
        ids = (
            jnp.arange(n, dtype=jnp.int32)
            if where is None
            else jnp.asarray(where.client)
        )
        found = on.score(key, traced, federation, state, ids, t, whole)
        return (
            found if where is None else trees.gather(found, jnp.asarray(where.row)[:n])
        )

    def one(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        id: int | Array,
        x: Array,
    ) -> PyTree:
        return predict(
            rows(given(federation)), key, traced, federation, state, t, id, x
        )

    # the placement is an argument: other partitions need no new compilation
    placed = jax.jit(place)
    to_rows: Callable[[State], State] = lambda state: placed(state, on.placement)
    return Program(
        on.traced,
        init,
        round,
        scores,
        one,
        to_rows,
        rows(on.placement).unplace,
        on.placement,
        mesh,
        task=task,
    )


def _predict(
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any] | None,
    lr_decay: float,
) -> Callable[..., PyTree]:
    """One client's predictions; with several architectures its id must be a number on
    the host."""
    algorithm, _ = bound(factory, task, hparams or {}, lr_decay)

    def predict(
        rows: StateRows,
        key: Array,
        traced: Traced,
        f: Federation,
        state: State,
        t: Array,
        id: int | Array,
        x: Array,
    ) -> PyTree:
        validate.client(task, id)
        x = validate.inputs(task, x)
        method, group = (
            algorithm(traced, t),
            int(task.architecture[int(id)]) if len(task.models) > 1 else 0,
        )
        ids = jnp.asarray(id, jnp.int32)[None]
        lengths = tuple(int(g == group) for g in range(len(task.models)))
        options: dict[str, Any] = {
            "key": keys.clients_key(key, t),
            "round": t,
            "evaluated": jnp.bool(True),
            "width": 1,
        }
        alone = Cohort(f, task, ids, ids >= 0, lengths=lengths, **options)

        def client(c: Client, row: PyTree) -> PyTree:
            return method.predict(state.server, row, c)(
                task.prepare(x), jnp.ones(x.shape[0], bool)
            )

        found = alone.map(client, rows.gather(state.clients, rows.of(ids), lengths))
        return jax.tree.map(lambda x: x[0], found)

    return predict


def parts(
    factory: Callable[..., Algorithm],
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    devices: int = 1,
    transform: Transform | None = None,
) -> Parts:
    """The functions of an experiment for clients whose rows are at hand; arguments as
    of `program`."""
    algorithm, traced = bound(
        factory, task._replace(participation=shares(task)), hparams or {}, lr_decay
    )
    mesh, where = make_mesh(devices), placement(task, devices)
    lengths = segments(task, max(task.cohort_sizes), devices)
    free: Callable[..., Any] = (
        (lambda *args: args) if mesh is None else (lambda *args: without_mesh(args))
    )

    def cohort(
        key: Array,
        f: Federation,
        ids: Array,
        active: Array,
        t: Array,
        evaluated: Array,
        lengths: tuple[int, ...],
    ) -> Cohort:
        options: dict[str, Any] = {
            "key": keys.clients_key(key, t),
            "width": width,
            "mesh": mesh,
            "lengths": lengths,
        }
        return Cohort(
            f,
            task,
            ids,
            active,
            round=t,
            evaluated=evaluated,
            transform=transform,
            **options,
        )

    def init(key: Array, traced: Traced) -> State:
        method = algorithm(traced, 0)
        with contract.named(factory, "init"):
            drawn = trees.single(method.init(keys.fold(key, keys.Run.INIT)))
            contract.check_init(drawn, task.num_clients)
        # so that no buffer stands in two places when it is donated
        return jax.tree.map(jnp.copy, drawn)

    def draw(where: Placement | None, key: Array, t: Array) -> tuple[Array, Array]:
        """A sample, arranged by architecture and over the devices."""
        ids, active = sample(
            keys.fold(keys.round_key(key, t), keys.Round.SAMPLING), task
        )
        return arrange(task, where, ids, active, devices)

    def train(
        key: Array,
        traced: Traced,
        f: Federation,
        here: State,
        ids: Array,
        active: Array,
        t: Array,
        evaluated: Array,
    ) -> tuple[State, Round]:
        key, traced, f, here, ids, active = free(key, traced, f, here, ids, active)
        method, present = (
            algorithm(traced, t),
            cohort(key, f, ids, active, t, evaluated, lengths),
        )
        with contract.named(factory, "round"):
            result = trees.single(
                method.round(
                    keys.fold(keys.round_key(key, t), keys.Round.SERVER), here, present
                )
            )
            contract.check_round(here, result, len(ids), method)
        new, metrics = result
        with contract.named(factory, "traffic"):
            sent = (method.traffic or traffic.uploads)(here, present, metrics)
            contract.check_traffic(sent, len(ids))
        known = (metrics.loss, metrics.post, metrics.clients, metrics.server)
        return new, Round(*known, sent, ids, active, _finite(new, len(ids), lengths))

    def score(
        key: Array,
        traced: Traced,
        f: Federation,
        here: State,
        ids: Array,
        t: Array,
        lengths: tuple[int, ...],
    ) -> dict[str, Array]:
        key, traced, f, here, ids = free(key, traced, f, here, ids)
        method = algorithm(traced, t)

        def client(c: Client, row: PyTree) -> dict[str, Array]:
            contract.check_predictor(predictor := method.predict(here.server, row, c))
            return evaluation.client(c, predictor, checked)

        def checked(outputs: PyTree, y: Array, mask: Array, c: Client) -> Scores:
            with contract.named(factory, "score"):
                contract.check_scores(
                    found := method.score(outputs, y, mask, c), method.headline[0]
                )
            return found

        with contract.named(factory, "predict"):
            present = cohort(
                key, f, ids, ids < task.num_clients, t, jnp.bool(True), lengths
            )
            return present.map(client, here.clients)

    return Parts(init, draw, train, score, traced, where, lengths, mesh)


def _finite(state: State, count: int, lengths: tuple[int, ...]) -> Array:
    """In which of the `count` places is every number of the client's row finite, and of
    the server? [count]"""
    if len(lengths) == 1:
        clients = trees.finite(state.clients, count)
    else:
        cut = (
            architectures.rows_of(state.clients, *each)
            for each in enumerate(slices(lengths))
        )
        clients = jnp.concatenate(
            [trees.finite(*each) for each in zip(cut, lengths, strict=True)]
        )
    return clients & trees.finite(jax.tree.map(lambda x: x[None], state.server), 1)


def _sharded(state: State, mesh: Mesh | None) -> State:
    """The server's part on every device, the clients' rows each on one."""
    return State(
        sharded(state.server, mesh, P()), sharded(state.clients, mesh, P(AXIS))
    )
