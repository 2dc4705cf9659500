"""An experiment as pure functions of its key and its traced hyperparameters.

`keys.Run` and `keys.Round` list the random streams. The sampling stream does not depend
on the method: two methods with one key see the same clients and, for their main local
training, the same batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from fedjax_pfl import architectures, evaluation, hyperparameters, keys, traffic, trees
from fedjax_pfl.engine import contract, exposure, frozen, validate
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
    """Results of a round: the method's Metrics and what the engine adds; [S] in the
    order of `ids`."""

    loss: Array  # [S]
    post: dict[str, Array]  # {score: [S]}
    clients: dict[str, Array]  # {name: [S]}
    server: dict[str, Array]  # {name: any shape}
    traffic: Traffic
    ids: Array  # [S] int32, padding included
    active: Array  # [S] bool
    finite: Array  # [S] bool, True if the states of client and server are finite


class Parts(NamedTuple):
    """The functions of which a Program is made; ids and rows are those of a cohort,
    [S, ...]."""

    init: Callable[..., State]  # (key, traced) -> State[N], rows by client id
    # (placement, key, t, loss=, server=) -> ids and active of the round, as `sample`
    draw: Callable[..., tuple[Array, Array]]
    # (key, traced, federation, State, ids, active, t, evaluated)
    train: Callable[..., tuple[State, Round]]
    # (key, traced, federation, State, ids, t, lengths) -> {name: [S]}
    score: Callable[..., dict[str, Array]]
    # the same arguments -> mean training loss before the round [S]
    losses: Callable[..., Array]
    traced: dict[str, float]  # the traced hyperparameters
    placement: Placement | None
    lengths: tuple[int, ...]  # clients per architecture in a round, padding included
    mesh: Mesh | None


class Program(NamedTuple):
    """An experiment as pure functions; `traced` are its traced hyperparameters, t [] is
    the round."""

    traced: dict[str, float]
    init: Callable[..., State]  # (key, traced, placement=None) -> State
    # (key, traced, federation, State[N], t, evaluated) -> State, Round
    round: Callable[..., tuple[State, Round]]
    # (key, traced, federation, State[N], t) -> {name: [N]}
    evaluate: Callable[..., dict[str, Array]]
    # (key, traced, federation, State[N], t, client id, raw x [B, *input]) -> outputs
    predict: Callable[..., PyTree]
    # rows by client id -> rows as the other functions take them, over the devices
    place: Callable[[State], State]
    # the inverse; both change nothing on a single device with one architecture
    unplace: Callable[[State], State]
    # for Federation.placement, where one compiled program serves several partitions
    placement: Placement | None = None
    mesh: Mesh | None = None  # of several devices
    # rows are NumPy arrays in host memory, and no function can be traced
    on_host: bool = False
    task: Task | None = None
    method: Callable[..., Algorithm] | None = None
    most_rounds: int | None = None  # None: any number


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
    """Makes an experiment from a method and a task.

    Hyperparameters annotated float, `lr` and `lr_decay` become `traced`, arguments of
    every function: other values need no new compilation and can be vmapped over.

    Over several devices, and with several architectures, the rows of State.clients are
    in the order of the placement; `unplace` returns them in the clients' order. The
    devices may be those of several processes, which all call the same functions with
    the same arguments; `distributed.fetch` copies results to every host.

    Args:
      factory: the method, or its name.
      hparams: hyperparameters that differ from the defaults.
      lr_decay: factor by which lr shrinks per round.
      width: clients per vmapped batch on each device.
      devices: devices that share the clients of a round (`xla.split_cpu` makes several
        of a CPU).
      transform: (key, upload, default, client) -> upload, applied to each client's
        upload before the server averages it (`types.Cohort.mean`), such as clipping
        or noise.
      checked: traces one round on shapes alone, to find a method's mistakes early.

    Raises:
      InputError: an unknown hyperparameter, a value out of range, too many devices, or
        a method that breaks the contract.
    """
    factory, hparams = validate.method(factory), {} if hparams is None else hparams
    hyperparameters.check(factory, hparams)
    task = validate.task(task)
    validate.layout(lr_decay, width, devices)
    on = parts(
        factory,
        task,
        hparams,
        lr_decay=lr_decay,
        width=width,
        devices=devices,
        transform=transform,
    )
    if task.per_example is not None:
        exposure.check_per_example(parts, factory, task, hparams)
    algorithm, _ = bound(factory, task, hparams, lr_decay)
    found = from_parts(on, task, devices, algorithm)._replace(method=factory)
    if checked:
        contract.check_shapes(
            task, found.traced, found.init, found.round, found.evaluate
        )
    return found


def from_parts(
    on: Parts, task: Task, devices: int, algorithm: Callable[..., Algorithm]
) -> Program:
    """Returns the program of its functions for the rows of a cohort."""
    n, mesh = task.num_clients, on.mesh
    everybody = max(task.cohort_sizes) == n  # then rows need no gather
    whole = segments(task, n, devices)

    def rows(where: Placement | None) -> StateRows:
        return StateRows(task, on.placement if where is None else where, devices)

    def place(state: State, where: Placement | None = None) -> State:
        return _sharded(rows(where).place(state), mesh)

    def init(key: Array, traced: Traced, where: Placement | None = None) -> State:
        return place(on.init(key, traced), where)

    def of_all(
        function: Callable[..., PyTree],
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
    ) -> PyTree:
        """Returns what a function of Parts returns of all clients, by id."""
        where = rows(federation.placement).where
        ids = jnp.arange(n, dtype=jnp.int32)
        if where is None:
            return function(key, traced, federation, state, ids, t, whole)
        ids = jnp.asarray(where.client)
        found = function(key, traced, federation, state, ids, t, whole)
        return trees.gather(found, jnp.asarray(where.row)[:n])

    def round(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        evaluated: Array,
    ) -> tuple[State, Round]:
        key, traced, federation, state, t, evaluated = free(
            mesh, key, traced, federation, state, t, evaluated
        )
        home = rows(federation.placement)

        def loss(ids: Array) -> Array:
            if home.where is not None:
                return of_all(on.losses, key, traced, federation, state, t)[ids]
            here = State(state.server, home.gather(state.clients, ids, (len(ids),)))
            return on.losses(key, traced, federation, here, ids, t, (len(ids),))

        ids, active = on.draw(home.where, key, t, loss=loss, server=state.server)
        at = sharded(home.of(ids), mesh, P())
        here = state.clients
        if not everybody:
            # on every device, as the sum over them is anyway: else the indices would
            # travel, leaf by leaf
            here = sharded(home.gather(state.clients, at, on.lengths), mesh, P())
        here = State(state.server, here)
        new, known = on.train(key, traced, federation, here, ids, active, t, evaluated)
        if everybody:
            clients = home.keep(new.clients, state.clients, active)
        else:  # on all devices at once: the indices then need not travel
            moved, on_all = sharded((new.clients, active), mesh, P())
            clients = home.scatter(state.clients, at, moved, on_all, on.lengths)
        return _sharded(State(new.server, clients), mesh), known

    def evaluate(
        key: Array, traced: Traced, federation: Federation, state: State, t: Array
    ) -> dict[str, Array]:
        key, traced, federation, state, t = free(
            mesh, key, traced, federation, state, t
        )
        return of_all(on.score, key, traced, federation, state, t)

    def predict(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        id: int | Array,
        x: Array,
    ) -> PyTree:
        validate.client(task, id, x)
        method = algorithm(traced, t, federation.frozen)
        group = int(task.architecture[int(id)]) if len(task.models) > 1 else 0
        ids = jnp.asarray(id, jnp.int32)[None]
        lengths = tuple(int(g == group) for g in range(len(task.models)))
        alone = Cohort(
            federation,
            frozen.bind(task, federation.frozen),
            ids,
            ids >= 0,
            key=keys.clients_key(key, t),
            round=t,
            evaluated=jnp.bool(True),
            width=1,
            lengths=lengths,
        )

        def client(c: Client, row: PyTree) -> PyTree:
            predictor = method.predict(state.server, row, c)
            return predictor(
                task.prepare(jnp.asarray(x)), jnp.ones(jnp.shape(x)[0], bool)
            )

        home = rows(federation.placement)
        found = alone.map(client, home.gather(state.clients, home.of(ids), lengths))
        return jax.tree.map(lambda x: x[0], found)

    # the placement is an argument: other partitions need no new compilation
    placed = jax.jit(place)
    return Program(
        on.traced,
        init,
        round,
        evaluate,
        predict,
        lambda state: placed(state, on.placement),
        rows(None).unplace,
        on.placement,
        mesh,
        task=task,
    )


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
    """Returns the functions of an experiment for the rows of a cohort; the arguments
    are those of `program`."""
    algorithm, traced = bound(
        factory, task._replace(participation=shares(task)), hparams or {}, lr_decay
    )
    mesh, where = make_mesh(devices), placement(task, devices)
    lengths = segments(task, max(task.cohort_sizes), devices)

    def cohort(
        key: Array,
        f: Federation,
        ids: Array,
        active: Array,
        t: Array,
        evaluated: Array,
        lengths: tuple[int, ...],
    ) -> Cohort:
        return Cohort(
            f,
            frozen.bind(task, f.frozen),
            ids,
            active,
            key=keys.clients_key(key, t),
            round=t,
            evaluated=evaluated,
            width=width,
            mesh=mesh,
            lengths=lengths,
            transform=transform,
        )

    def init(key: Array, traced: Traced) -> State:
        method = algorithm(traced, 0)
        with contract.named(factory, "init"):
            drawn = trees.single(method.init(keys.fold(key, keys.Run.INIT)))
            contract.check_init(drawn, task.num_clients)
        # no buffer may occur twice when the state is donated
        return jax.tree.map(jnp.copy, drawn)

    def draw(
        where: Placement | None, key: Array, t: Array, **past: Any
    ) -> tuple[Array, Array]:
        stream = keys.fold(keys.round_key(key, t), keys.Round.SAMPLING)
        ids, active = sample(stream, task, t, **past)
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
        key, traced, f, here, ids, active = free(
            mesh, key, traced, f, here, ids, active
        )
        method = algorithm(traced, t, f.frozen)
        present = cohort(key, f, ids, active, t, evaluated, lengths)
        stream = keys.fold(keys.round_key(key, t), keys.Round.SERVER)
        with contract.named(factory, "round"):
            result = trees.single(method.round(stream, here, present))
            contract.check_round(here, result, len(ids), method.headline[0])
            new, metrics = result
            sent = (method.traffic or traffic.uploads)(here, present, metrics)
        known = (metrics.loss, metrics.post, metrics.clients, metrics.server)
        return new, Round(*known, sent, ids, active, finite(new, len(ids), lengths))

    def score(
        key: Array,
        traced: Traced,
        f: Federation,
        here: State,
        ids: Array,
        t: Array,
        lengths: tuple[int, ...],
    ) -> dict[str, Array]:
        key, traced, f, here, ids = free(mesh, key, traced, f, here, ids)
        method = algorithm(traced, t, f.frozen)

        def client(c: Client, row: PyTree) -> dict[str, Array]:
            return evaluation.client(
                c, method.predict(here.server, row, c), checked, task.metrics
            )

        def checked(outputs: PyTree, y: Array, mask: Array, c: Client) -> Scores:
            found = method.score(outputs, y, mask, c)
            contract.check_scores(found, method.headline[0])
            return found

        real = ids < task.num_clients
        with contract.named(factory, "predict or score"):
            present = cohort(key, f, ids, real, t, jnp.bool(True), lengths)
            return present.map(client, here.clients)

    def losses(
        key: Array,
        traced: Traced,
        f: Federation,
        here: State,
        ids: Array,
        t: Array,
        lengths: tuple[int, ...],
    ) -> Array:
        key, traced, f, here, ids = free(mesh, key, traced, f, here, ids)
        method = algorithm(traced, t, f.frozen)

        def client(c: Client, row: PyTree) -> Array:
            predictor = method.predict(here.server, row, c)
            return evaluation.training_loss(c, predictor, task)

        real = ids < task.num_clients
        present = cohort(key, f, ids, real, t, jnp.bool(False), lengths)
        return present.map(client, here.clients)

    return Parts(init, draw, train, score, losses, traced, where, lengths, mesh)


def free(mesh: Mesh | None, *arguments: PyTree) -> tuple[PyTree, ...]:
    """Returns the arguments without the mesh in the arrays' types."""
    return arguments if mesh is None else without_mesh(arguments)


def finite(state: State, count: int, lengths: tuple[int, ...]) -> Array:
    """Returns where the client's row and the server's state are finite, [count]."""
    server = trees.finite(jax.tree.map(lambda x: x[None], state.server), 1)
    if len(lengths) == 1:
        return trees.finite(state.clients, count) & server
    cut = [
        trees.finite(architectures.rows_of(state.clients, g, here), length)
        for g, (here, length) in enumerate(zip(slices(lengths), lengths, strict=True))
    ]
    return jnp.concatenate(cut) & server


def _sharded(state: State, mesh: Mesh | None) -> State:
    """Replicates the server's state and shards the clients' rows over the devices."""
    return State(
        sharded(state.server, mesh, P()), sharded(state.clients, mesh, P(AXIS))
    )
