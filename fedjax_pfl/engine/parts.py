"""The functions of an experiment for the rows of a cohort; `storage` has the rows of
all clients."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_pfl import architectures, evaluation, keys, trees
from fedjax_pfl.engine import contract, frozen
from fedjax_pfl.engine.cohort import Cohort
from fedjax_pfl.engine.method import Runner, Setting, Traced, bound
from fedjax_pfl.engine.placement import (
    Layout,
    Placement,
    arrange,
    free,
    lay_out,
    slices,
)
from fedjax_pfl.engine.sampling import first, reads_record, recorded, sample, shares
from fedjax_pfl.errors import ContractError
from fedjax_pfl.types import (
    Array,
    Client,
    Context,
    Metrics,
    PyTree,
    RunState,
    Scores,
    Task,
    Traffic,
)

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


class Clock(Protocol):
    """A schedule of local training: whose, from which version of the server."""

    @property
    def most_rounds(self) -> int | None:
        """The number of rounds that there are; None: any."""

    def task(self, task: Task) -> Task:
        """Returns the task whose rounds are those of the clock."""

    def check(self, setting: Setting, runner: Runner) -> None:
        """Raises InputError for a method or options that it cannot have."""

    def begin(self, task: Task, state: RunState) -> RunState:
        """Adds its record to the first state."""

    def draw(
        self, task: Task, key: Array, t: Array, record: Any, **past: Any
    ) -> tuple[Array, Array]:
        """Returns ids and active of a round, before they are arranged."""

    def round(
        self,
        key: Array,
        method: Runner,
        of_round: Callable[[Array], Runner],
        state: RunState,
        cohort: Cohort,
    ) -> tuple[RunState, Metrics, dict[str, Array]]:
        """Computes a round; `of_round` has the method's functions in any round, and
        `method` in the present one. Returns also what the clock reports of clients."""


class Rounds(NamedTuple):
    """The clock of synchronous rounds: sampled clients begin from one version."""

    reads: bool = False  # the sampling reads what clients did before
    most_rounds: None = None

    def task(self, task: Task) -> Task:
        """Returns the task."""
        return task

    def check(self, setting: Setting, runner: Runner) -> None:
        """Accepts any method."""

    def begin(self, task: Task, state: RunState) -> RunState:
        """Adds the record of the clients' rounds, if the sampling reads it."""
        record = {"history": first(task.num_clients)} if self.reads else ()
        return state._replace(record=record)

    def draw(
        self, task: Task, key: Array, t: Array, record: PyTree = (), **past: Any
    ) -> tuple[Array, Array]:
        """Samples the clients."""
        past |= {"record": record["history"]} if self.reads else {}
        stream = keys.fold(keys.round_key(key, t), keys.Round.SAMPLING)
        return sample(stream, task, t, **past)

    def round(
        self,
        key: Array,
        method: Runner,
        of_round: Callable[[Array], Runner],
        state: RunState,
        cohort: Cohort,
    ) -> tuple[RunState, Metrics, dict[str, Array]]:
        """Computes the method's own round."""
        return *method.round(key, state, cohort), {}


class Parts(NamedTuple):
    """The functions of which a Program is made; ids and rows are those of a cohort,
    [S, ...]."""

    init: Callable[..., RunState]  # (key, traced) -> RunState[N], rows by client id
    # (placement, key, t, loss=, record=) -> ids and active of the round, as `sample`
    draw: Callable[..., tuple[Array, Array]]
    # (context, RunState, ids, active, evaluated) -> RunState, Round
    train: Callable[..., tuple[RunState, Round]]
    # (context, RunState, ids, lengths) -> {name: [S]}
    score: Callable[..., dict[str, Array]]
    # the same arguments -> mean training loss before the round [S]
    losses: Callable[..., Array]
    # (traced, t, frozen variables) -> the method's functions
    runner: Callable[..., Runner]
    traced: dict[str, float]  # the traced hyperparameters
    layout: Layout


def parts(
    setting: Setting,
    layout: Layout | None = None,
    clock: Clock | None = None,
    *,
    held: bool = False,
) -> Parts:
    """Returns the functions of an experiment for the rows of a cohort.

    Args:
      layout: None: one client at a time on one device.
      clock: None: synchronous rounds.
      held: every mean is its default, so that no client influences another.

    Raises:
      InputError: the method cannot have its task, its options or the clock.
    """
    task = setting.task
    layout = lay_out(task) if layout is None else layout
    given = setting._replace(task=task._replace(participation=shares(task)))
    runner, traced = bound(given)
    factory, mesh = setting.factory, layout.mesh
    time: Clock = Rounds(reads_record(task)) if clock is None else clock
    time.check(setting, runner(traced, 0, frozen.values(task) or None))

    def cohort(
        context: Context,
        ids: Array,
        active: Array,
        evaluated: Array,
        lengths: tuple[int, ...] = layout.lengths,
    ) -> Cohort:
        return Cohort(
            context,
            frozen.bind(task, context.federation.frozen),
            ids,
            active,
            evaluated=evaluated,
            layout=layout._replace(lengths=lengths),
            held=held,
        )

    def init(key: Array, traced: Traced) -> RunState:
        method = runner(traced, 0)
        with contract.named(factory, "init"):
            drawn = trees.single(method.init(keys.fold(key, keys.Run.INIT)))
        # no buffer may occur twice when the state is donated
        return jax.tree.map(jnp.copy, time.begin(task, drawn))

    def draw(
        where: Placement | None, key: Array, t: Array, **past: Any
    ) -> tuple[Array, Array]:
        ids, active = time.draw(task, key, t, **past)
        return arrange(task, where, ids, active, layout.devices)

    def train(
        context: Context, here: RunState, ids: Array, active: Array, evaluated: Array
    ) -> tuple[RunState, Round]:
        context, here, ids, active = free(mesh, context, here, ids, active)
        key, numbers, f, t = context
        of_round: Callable[[Array], Runner] = lambda t: runner(numbers, t, f.frozen)
        method, present = of_round(t), cohort(context, ids, active, evaluated)
        stream = keys.fold(keys.round_key(key, t), keys.Round.SERVER)
        with contract.named(factory, "round"):
            found = time.round(stream, method, of_round, here, present)
            new, metrics, seen = trees.single(found)
            contract.check_round(here, new, metrics, len(ids), method.headline[0])
            if evaluation.LORA_ERROR in {*task.metrics} - {*metrics.server}:
                raise ContractError(
                    "the metric lora_error needs trained A and B of LoRA that the "
                    "method averages."
                )
            sent = method.traffic(here, present, metrics)
        if "history" in here.record:
            past = recorded(here.record["history"], ids, active, t, metrics.loss)
            new = new._replace(record={"history": past})
        post = metrics.post | benign(metrics.post, ids)
        known = (metrics.loss, post, seen | metrics.clients, metrics.server)
        whole = finite(new, len(ids), layout.lengths)
        return new, Round(*known, sent, ids, active, whole)

    def score(
        context: Context, here: RunState, ids: Array, lengths: tuple[int, ...]
    ) -> dict[str, Array]:
        context, here, ids = free(mesh, context, here, ids)
        method = runner(context.traced, context.t, context.federation.frozen)

        def client(c: Client, row: PyTree) -> dict[str, Array]:
            predictor = method.predict(here.method.server, row, c)
            return evaluation.client(c, predictor, checked, task.metrics)

        def checked(outputs: PyTree, y: Array, mask: Array, c: Client) -> Scores:
            found = method.score(outputs, y, mask, c)
            contract.check_scores(found, method.headline[0])
            return found

        real = ids < task.num_clients
        with contract.named(factory, "predict or score"):
            present = cohort(context, ids, real, jnp.bool(True), lengths)
            found = present.map(client, here.method.clients)
        return found | benign(found, ids)

    def losses(
        context: Context, here: RunState, ids: Array, lengths: tuple[int, ...]
    ) -> Array:
        context, here, ids = free(mesh, context, here, ids)
        method = runner(context.traced, context.t, context.federation.frozen)

        def client(c: Client, row: PyTree) -> Array:
            predictor = method.predict(here.method.server, row, c)
            return evaluation.training_loss(c, predictor, task)

        real = ids < task.num_clients
        present = cohort(context, ids, real, jnp.bool(False), lengths)
        return present.map(client, here.method.clients)

    def benign(scores: dict[str, Array], ids: Array) -> dict[str, Array]:
        """Returns the scores of clients that are not malicious, NaN for those that
        are, if there are any."""
        if task.malicious is None:
            return {}
        known = jnp.minimum(ids, task.num_clients - 1)
        bad = jnp.asarray(task.malicious)[known]
        return {BENIGN + name: jnp.where(bad, jnp.nan, x) for name, x in scores.items()}

    return Parts(init, draw, train, score, losses, runner, traced, layout)


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
