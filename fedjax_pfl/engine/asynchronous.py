"""Asynchronous aggregation: the server updates its model whenever clients arrive.

References: Xie, Koyejo & Gupta, Asynchronous federated optimization (FedAsync, 2019,
arXiv 1903.03934); Nguyen et al., Federated learning with buffered asynchronous
aggregation (FedBuff, AISTATS 2022, arXiv 2106.06639).
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Interval
from jax.sharding import PartitionSpec as P

from fedjax_pfl import keys, traffic, trees, uploads
from fedjax_pfl.engine import contract, frozen, program as synchronous, validate
from fedjax_pfl.engine.cohort import Cohort, Transform
from fedjax_pfl.engine.method import Traced, bound
from fedjax_pfl.engine.placement import Placement, arrange, sharded
from fedjax_pfl.engine.program import Parts, Program, Round
from fedjax_pfl.engine.schedule import Schedule
from fedjax_pfl.errors import ContractError, InputError, check
from fedjax_pfl.types import Algorithm, Array, Client, Federation, PyTree, State, Task

# staleness [] float32, versions since the client's start -> its weight, 1 at 0
Staleness = Callable[[Array], Array]


class Rule(NamedTuple):
    """Rule by which the server takes arriving models."""

    buffer: int  # clients per update
    rate: float
    staleness: Staleness
    mixes: bool  # FedAsync's mean of models; else FedBuff's mean of changes


class Server(NamedTuple):
    """State.server of an asynchronous run."""

    method: PyTree  # the method's own
    versions: PyTree  # [slots, ...] earlier ones, from which clients still train


def constant() -> Staleness:
    """Returns the weight 1."""
    return jnp.ones_like


def polynomial(a: Annotated[float, Ge(0)] = 0.5) -> Staleness:
    """Returns (1 + staleness)^-a."""
    check("a", a, 0, math.inf)
    return lambda staleness: (1 + staleness) ** -a


def hinge(
    a: Annotated[float, Ge(0)] = 10.0, b: Annotated[float, Ge(0)] = 4.0
) -> Staleness:
    """Returns 1 up to a staleness of b, then 1 / (a (staleness - b) + 1)."""
    check("a", a, 0, math.inf)
    check("b", b, 0, math.inf)
    return lambda staleness: 1 / (a * jnp.maximum(staleness - b, 0) + 1)


def fedasync(
    alpha: Annotated[float, Interval(gt=0, le=1)] = 0.6,
    staleness: Staleness | None = None,
) -> Rule:
    """Returns FedAsync: x <- (1 - alpha s) x + alpha s x_new for each client that
    arrives, with s by its staleness (None: polynomial of 0.5)."""
    check("alpha", alpha, 0, 1, open_low=True)
    return Rule(1, alpha, staleness or polynomial(), True)


def fedbuff(
    buffer: Annotated[int, Ge(1)],
    rate: Annotated[float, Gt(0)] = 1.0,
    staleness: Staleness | None = None,
) -> Rule:
    """Returns FedBuff: x <- x + rate times the mean of s (x_new - x_start) over
    `buffer` clients.

    Args:
      rate: of the server.
      staleness: s; None: 1 / sqrt(1 + staleness).

    Note:
      Clients have the weights of the method's mean, where the paper's are equal. No
      client is in a buffer twice.
    """
    check("buffer", buffer, 1, math.inf, whole=True)
    check("rate", rate, 0, math.inf, open_low=True)
    return Rule(buffer, rate, staleness or polynomial(), False)


def task_of(task: Task, rule: Rule) -> Task:
    """Returns the task whose rounds are updates of the server."""
    share = rule.buffer / task.num_clients
    return task._replace(participation=(share, share), sampling=None)


def program(
    factory: Callable[..., Algorithm] | str,
    task: Task,
    rule: Rule,
    schedule: Schedule,
    hparams: dict[str, Any] | None = None,
    *,
    lr_decay: float = 1.0,
    width: int = 1,
    devices: int = 1,
    transform: Transform | None = None,
    checked: bool = True,
) -> Program:
    """Makes a Program whose round t is the server's update t.

    A client's local training is that of a round of one client: the one with the number
    of the version it received, from that version, with the client's present row of
    State.clients. `metrics.clients` has its `staleness`.

    Args:
      task: its participation is the fraction of clients that train at one time.
      schedule: `schedule.arrivals` of this task and the rule's buffer.
      hparams: like the others, as in `program.program`.

    Raises:
      InputError: as in `program.program`; or the server keeps more than the mean of
        what the clients send in one call of `cohort.mean`.
    """
    factory, hparams = validate.method(factory), hparams or {}
    task = task_of(validate.task(task), rule)
    check("schedule", schedule.ids.shape[1], rule.buffer, rule.buffer)
    validate.layout(lr_decay, width, devices)
    options: dict[str, Any] = {"lr_decay": lr_decay, "width": width, "devices": devices}
    if len(task.models) > 1:
        raise InputError(
            "Asynchronous aggregation needs clients of one architecture, got "
            f"{len(task.models)}."
        )
    kept = _kept(factory, schedule)
    on = synchronous.parts(kept, task, hparams, **options)
    algorithm, _ = bound(factory, task, hparams, lr_decay)
    run = _Run(factory, algorithm, task, rule, schedule, transform, width, on)
    draw, train = _drawer(task, schedule, devices), functools.partial(_train, run)
    with_versions, _ = bound(kept, task, hparams, lr_decay)
    on = on._replace(draw=draw, train=train)
    found = synchronous.from_parts(on, task, devices, with_versions)
    found = found._replace(method=factory, most_rounds=len(schedule.ids))
    if checked:
        functions = found.init, found.round, found.evaluate
        contract.check_shapes(task, found.traced, *functions)
    return found


def _kept(
    factory: Callable[..., Algorithm], schedule: Schedule
) -> Callable[..., Algorithm]:
    """Returns the method with room for versions in State.server."""

    @functools.wraps(factory)
    def make(task: Task, **hparams: Any) -> Algorithm:
        method = factory(task, **hparams)

        def room(x: Array) -> Array:
            return jnp.zeros((schedule.slots, *x.shape), x.dtype)

        def init(key: Array) -> State:
            server, clients = method.init(key)
            return State(Server(server, jax.tree.map(room, server)), clients)

        return uploads.over(method, init=init)

    return make


def _drawer(
    task: Task, schedule: Schedule, devices: int
) -> Callable[..., tuple[Array, Array]]:
    """Returns `Parts.draw` by the schedule."""

    def draw(
        where: Placement | None, key: Array, t: Array, **past: Any
    ) -> tuple[Array, Array]:
        ids = jnp.asarray(schedule.ids)[t]
        if len(ids) == task.num_clients:
            ids = jnp.arange(len(ids), dtype=jnp.int32)
        return arrange(task, where, ids, jnp.ones(len(ids), bool), devices)

    return draw


class _Run(NamedTuple):
    """Arguments of `program` that a round needs."""

    name: Callable[..., Algorithm]
    algorithm: Callable[..., Algorithm]  # (traced, round)
    task: Task
    rule: Rule
    schedule: Schedule
    transform: Transform | None
    width: int
    on: Parts


def _train(
    run: _Run,
    key: Array,
    traced: Traced,
    f: Federation,
    here: State,
    ids: Array,
    active: Array,
    t: Array,
    evaluated: Array,
) -> tuple[State, Round]:
    """Trains the clients that arrive, each from its version, and updates the server."""
    key, traced, f, here, ids, active = synchronous.free(
        run.on.mesh, key, traced, f, here, ids, active
    )
    now, kept = here.server.method, jnp.asarray(run.schedule.slot)[t]
    versions = jax.tree.map(
        lambda every, x: every.at[kept].set(x), here.server.versions, now
    )
    # [S] position in the order of arrival
    at = jnp.argmax(jnp.asarray(run.schedule.ids)[t][None] == ids[:, None], axis=1)
    started = jnp.asarray(run.schedule.started)[t][at]
    source = jnp.asarray(run.schedule.source)[t][at]
    stale = sharded((t - started).astype(jnp.float32), run.on.mesh, P())
    names: set[str] = set()

    def client(
        c: Client, active: Array, row: PyTree, number: Array, slot: Array, stale: Array
    ) -> tuple[PyTree, ...]:
        alone = Cohort(
            *(f, frozen.bind(run.task, f.frozen), c.id[None], active[None]),
            key=keys.clients_key(key, number),
            round=number,
            evaluated=evaluated,
            width=1,
            transform=run.transform,
        )
        stream = keys.fold(keys.round_key(key, number), keys.Round.SERVER)
        begin = trees.gather(versions, slot)
        before = State(begin, jax.tree.map(lambda x: x[None], row))
        with contract.named(run.name, "round"):
            method = run.algorithm(traced, number, f.frozen)
            (new, row), known, weight, sent = _alone(method, stream, before, alone)
        names.update(sent)
        weight = jnp.float32(1) if run.rule.mixes else weight
        part = weight * run.rule.rate * run.rule.staleness(stale)
        if not run.rule.mixes:
            new = jax.tree.map(functools.partial(_moved, stale), new, begin, now)
        scaled = jax.tree.map(lambda x: part * x, new)
        return (scaled, part, weight), row, known

    present = Cohort(
        *(f, frozen.bind(run.task, f.frozen), ids, active),
        key=keys.clients_key(key, t),
        round=t,
        evaluated=evaluated,
        width=run.width,
        mesh=run.on.mesh,
        lengths=run.on.lengths,
    )
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), now)
    given = active, here.clients, started, source, stale
    (total, part, weight), (rows, known) = present.mean(
        client, *given, default=(nothing, *jnp.zeros((2,))), phase=None
    )
    mixed = _mixed(now, total, part, weight)
    server = {name: (mixed if name in names else now)[name] for name in now}
    loss, post, own, sent = known
    finite = synchronous.finite(State(server, rows), len(ids), run.on.lengths)
    found = Round(loss, post, {"staleness": stale} | own, {}, sent, ids, active, finite)
    return State(Server(server, versions), rows), found


class _Once(uploads.Through):
    """A cohort whose `mean` notes its arguments.

    Attributes:
      calls: of `map`, `mean`, `scan` and `replicated`.
      options: keyword arguments of the last call of `mean`.
    """

    def __init__(self, cohort: Cohort):
        super().__init__(cohort)
        self.calls, self.options = 0, dict[str, Any]()

    def map(self, *given: Any, **options: Any) -> Any:
        """See `types.Cohort`."""
        self.calls += 1
        return super().map(*given, **options)

    def mean(self, *given: Any, **options: Any) -> Any:
        """See `types.Cohort`."""
        self.calls, self.options = self.calls + 1, options
        return super().mean(*given, **options)

    def scan(self, *given: Any, **options: Any) -> Any:
        """See `types.Cohort`."""
        self.calls += 1
        return super().scan(*given, **options)

    def replicated(self, tree: PyTree) -> PyTree:
        """See `types.Cohort`."""
        self.calls += 1
        return self._cohort.replicated(tree)


def _alone(
    method: Algorithm, key: Array, here: State, cohort: Cohort
) -> tuple[State, PyTree, Array, PyTree]:
    """Runs a round of one client.

    Returns:
      the state with the client's row, its results, its weight in the mean, and its
      upload's shapes.
    """
    once: Any = _Once(cohort)
    result = method.round(key, here, once)
    contract.check_round(here, result, 1, method.headline[0])
    new, m = result
    if not _is_mean(method, here.server, new.server, once):
        raise ContractError(
            "asynchronous aggregation needs a round of one call of cohort.mean, whose "
            "result is all that the server keeps."
        )
    weight = once.options.get("weight")
    weight = cohort.active if weight is None else weight
    sent = (method.traffic or traffic.uploads)(here, once, m)
    known = m.loss, m.post, m.clients, sent, weight.astype(jnp.float32)
    row, (*known, weight) = jax.tree.map(lambda x: x[0], (new.clients, known))
    return State(new.server, row), tuple(known), weight, cohort.uploads[0][0]


def _is_mean(method: Algorithm, server: PyTree, new: PyTree, cohort: Any) -> bool:
    """Returns whether the next server is the mean of the upload, judged by names,
    shapes and calls of the cohort; parts that are not sent must be kept."""
    if (cohort.calls, cohort.means) != (1, 1) or not isinstance(server, dict):
        return False
    sent, weight = cohort.uploads[0][0], cohort.options.get("weight")
    if not isinstance(sent, dict) or not set(sent) <= set(server):
        return False
    full = {name for name in sent if jax.tree.leaves(sent[name])}
    pairs = zip(jax.tree.leaves(server), jax.tree.leaves(new), strict=True)
    like = contract.shapes({name: server[name] for name in sent})
    return (
        full <= {*method.averages, "stats"}
        and contract.difference(like, sent) is None
        and sum(a is not b for a, b in pairs) <= len(jax.tree.leaves(sent))
        and (weight is None or jnp.shape(weight) == (1,))
        and cohort.options.get("combine") is None
    )


def _moved(stale: Array, new: Array, begin: Array, now: Array) -> Array:
    """Returns what a client has made of `begin` as a change of the present version."""
    return jnp.where(stale > 0, new + (now - begin), new)


def _mixed(now: PyTree, total: PyTree, part: Array, weight: Array) -> PyTree:
    """Returns (1 - a) x + the sum, with a the sum of parts, both over all weights."""
    scale = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
    mixed = jax.tree.map(
        lambda x, sum: (1 - part * scale) * x + sum * scale, now, total
    )
    return optax.tree.cast_like(mixed, now)
