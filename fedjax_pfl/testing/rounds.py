"""A method and its compiled round on the synthetic federation, and how two of its
rounds are compared."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.engine import parts, placement, program
from fedjax_pfl.engine.frozen import with_frozen
from fedjax_pfl.testing.synthetic import C, N, federation
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Context,
    Examples,
    Federation,
    Method,
    PyTree,
    RunState,
    State,
    Task,
    Upload,
)
from fedjax_pfl.uploads.chain import Chain, Option

# a cohort without client 2, and with a padded slot
IDS = np.array([3, 0, 4, 1, N + 2], np.int32)
ACTIVE = IDS < N
Round = parts.Round


class ContractViolation(AssertionError):
    """A method breaks a rule of the contract; the message names the rule and where."""


class Subject(NamedTuple):
    """A method on the synthetic federation, see `subject`."""

    factory: Callable[..., Algorithm | Method]
    task: Task
    federation: Federation
    traced: dict[str, Any]  # the traced hyperparameters, float32
    init: Callable[..., RunState]  # (key, traced) -> RunState, rows by client id
    # (context, RunState, ids, active, evaluated)
    round: Callable[..., tuple[RunState, Round]]
    # (context, RunState) -> {name: [N]}
    evaluate: Callable[..., dict[str, Array]]
    start: RunState  # all clients have trained and differ
    uploads: Chain | Option | Upload | None = None  # options on uploads


def subject(
    factory: Callable[..., Algorithm | Method],
    task: Task,
    *,
    width: int = 1,
    devices: int = 1,
    start: RunState | State | None = None,
    uploads: Chain | Option | Upload | None = None,
    held: bool = False,
) -> Subject:
    """Compiles the round of a method on an explicit cohort; State and metrics are by
    client id, not by place.

    Args:
      task: as `task` makes it.
      width: clients at once on each of the `devices`.
      start: the state in which the checks begin; default that after two rounds of
        everybody.
      uploads: options on uploads, as of `program.program`.
      held: every mean is its default, as of `parts.parts`.
    """
    setting = program.set_up(factory, task, uploads=uploads)
    layout = placement.lay_out(setting.task, width, devices)
    made = parts.parts(setting, layout, held=held)
    traced = {name: np.float32(value) for name, value in made.traced.items()}
    where = layout.placement if len(task.models) > 1 else None
    rows = placement.StateRows(task, where, 1)

    def round(
        context: Context, state: RunState, ids: Array, active: Array, evaluated: Array
    ) -> tuple[RunState, Round]:
        if where is not None:
            ids, active = placement.arrange(task, where, ids, active, 1)
        state, at = rows.place(state), rows.of(ids)
        here = state.with_rows(rows.gather(state.rows, at, layout.lengths))
        new, metrics = made.train(context, here, ids, active, evaluated)
        kept = rows.scatter(state.rows, at, new.rows, active, layout.lengths)
        return rows.unplace(new.with_rows(kept)), metrics

    def evaluate(context: Context, state: RunState) -> dict[str, Array]:
        return made.score(context, state, jnp.arange(N, dtype=jnp.int32), (N,))

    fill = Examples(
        jnp.zeros(task.prepared.shape[1:], task.prepared.dtype), jnp.int32(0)
    )
    f = federation(input=task.input, public=task.public, label=task.label)
    f = with_frozen(f, task)._replace(mask_fill=fill)
    # init's few operations are those of other methods
    functions = (made.init, jax.jit(round), jax.jit(evaluate))
    found = Subject(factory, task, f, traced, *functions, RunState(State(None, None)))
    found = found._replace(uploads=uploads)
    # under a trace, where no branch may depend on a value
    jax.eval_shape(made.init, jax.random.key(1), traced)
    start = RunState(start) if isinstance(start, State) else start
    return found._replace(start=_started(found) if start is None else start)


def _started(s: Subject) -> RunState:
    state = jax.device_get(s.init(jax.random.key(1), s.traced))
    for t in range(2):
        state, _ = run(
            s,
            state=state,
            ids=np.arange(N, dtype=np.int32),
            active=np.ones(N, bool),
            t=t,
        )
    rng = np.random.default_rng(2)
    # a counter is unchanged
    real: Callable[[Any], bool] = lambda x: jnp.issubdtype(x.dtype, jnp.floating)

    def noisy(x: np.ndarray) -> np.ndarray:
        # a variance remains positive
        return x + rng.uniform(0, 0.2, x.shape).astype(x.dtype) if real(x) else x

    return state.with_rows(jax.tree.map(noisy, state.rows))


def arguments(
    s: Subject,
    ids: np.ndarray = IDS,
    active: np.ndarray = ACTIVE,
    federation: Federation | None = None,
    state: RunState | State | None = None,
    t: int = 2,
    evaluated: bool = True,
    key: Array | None = None,
    **traced: float,
) -> tuple[Any, ...]:
    traced = s.traced | {name: np.float32(value) for name, value in traced.items()}
    f, state = federation or s.federation, s.start if state is None else state
    state = RunState(state) if isinstance(state, State) else state
    f = with_frozen(f, s.task)
    key = jax.random.key(7) if key is None else key
    context = Context(key, traced, f, np.int32(t))
    return context, state, ids, active, np.bool_(evaluated)


def run(s: Subject, **changes: Any) -> tuple[RunState, Round]:
    """One round of a subject: the state and the metrics on the host; `changes` of its
    arguments or its traced hyperparameters."""
    return jax.device_get(s.round(*arguments(s, **changes)))


def evaluate(
    s: Subject,
    federation: Federation | None = None,
    state: RunState | State | None = None,
    t: int = 2,
) -> dict[str, np.ndarray]:
    """The scores of all clients before round t, {name: [N]} on the host."""
    state, f = s.start if state is None else state, federation or s.federation
    f = with_frozen(f, s.task)
    context = Context(jax.random.key(7), s.traced, f, np.int32(t))
    return jax.device_get(s.evaluate(context, state))


def filled(f: Federation) -> Federation:
    """Other finite values and a valid label in masked rows."""
    assert f.mask_fill is not None
    x = f.mask_fill.x
    return f._replace(
        mask_fill=Examples(
            jnp.linspace(1, 3, x.size).reshape(x.shape).astype(x.dtype),
            jnp.int32(C - 1),
        )
    )


def rows_of(tree: PyTree, at: Any) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x)[at], tree)


def reported(metrics: Round, clients: np.ndarray) -> PyTree:
    """Returns the metrics of these clients."""
    at = [int(np.flatnonzero(metrics.ids == i)[0]) for i in clients]
    kept = {name: getattr(metrics, name) for name in ("loss", "post", "clients")}
    return rows_of(kept | {"traffic": metrics.traffic._asdict()}, at)


def same(
    what: str,
    found: PyTree,
    wanted: PyTree,
    clients: Any = None,
    tolerance: float = 0.0,
) -> None:
    """Raises ContractViolation at the first leaf where two trees of equal structure
    differ; NaN equals NaN.

    Args:
      clients: whose the rows are, if the leaves have a client axis.
      tolerance: relative and absolute; 0: bit for bit.
    """
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        off = ~np.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        if off.any():
            at = tuple(np.argwhere(off)[0])
            whose = (
                "" if clients is None else f" of client {np.asarray(clients)[at[0]]}"
            )
            raise ContractViolation(
                f"{what}{jax.tree_util.keystr(path)}{whose} is {a[at]:.9g} in place of "
                f"{b[at]:.9g}"
            )


def same_round(
    found: tuple[RunState, Round],
    wanted: tuple[RunState, Round],
    clients: Any,
    tolerance: float = 0.0,
) -> None:
    """Compares the server, the rows of `clients` and what is reported of them."""
    same("server", found[0].server, wanted[0].server, tolerance=tolerance)
    own: Callable[[tuple[RunState, Round]], PyTree] = lambda result: rows_of(
        result[0].clients, clients
    )
    same("clients", own(found), own(wanted), clients, tolerance)
    same(
        "metrics",
        reported(found[1], clients),
        reported(wanted[1], clients),
        clients,
        tolerance,
    )
