"""The round of a method that is one mean over the clients, under options on uploads.

Without options the uploads themselves are averaged. With options clients send updates,
uploads minus `Method.default`, and the mean update is added to the default. Running
statistics pass every option unchanged, and are averaged by weight.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import aggregate, architectures, evaluation, traffic, trees
from fedjax_pfl.averaging import BODY_AND_HEAD
from fedjax_pfl.engine import contract
from fedjax_pfl.errors import ContractError, InputError, choose
from fedjax_pfl.types import (
    Array,
    Client,
    Cohort,
    Method,
    Metrics,
    Own,
    PyTree,
    RunState,
    State,
    Task,
    Traffic,
    Update,
    Upload,
)

# units in the last digit by which `Method.update` may round a weight that does not move
ROUNDING = 8


class Averaged(NamedTuple):
    """A method and the options of a run."""

    method: Method
    uploads: Upload | None  # all changes of what clients send, as one
    server: optax.GradientTransformation | None  # moves the means of `Method.averages`


class Sent(NamedTuple):
    """Results of one client's function."""

    row: PyTree  # of State.clients
    extra: PyTree  # of the options
    seen: PyTree  # what the options' server sees
    loss: Array
    post: dict[str, Array]
    metrics: dict[str, Array]
    sent: PyTree  # as of `Update`


def init(run: Averaged, task: Task, key: Array) -> RunState:
    """Returns the state before the first round."""
    state, uploads, optimizer = run.method.init(key), State((), ()), ()
    contract.check_init(state, task.num_clients)
    known = state.server if isinstance(state.server, dict) else ()
    for part in run.method.averages:
        choose("name of a mean in `averages`", part, known)
    if run.uploads is not None:
        default = run.method.default(state.server)
        grouped = architectures.is_grouped(default)
        made = [
            run.uploads.init(_zeros(architectures.select(default, group)))
            for group in range(len(task.models) if grouped else 1)
        ]
        rows = iter([row for _, row in made])
        clients = trees.replicate(made[0][1], task.num_clients)
        if grouped:
            clients = architectures.stack(task, lambda _: next(rows))
        uploads = State(made[0][0], clients)
    if run.server is not None:
        optimizer = run.server.init(_moved(run.method, state.server))
    return RunState(state, uploads, optimizer)


def round(
    run: Averaged, key: Array, state: RunState, cohort: Cohort
) -> tuple[RunState, Metrics]:
    """Computes one round: local work, uploads, their mean, the server's update."""
    server, given = state.method.server, None
    if run.method.start is not None:
        given = run.method.start(key, server, cohort)
    each = () if given is None else given[1]
    weight, taken = weights(run, cohort)

    def client(
        c: Client, row: PyTree, extra: PyTree, taken: PyTree, each: PyTree
    ) -> tuple[PyTree, Sent]:
        more = () if given is None else (given[0], each)
        return work(run, cohort, c, state, (row, extra), taken, *more)

    mean, (found,) = cohort.mean(
        client,
        *state.rows,
        taken,
        each,
        weight=weight,
        default=neutral(run, server),
        combine=combination(run),
    )
    return conclude(run, key, state, cohort, mean, found)


def weights(run: Averaged, cohort: Cohort) -> tuple[PyTree, PyTree]:
    """Returns the aggregation weights, and who sends an update where the options
    replace the weights, else ()."""
    weight = run.method.weight(cohort)
    if run.uploads is None or run.uploads.weight is None:
        return weight, ()
    (plain,) = jax.tree.leaves(weight) or [cohort.active]
    return run.uploads.weight(plain, cohort.active), plain > 0


def neutral(run: Averaged, server: PyTree) -> PyTree:
    """Returns what is averaged where nobody trains: the method's default, or the update
    0."""
    default = run.method.default(server)
    if run.uploads is None:
        return default
    weights, statistics = divided(default)
    return trees.merge(optax.tree.zeros_like(weights), statistics)


def combination(run: Averaged) -> Callable[..., PyTree] | None:
    """Returns the rule of the options in place of the weighted mean, as `Cohort.mean`
    takes it."""
    rule = None if run.uploads is None else run.uploads.combine
    if rule is None:
        return None

    def combine(stack: PyTree, shares: PyTree, default: PyTree) -> PyTree:
        each = jax.tree.map(
            lambda share, part: jax.tree.map(lambda _: share, part), shares, stack
        )
        (updates, statistics), (mine, theirs) = divided(stack), divided(each)
        mean = jax.tree.map(
            lambda share, x: jnp.sum(jax.vmap(aggregate.weigh)(share, x), axis=0),
            theirs,
            statistics,
        )
        return trees.merge(rule(updates, mine), mean)

    return combine


def work(
    run: Averaged,
    cohort: Cohort,
    c: Client,
    state: RunState,
    rows: PyTree,
    taken: PyTree,
    *given: PyTree,
) -> tuple[PyTree, Sent]:
    """Returns what one client sends, and its other results.

    Args:
      state: of the server, from which the client starts; its rows are not read.
      rows: the client's entries of `RunState.rows`.
      taken: whether its update counts, []; () if all do.
      given: what `Method.start` has for it.
    """
    (row, extra), server, seen = rows, state.method.server, ()
    update = run.method.client(c, server, row, *given)
    if not isinstance(update, Update):
        raise ContractError(
            f"`client` must return an Update, got {type(update).__name__}."
        )
    score = run.method.post or run.method.score
    post = evaluation.post(cohort, c, update.predict, score)
    own = isinstance(update.upload, Own)
    upload = update.upload.tree if own else update.upload
    if run.uploads is not None:
        default = architectures.select(run.method.default(server), c.architecture)
        contract.check_like("the upload must be like `default`", default, upload)
        (new, statistics), (old, _) = divided(upload), divided(default)
        change = jax.tree.map(jnp.subtract, new, old)
        if not isinstance(taken, tuple):
            change = trees.choose(taken, change, optax.tree.zeros_like(change))
        held = state.uploads.server
        moved, extra, seen = run.uploads.client(c, change, held, extra)
        upload = trees.merge(optax.tree.cast_like(moved, change), statistics)
        extra = Own(extra) if own else extra
    known = update.loss, post, update.metrics, update.sent
    return Own(upload) if own else upload, Sent(update.row, extra, seen, *known)


def conclude(
    run: Averaged,
    key: Array,
    state: RunState,
    cohort: Cohort,
    mean: PyTree,
    found: Sent,
) -> tuple[RunState, Metrics]:
    """Returns the state after a round, and its results, from the mean of the uploads
    and the clients' other results [S, ...]."""
    method, server, held = run.method, state.method.server, state.uploads.server
    shown: dict[str, Array] = {}
    if run.uploads is not None:
        (change, statistics), (old, _) = divided(mean), divided(method.default(server))
        if run.uploads.server is not None:
            change, held, shown = run.uploads.server(
                key, change, found.seen, cohort.active, held
            )
        new = optax.tree.cast_like(trees.add(old, change), old)
        mean = trees.merge(new, statistics)
    more = Metrics()
    if method.finish is None:
        after = method.update(key, server, mean, mass(weights(run, cohort)[0], cohort))
        after = State(after, found.row)
    else:
        after, more = method.finish(
            key, server, mean, found.sent, state.method.clients, found.row, cohort
        )
    if method.observe is not None:
        shown = shown | method.observe(found.sent, cohort)
    optimizer = state.optimizer
    if run.server is not None:
        moved, optimizer = _stepped(run, server, after.server, optimizer)
        after = after._replace(server=moved)
    metrics = Metrics(
        found.loss, found.post, found.metrics | more.clients, shown | more.server
    )
    uploads = State(held, found.extra)
    return state._replace(method=after, uploads=uploads, optimizer=optimizer), metrics


def mass(weight: PyTree, cohort: Cohort) -> PyTree:
    """Returns the sums of aggregation weights over the active clients."""

    def total(w: Array | None) -> Array:
        w = cohort.active if w is None else w
        return jnp.sum(jnp.where(trees.expand(cohort.active, w.ndim), w, 0), axis=0)

    return jax.tree.map(total, weight, is_leaf=lambda w: w is None)


def sent(run: Averaged, state: RunState, cohort: Any, metrics: Metrics) -> Traffic:
    """Counts what travels in a round: as the method does, else the uploads both ways,
    and upwards what the options send."""
    default = run.method.default(state.method.server)
    each = [
        architectures.select(default, group) for group in range(len(cohort.lengths))
    ]

    def per_client(numbers: list[Any]) -> Array:
        lengths = cohort.lengths if len(numbers) > 1 else [len(cohort.active)]
        pairs = zip(lengths, numbers, strict=True)
        return jnp.concatenate([jnp.full(n, x, jnp.int32) for n, x in pairs])

    if run.method.traffic is not None:
        found = run.method.traffic(state.method, cohort, metrics)
    else:
        found = traffic.both_ways(cohort, per_client(list(map(trees.size, each))))
    if run.uploads is None or run.uploads.size is None:
        return found
    zeros = [_zeros(tree) for tree in each]
    scalars, integers = zip(*map(run.uploads.size, zeros), strict=True)
    less = per_client(list(map(trees.size, zeros))) - per_client(list(scalars))
    active = cohort.active.astype(jnp.int32)
    ints = found.ints + active * per_client(list(integers))
    return found._replace(up=found.up - active * less, ints=ints)


def check(run: Averaged, name: str, task: Task) -> None:
    """Raises InputError unless a method can have the options of a run."""
    method, change = run.method, run.uploads
    server = jax.eval_shape(lambda: method.init(jax.random.key(0)).server)
    if run.server is not None and not method.averages:
        raise InputError(
            f"{name} cannot have a server optimizer: its Method names no `averages`."
        )
    if change is None:
        return
    default = jax.eval_shape(method.default, server)
    if not jax.tree.leaves(default):
        raise InputError(f"{name} takes no option on uploads: clients send nothing.")
    if change.server is not None and architectures.is_grouped(default):
        raise InputError(
            f"{name} averages within each architecture: this option needs one mean."
        )
    if change.check is not None:
        change.check(task)
    if change.weight is not None:
        _check_private(method, name, task)


def averages_statistics(method: Method) -> bool:
    """Returns whether uploads have running statistics."""
    server = jax.eval_shape(lambda: method.init(jax.random.key(0)).server)
    return bool(jax.tree.leaves(divided(jax.eval_shape(method.default, server))[1]))


def _check_private(method: Method, name: str, task: Task) -> None:
    """Raises InputError unless the server sees nothing of the clients but one mean of
    equal weights."""
    refused = f"{name} cannot have differential privacy: "
    if method.start is not None or method.finish is not None:
        raise InputError(f"{refused}its server reads more of a client than the mean.")
    if averages_statistics(method):
        raise InputError(
            f"{refused}it averages running statistics, which noise makes negative: use "
            "bn_stats='local'."
        )
    if task.sampling is not None:
        raise InputError(f"{refused}its epsilon needs uniform `sampling`.")
    if task.num_clients < 2:
        raise InputError(f"{refused}it needs 2 clients or more, got 1.")
    n = task.num_clients
    stub: Any = SimpleNamespace(
        ids=jnp.arange(n), active=jnp.ones(n, bool), trained=jnp.ones(n, bool),
        sizes=jnp.ones(n, jnp.int32), total=jnp.int32(n), round=jnp.int32(0),
        class_counts=jnp.ones((n, task.num_classes), jnp.int32),
    )  # fmt: skip
    leaves = jax.tree.leaves(jax.eval_shape(lambda: method.weight(stub)))
    if len(leaves) > 1 or any(x.ndim > 1 for x in leaves):
        raise InputError(f"{refused}its weights are more than one number a client.")


def divided(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits an upload into weights and running statistics, each with holes."""

    def counts(path: tuple[Any, ...], _: Any) -> bool:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return not _statistics(names)

    return trees.partition(tree, jax.tree_util.tree_map_with_path(counts, tree))


def _statistics(names: list[Any]) -> bool:
    """Returns True for a path into the group `stats` of a model: at the top of a tree,
    or below a name that holds a model (SCAFFOLD's w)."""
    if names[:1] == ["stats"]:
        return True
    return names[1:2] == ["stats"] and names[0] not in BODY_AND_HEAD


def _zeros(default: PyTree) -> PyTree:
    return optax.tree.zeros_like(divided(default)[0])


def _weights(method: Method, server: PyTree) -> tuple[PyTree, PyTree]:
    """Splits the server's state into the averaged weights and the rest, each with
    holes."""

    def moves(path: tuple[Any, ...], leaf: Array) -> bool:
        names = [getattr(key, "key", None) for key in path]
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return names[0] in method.averages and not _statistics(names) and floats

    return trees.partition(server, jax.tree_util.tree_map_with_path(moves, server))


def _whole(method: Method) -> str:
    """Returns the only averaged name if it holds the parts of a model (SCAFFOLD,
    pFedAFM); else nothing."""
    first, *others = method.averages
    return "" if others or first in BODY_AND_HEAD else first


def _moved(method: Method, server: PyTree) -> PyTree:
    """Returns the weights that a server optimizer sees: the averaged parts, or the
    parts of the model if the only average is one."""
    weights, _ = _weights(method, server)
    whole = _whole(method)
    return weights[whole] if whole else weights


def _stepped(
    run: Averaged, before: PyTree, after: PyTree, optimizer: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns the server's state with a step of its optimizer in place of the change of
    the averages, and the optimizer's state; both unchanged where no weight moves."""
    assert run.server is not None
    whole, (old, _), (_, rest) = (
        _whole(run.method),
        _weights(run.method, before),
        _weights(run.method, after),
    )
    here, there = _moved(run.method, before), _moved(run.method, after)
    gradient = jax.tree.map(_difference, here, there)
    updates, kept = run.server.update(gradient, optimizer, here)
    new = optax.tree.cast_like(optax.apply_updates(here, updates), here)
    new = {**old, whole: new} if whole else new
    moves = functools.reduce(
        jnp.logical_or, map(jnp.any, jax.tree.leaves(gradient)), jnp.bool(False)
    )
    new, kept = trees.choose(moves, (new, kept), (old, optimizer))
    return trees.merge(new, rest), kept


def _difference(before: Array, after: Array) -> Array:
    """Returns before - after, and 0 where it is rounding alone: an optimizer such as
    Adam would take a step of full length from it."""
    difference = before - after
    bound = ROUNDING * jnp.finfo(jnp.float32).epsneg * jnp.abs(before)
    return jnp.where(jnp.abs(difference) <= bound, 0, difference)
