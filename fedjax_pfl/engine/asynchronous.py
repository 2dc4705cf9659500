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

from fedjax_pfl import keys, trees
from fedjax_pfl.engine import (
    averaged,
    contract,
    frozen,
    program as synchronous,
    validate,
)
from fedjax_pfl.engine.averaged import Averaged, Sent
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.method import Runner, Setting, Traced
from fedjax_pfl.engine.placement import Placement, arrange, sharded
from fedjax_pfl.engine.program import Parts, Program, Round
from fedjax_pfl.engine.schedule import Schedule
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Client,
    Federation,
    Method,
    PyTree,
    RunState,
    Task,
)
from fedjax_pfl.uploads.chain import composed

# staleness [] float32, versions since the client's start -> its weight, 1 at 0
Staleness = Callable[[Array], Array]


class Rule(NamedTuple):
    """Rule by which the server takes arriving models."""

    buffer: int  # clients per update
    rate: float
    staleness: Staleness
    mixes: bool  # FedAsync's mean of models; else FedBuff's mean of changes


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
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    rule: Rule,
    schedule: Schedule,
    hparams: dict[str, Any] | None = None,
    *,
    width: int = 1,
    devices: int = 1,
    checked: bool = True,
    **options: Any,
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
      InputError: as in `program.program`; or the method's server reads more of the
        clients than one mean, or is private.
    """
    setting = synchronous.set_up(factory, task, hparams, **options)
    task = task_of(setting.task, rule)
    setting = setting._replace(task=task)
    check("schedule", schedule.ids.shape[1], rule.buffer, rule.buffer)
    validate.layout(options.get("lr_decay", 1.0), width, devices)
    on = synchronous.parts(setting, width=width, devices=devices)
    _check(setting, on)
    run = _Run(setting, rule, schedule, width, on)
    on = on._replace(
        init=functools.partial(_init, run),
        draw=_drawer(task, schedule, devices),
        train=functools.partial(_train, run),
    )
    found = synchronous.from_parts(on, setting, devices)
    found = found._replace(most_rounds=len(schedule.ids))
    if checked:
        functions = found.init, found.round, found.evaluate
        contract.check_shapes(task, found.traced, *functions)
    return found


class _Run(NamedTuple):
    """Arguments of `program` that a round needs."""

    setting: Setting
    rule: Rule
    schedule: Schedule
    width: int
    on: Parts


def _check(setting: Setting, on: Parts) -> None:
    """Raises InputError unless updates can arrive one after another."""
    found = on.runner(on.traced, 0, frozen.values(setting.task) or None).averaged
    refused = f"{setting.name} cannot run asynchronously: "
    if len(setting.task.models) > 1:
        raise InputError(
            "Asynchronous aggregation needs clients of one architecture, got "
            f"{len(setting.task.models)}."
        )
    if found is None:
        raise InputError(f"{refused}its round is not one mean over the clients.")
    if found.method.start is not None or found.method.finish is not None:
        raise InputError(f"{refused}its server reads more of a client than the mean.")
    uploads = found.uploads
    if uploads is not None and (
        uploads.weight is not None or uploads.combine is not None
    ):
        raise InputError(f"{refused}private and robust options need rounds.")


def _init(run: _Run, key: Array, traced: Traced) -> RunState:
    """Returns the state before the first update, with room for earlier versions."""
    state, count = run.on.init(key, traced), run.schedule.slots
    room = lambda x: jnp.zeros((count, *x.shape), x.dtype)
    versions = jax.tree.map(room, state.method.server)
    return state._replace(record={"versions": versions})


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


def _train(
    run: _Run,
    key: Array,
    traced: Traced,
    f: Federation,
    here: RunState,
    ids: Array,
    active: Array,
    t: Array,
    evaluated: Array,
) -> tuple[RunState, Round]:
    """Trains the clients that arrive, each from its version, and updates the server."""
    key, traced, f, here, ids, active = synchronous.free(
        run.on.mesh, key, traced, f, here, ids, active
    )
    now, kept = here.method.server, jnp.asarray(run.schedule.slot)[t]
    versions = jax.tree.map(
        lambda every, x: every.at[kept].set(x), here.record["versions"], now
    )
    # [S] position in the order of arrival
    at = jnp.argmax(jnp.asarray(run.schedule.ids)[t][None] == ids[:, None], axis=1)
    started = jnp.asarray(run.schedule.started)[t][at]
    source = jnp.asarray(run.schedule.source)[t][at]
    stale = sharded((t - started).astype(jnp.float32), run.on.mesh, P())
    runner, method = _averaged(run, traced, t, f)

    def cohort(ids: Array, active: Array, number: Array, **layout: Any) -> Cohort:
        task = frozen.bind(run.setting.task, f.frozen)
        stream = keys.clients_key(key, number)
        return Cohort(
            *(f, task, ids, active),
            key=stream,
            round=number,
            evaluated=evaluated,
            **layout,
        )

    def client(
        c: Client, active: Array, rows: PyTree, number: Array, slot: Array, stale: Array
    ) -> tuple[PyTree, Sent]:
        alone = cohort(c.id[None], active[None], number, width=1)
        begin = trees.gather(versions, slot)
        before = here._replace(method=here.method._replace(server=begin))
        _, mine = _averaged(run, traced, number, f)

        def one(c: Client, rows: PyTree) -> tuple[PyTree, Sent]:
            return averaged.work(mine, alone, c, before, rows, ())

        upload, found = alone.map(one, jax.tree.map(lambda x: x[None], rows))
        upload, found = jax.tree.map(lambda x: x[0], (upload, found))
        part = run.rule.rate * run.rule.staleness(stale)
        return _scaled(run.rule, method.method, upload, begin, now, part), found

    layout = {"width": run.width, "mesh": run.on.mesh, "lengths": run.on.lengths}
    present = cohort(ids, active, t, **layout)
    weight = None if run.rule.mixes else method.method.weight(present)
    mean, (found,) = present.mean(
        client,
        *(active, here.rows, started, source, stale),
        weight=weight,
        default=averaged.neutral(method, now),
        phase=None,
    )
    stream = keys.fold(keys.round_key(key, t), keys.Round.SERVER)
    with contract.named(run.setting.factory, "round"):
        new, m = averaged.conclude(method, stream, here, present, mean, found)
        contract.check_round(here, new, m, len(ids), runner.headline[0])
    sent = averaged.sent(method, here, present, m)
    finite = synchronous.finite(new, len(ids), run.on.lengths)
    own = {"staleness": stale} | m.clients
    metrics = Round(m.loss, m.post, own, m.server, sent, ids, active, finite)
    return new._replace(record={"versions": versions}), metrics


def _averaged(
    run: _Run, traced: Traced, t: Array, f: Federation
) -> tuple[Runner, Averaged]:
    """Returns the method's functions, and the method, whose clients send updates."""
    runner = run.on.runner(traced, t, f.frozen)
    found = runner.averaged
    assert found is not None  # by `_check`
    if found.uploads is None:
        found = found._replace(uploads=composed({}))
    return runner, found


def _scaled(
    rule: Rule, method: Method, upload: PyTree, begin: PyTree, now: PyTree, part: Array
) -> PyTree:
    """Returns what a client contributes to the mean update: `part` times its own.

    FedAsync's update is the change from the present version to the client's model,
    FedBuff's that from the version it received. Running statistics move towards the
    client's by `part`, and by all of the way at most.
    """
    (change, statistics), (old, _) = (
        averaged.divided(upload),
        averaged.divided(method.default(begin)),
    )
    new, known = averaged.divided(method.default(now))
    if rule.mixes:
        change = jax.tree.map(lambda u, a, b: u + (a - b), change, old, new)
    change = optax.tree.cast_like(optax.tree.scale(part, change), new)
    statistics = trees.lerp(jnp.minimum(part, 1), statistics, known)
    return trees.merge(change, optax.tree.cast_like(statistics, known))
