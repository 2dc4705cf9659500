"""Asynchronous aggregation: the server updates its model whenever clients arrive.

References: Xie, Koyejo & Gupta, Asynchronous federated optimization (FedAsync, 2019,
arXiv 1903.03934); Nguyen et al., Federated learning with buffered asynchronous
aggregation (FedBuff, AISTATS 2022, arXiv 2106.06639).
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Gt, Interval

from fedjax_pfl import trees
from fedjax_pfl.engine import averaged
from fedjax_pfl.engine.averaged import Averaged, Sent
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.method import Runner, Setting
from fedjax_pfl.engine.schedule import Schedule
from fedjax_pfl.errors import InputError, check, moved
from fedjax_pfl.types import Array, Client, Method, Metrics, PyTree, RunState, Task
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


class Arrivals(NamedTuple):
    """The clock of an asynchronous run, for `program(..., clock=...)`: round t is the
    server's update t.

    A client's local training is that of a round of one client: the one with the number
    of the version it received, from that version, with the client's present row of
    State.clients. `metrics.clients` has its `staleness`. The task's participation is
    the fraction of clients that train at one time.
    """

    rule: Rule
    schedule: Schedule  # `schedule.arrivals` of the task and the rule's buffer

    @property
    def most_rounds(self) -> int:
        """The number of updates in the schedule."""
        return len(self.schedule.ids)

    def task(self, task: Task) -> Task:
        """Returns the task whose rounds are updates of the server."""
        buffer = self.rule.buffer
        check("schedule", self.schedule.ids.shape[1], buffer, buffer)
        return task_of(task, self.rule)

    def check(self, setting: Setting, runner: Runner) -> None:
        """Raises InputError unless updates can arrive one after another."""
        found, refused = runner.averaged, f"{setting.name} cannot run asynchronously: "
        if len(setting.task.models) > 1:
            raise InputError(
                "Asynchronous aggregation needs clients of one architecture, got "
                f"{len(setting.task.models)}."
            )
        if found is None:
            raise InputError(f"{refused}its round is not one mean over the clients.")
        if found.method.start is not None or found.method.finish is not None:
            raise InputError(
                f"{refused}its server reads more of a client than the mean."
            )
        uploads = found.uploads
        if uploads is not None and (
            uploads.weight is not None or uploads.combine is not None
        ):
            raise InputError(f"{refused}private and robust options need rounds.")

    def begin(self, task: Task, state: RunState) -> RunState:
        """Adds room for earlier versions."""
        room = lambda x: jnp.zeros((self.schedule.slots, *x.shape), x.dtype)
        versions = jax.tree.map(room, state.method.server)
        return state._replace(record={"versions": versions})

    def draw(
        self, task: Task, key: Array, t: Array, record: PyTree = (), **past: Any
    ) -> tuple[Array, Array]:
        """Returns the clients that arrive."""
        ids = jnp.asarray(self.schedule.ids)[t]
        if len(ids) == task.num_clients:
            ids = jnp.arange(len(ids), dtype=jnp.int32)
        return ids, jnp.ones(len(ids), bool)

    def round(
        self,
        key: Array,
        method: Runner,
        of_round: Callable[[Array], Runner],
        state: RunState,
        cohort: Cohort,
    ) -> tuple[RunState, Metrics, dict[str, Array]]:
        """Trains the clients that arrive, each from its version, and updates the
        server."""
        on, t, plan = _with_updates(method), cohort.round, self.schedule
        now, kept = state.method.server, jnp.asarray(plan.slot)[t]
        versions = jax.tree.map(
            lambda every, x: every.at[kept].set(x), state.record["versions"], now
        )
        # [S] position in the order of arrival
        arrived = jnp.asarray(plan.ids)[t][None] == cohort.ids[:, None]
        at = jnp.argmax(arrived, axis=1)
        started = jnp.asarray(plan.started)[t][at]
        source = jnp.asarray(plan.source)[t][at]
        stale = cohort.replicated((t - started).astype(jnp.float32))

        def client(
            c: Client,
            active: Array,
            rows: PyTree,
            version: tuple[Array, Array, Array],
        ) -> tuple[PyTree, Sent]:
            number, slot, stale = version
            alone, mine = cohort.alone(c.id, active, number), of_round(number)
            begin = trees.gather(versions, slot)
            before = state._replace(method=state.method._replace(server=begin))

            def one(c: Client, rows: PyTree) -> tuple[PyTree, Sent]:
                return averaged.work(_with_updates(mine), alone, c, before, rows, ())

            found = alone.map(one, jax.tree.map(lambda x: x[None], rows))
            upload, rest = jax.tree.map(lambda x: x[0], found)
            part = self.rule.rate * self.rule.staleness(stale)
            return _scaled(self.rule, on.method, upload, begin, now, part), rest

        mean, (found,) = cohort.mean(
            client,
            *(cohort.active, state.rows, (started, source, stale)),
            weight=None if self.rule.mixes else on.method.weight(cohort),
            default=averaged.neutral(on, now),
            phase=None,
        )
        new, metrics = averaged.conclude(on, key, state, cohort, mean, found)
        new = new._replace(record={"versions": versions})
        return new, metrics, {"staleness": stale}


def _with_updates(runner: Runner) -> Averaged:
    """Returns a method whose clients send updates, with options or without."""
    found = runner.averaged
    assert found is not None  # by `Arrivals.check`
    return found if found.uploads else found._replace(uploads=composed({}))


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


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = moved(
        __name__, {"program": "program(..., clock=asynchronous.Arrivals(rule, plan))"}
    )
