"""An experiment as pure functions of its key and its traced hyperparameters.

`keys.Run` and `keys.Round` list the random streams. The sampling stream does not depend
on the method: two methods with one key see the same clients and, for their main local
training, the same batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec as P

from fedjax_pfl import architectures, evaluation, hyperparameters, keys, trees
from fedjax_pfl.engine import contract, frozen, validate
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.method import Runner, Setting, Traced, bound
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
from fedjax_pfl.engine.sampling import first, reads_record, recorded, sample, shares
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Federation,
    Method,
    PyTree,
    RunState,
    Scores,
    Task,
    Traffic,
    Upload,
)
from fedjax_pfl.uploads.chain import Chain, Option, chain

BENIGN = "benign_"  # prefix of the scores of clients that are not malicious


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

    init: Callable[..., RunState]  # (key, traced) -> RunState[N], rows by client id
    # (placement, key, t, loss=, record=) -> ids and active of the round, as `sample`
    draw: Callable[..., tuple[Array, Array]]
    # (key, traced, federation, RunState, ids, active, t, evaluated)
    train: Callable[..., tuple[RunState, Round]]
    # (key, traced, federation, RunState, ids, t, lengths) -> {name: [S]}
    score: Callable[..., dict[str, Array]]
    # the same arguments -> mean training loss before the round [S]
    losses: Callable[..., Array]
    # (traced, t, frozen variables) -> the method's functions
    runner: Callable[..., Runner]
    traced: dict[str, float]  # the traced hyperparameters
    placement: Placement | None
    lengths: tuple[int, ...]  # clients per architecture in a round, padding included
    mesh: Mesh | None


class Program(NamedTuple):
    """An experiment as pure functions; `traced` are its traced hyperparameters, t [] is
    the round."""

    traced: dict[str, float]
    init: Callable[..., RunState]  # (key, traced, placement=None) -> RunState
    # (key, traced, federation, RunState[N], t, evaluated) -> RunState, Round
    round: Callable[..., tuple[RunState, Round]]
    # (key, traced, federation, RunState[N], t) -> {name: [N]}
    evaluate: Callable[..., dict[str, Array]]
    # (key, traced, federation, RunState[N], t, client id, raw x [B, *input]) -> outputs
    predict: Callable[..., PyTree]
    # rows by client id -> rows as the other functions take them, over the devices
    place: Callable[[RunState], RunState]
    # the inverse; both change nothing on a single device with one architecture
    unplace: Callable[[RunState], RunState]
    # for Federation.placement, where one compiled program serves several partitions
    placement: Placement | None = None
    mesh: Mesh | None = None  # of several devices
    # rows are NumPy arrays in host memory, and no function can be traced
    on_host: bool = False
    setting: Setting | None = None  # None: the functions are of several runs
    most_rounds: int | None = None  # None: any number

    @property
    def task(self) -> Task | None:
        """The task; None for several runs."""
        return None if self.setting is None else self.setting.task


def program(
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    devices: int = 1,
    uploads: Chain | Option | Upload | None = None,
    server: Option | optax.GradientTransformation | None = None,
    checked: bool = True,
) -> Program:
    """Makes an experiment from a method and a task.

    Hyperparameters annotated float, numbers of options, `lr` and `lr_decay` become
    `traced`, arguments of every function: other values need no new compilation and can
    be vmapped over.

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
      uploads: options on what clients send, `uploads.chain(...)`.
      server: optimizer that takes the averaged update as its gradient (FedOpt), of
        `uploads.server` or of optax with its learning rate.
      checked: traces one round on shapes alone, to find a method's mistakes early.

    Raises:
      InputError: an unknown hyperparameter, a value out of range, too many devices, or
        a method that breaks the contract.
    """
    setting = set_up(factory, task, hparams, lr_decay, uploads, server)
    validate.layout(lr_decay, width, devices)
    found = from_parts(parts(setting, width=width, devices=devices), setting, devices)
    task = setting.task
    if checked:
        contract.check_shapes(
            task, found.traced, found.init, found.round, found.evaluate
        )
    return found


def set_up(
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    lr_decay: float = 1.0,
    uploads: Chain | Option | Upload | None = None,
    server: Option | optax.GradientTransformation | None = None,
) -> Setting:
    """Returns what a run computes with, as data; the arguments are those of
    `program`."""
    if uploads is None:
        uploads = Chain()
    changes = uploads if isinstance(uploads, Chain) else chain(uploads)
    found, hparams = validate.method(factory), hparams or {}
    hyperparameters.check(found, hparams)
    return Setting(found, validate.task(task), hparams, lr_decay, changes, server)


def from_parts(on: Parts, setting: Setting, devices: int) -> Program:
    """Returns the program of its functions for the rows of a cohort."""
    task, mesh = setting.task, on.mesh
    n = task.num_clients
    everybody = max(task.cohort_sizes) == n  # then rows need no gather
    whole = segments(task, n, devices)

    def rows(where: Placement | None) -> StateRows:
        return StateRows(task, on.placement if where is None else where, devices)

    def place(state: RunState, where: Placement | None = None) -> RunState:
        return _sharded(rows(where).place(state), mesh)

    def init(key: Array, traced: Traced, where: Placement | None = None) -> RunState:
        return place(on.init(key, traced), where)

    def of_all(
        function: Callable[..., PyTree],
        key: Array,
        traced: Traced,
        federation: Federation,
        state: RunState,
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
        state: RunState,
        t: Array,
        evaluated: Array,
    ) -> tuple[RunState, Round]:
        key, traced, federation, state, t, evaluated = free(
            mesh, key, traced, federation, state, t, evaluated
        )
        home = rows(federation.placement)

        def loss(ids: Array) -> Array:
            if home.where is not None:
                return of_all(on.losses, key, traced, federation, state, t)[ids]
            here = state.with_rows(home.gather(state.rows, ids, (len(ids),)))
            return on.losses(key, traced, federation, here, ids, t, (len(ids),))

        ids, active = on.draw(home.where, key, t, loss=loss, record=state.record)
        at = sharded(home.of(ids), mesh, P())
        rows_here = state.rows
        if not everybody:
            # on every device, as the sum over them is anyway: else the indices would
            # travel, leaf by leaf
            rows_here = sharded(home.gather(state.rows, at, on.lengths), mesh, P())
        here = state.with_rows(rows_here)
        new, known = on.train(key, traced, federation, here, ids, active, t, evaluated)
        if everybody:
            kept = home.keep(new.rows, state.rows, active)
        else:  # on all devices at once: the indices then need not travel
            moved, on_all = sharded((new.rows, active), mesh, P())
            kept = home.scatter(state.rows, at, moved, on_all, on.lengths)
        return _sharded(new.with_rows(kept), mesh), known

    def evaluate(
        key: Array, traced: Traced, federation: Federation, state: RunState, t: Array
    ) -> dict[str, Array]:
        key, traced, federation, state, t = free(
            mesh, key, traced, federation, state, t
        )
        return of_all(on.score, key, traced, federation, state, t)

    def predict(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: RunState,
        t: Array,
        id: int | Array,
        x: Array,
    ) -> PyTree:
        validate.client(task, id, x)
        method = on.runner(traced, t, federation.frozen)
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
            predictor = method.predict(state.method.server, row, c)
            return predictor(
                task.prepare(jnp.asarray(x)), jnp.ones(jnp.shape(x)[0], bool)
            )

        home = rows(federation.placement)
        own = home.gather(state.method.clients, home.of(ids), lengths)
        found = alone.map(client, own)
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
        setting=setting,
    )


def parts(
    setting: Setting, *, width: int = 1, devices: int = 1, held: bool = False
) -> Parts:
    """Returns the functions of an experiment for the rows of a cohort.

    Args:
      width: as in `program`, like `devices`.
      held: every mean is its default, so that no client influences another.
    """
    task = setting.task
    given = setting._replace(task=task._replace(participation=shares(task)))
    runner, traced = bound(given)
    factory, history = setting.factory, reads_record(task)
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
            held=held,
        )

    def init(key: Array, traced: Traced) -> RunState:
        method = runner(traced, 0)
        with contract.named(factory, "init"):
            drawn = trees.single(method.init(keys.fold(key, keys.Run.INIT)))
        if history:
            drawn = drawn._replace(record={"history": first(task.num_clients)})
        # no buffer may occur twice when the state is donated
        return jax.tree.map(jnp.copy, drawn)

    def draw(
        where: Placement | None, key: Array, t: Array, record: Any = (), **past: Any
    ) -> tuple[Array, Array]:
        stream = keys.fold(keys.round_key(key, t), keys.Round.SAMPLING)
        past |= {"record": record["history"]} if history else {}
        ids, active = sample(stream, task, t, **past)
        return arrange(task, where, ids, active, devices)

    def train(
        key: Array,
        traced: Traced,
        f: Federation,
        here: RunState,
        ids: Array,
        active: Array,
        t: Array,
        evaluated: Array,
    ) -> tuple[RunState, Round]:
        key, traced, f, here, ids, active = free(
            mesh, key, traced, f, here, ids, active
        )
        method = runner(traced, t, f.frozen)
        present = cohort(key, f, ids, active, t, evaluated, lengths)
        stream = keys.fold(keys.round_key(key, t), keys.Round.SERVER)
        with contract.named(factory, "round"):
            new, metrics = trees.single(method.round(stream, here, present))
            contract.check_round(here, new, metrics, len(ids), method.headline[0])
            sent = method.traffic(here, present, metrics)
        if history:
            past = recorded(here.record["history"], ids, active, t, metrics.loss)
            new = new._replace(record={"history": past})
        post = metrics.post | benign(metrics.post, ids)
        known = (metrics.loss, post, metrics.clients, metrics.server)
        return new, Round(*known, sent, ids, active, finite(new, len(ids), lengths))

    def score(
        key: Array,
        traced: Traced,
        f: Federation,
        here: RunState,
        ids: Array,
        t: Array,
        lengths: tuple[int, ...],
    ) -> dict[str, Array]:
        key, traced, f, here, ids = free(mesh, key, traced, f, here, ids)
        method = runner(traced, t, f.frozen)

        def client(c: Client, row: PyTree) -> dict[str, Array]:
            predictor = method.predict(here.method.server, row, c)
            return evaluation.client(c, predictor, checked, task.metrics)

        def checked(outputs: PyTree, y: Array, mask: Array, c: Client) -> Scores:
            found = method.score(outputs, y, mask, c)
            contract.check_scores(found, method.headline[0])
            return found

        real = ids < task.num_clients
        with contract.named(factory, "predict or score"):
            present = cohort(key, f, ids, real, t, jnp.bool(True), lengths)
            found = present.map(client, here.method.clients)
        return found | benign(found, ids)

    def losses(
        key: Array,
        traced: Traced,
        f: Federation,
        here: RunState,
        ids: Array,
        t: Array,
        lengths: tuple[int, ...],
    ) -> Array:
        key, traced, f, here, ids = free(mesh, key, traced, f, here, ids)
        method = runner(traced, t, f.frozen)

        def client(c: Client, row: PyTree) -> Array:
            predictor = method.predict(here.method.server, row, c)
            return evaluation.training_loss(c, predictor, task)

        real = ids < task.num_clients
        present = cohort(key, f, ids, real, t, jnp.bool(False), lengths)
        return present.map(client, here.method.clients)

    def benign(scores: dict[str, Array], ids: Array) -> dict[str, Array]:
        """Returns the scores of clients that are not malicious, NaN for those that
        are, if there are any."""
        if task.malicious is None:
            return {}
        known = jnp.minimum(ids, task.num_clients - 1)
        bad = jnp.asarray(task.malicious)[known]
        return {BENIGN + name: jnp.where(bad, jnp.nan, x) for name, x in scores.items()}

    return Parts(init, draw, train, score, losses, runner, traced, where, lengths, mesh)


def numbers(program: Program) -> int:
    """Returns the largest number of scalars and integers that a client receives and
    sends in the first round, with everybody's data 0."""
    task = program.task
    assert task is not None
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), contract.abstract(task))
    sizes = jnp.asarray(task.sizes, jnp.int32)
    empty = empty._replace(
        train=empty.train._replace(size=sizes),
        class_counts=jnp.asarray(task.class_counts, jnp.int32),
        frozen=frozen.values(task) or None,
    )

    def first(key: Array) -> Traffic:
        state = program.init(key, program.traced)
        t, evaluated = jnp.int32(0), jnp.bool(False)
        return program.round(key, program.traced, empty, state, t, evaluated)[1].traffic

    # what does not count is no part of the compiled function
    found = jax.jit(first)(jax.random.key(0))
    return int(jnp.max(found.down + found.up + found.ints))


def free(mesh: Mesh | None, *arguments: PyTree) -> tuple[PyTree, ...]:
    """Returns the arguments without the mesh in the arrays' types."""
    return arguments if mesh is None else without_mesh(arguments)


def finite(state: RunState, count: int, lengths: tuple[int, ...]) -> Array:
    """Returns where the client's rows and the server's state are finite, [count]."""
    shared = state.method.server, state.uploads.server, state.optimizer
    server = trees.finite(jax.tree.map(lambda x: x[None], shared), 1)
    if len(lengths) == 1:
        return trees.finite(state.rows, count) & server
    cut = [
        trees.finite(architectures.rows_of(state.rows, g, here), length)
        for g, (here, length) in enumerate(zip(slices(lengths), lengths, strict=True))
    ]
    return jnp.concatenate(cut) & server


def _sharded(state: RunState, mesh: Mesh | None) -> RunState:
    """Replicates the server's state and shards the clients' rows over the devices."""
    shared = sharded(state.with_rows(((), ())), mesh, P())
    return shared.with_rows(sharded(state.rows, mesh, P(AXIS)))
