"""The clients' state in the host's memory, of which only the rows of a round's clients
go to the devices and back.

For many clients with large personal models: the devices then hold S rows, not N. The
results are those of state on the devices. A round's rows travel both ways, and an
evaluation sends everybody's, S at a time.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from fedjax_pfl import architectures
from fedjax_pfl.engine import validate
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.placement import AXIS, Placement, slices
from fedjax_pfl.engine.program import Program, Round, parts, program as whole_program
from fedjax_pfl.engine.xla import compiler_options, init_options
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Algorithm, Array, Federation, PyTree, State, Task


def program(
    factory: Callable[..., Algorithm] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    **options: Any,
) -> Program:
    """As `engine.program.program`, with State.clients as NumPy arrays by client id,
    which rounds overwrite in place.

    Its functions are jitted where they can be, and cannot be traced themselves.

    Raises:
      InputError: everybody takes part in a round, so that no row could stay on the
        host; or several processes.
    """
    factory, task = validate.method(factory), validate.task(task)
    _check_some_stay(task)
    n = task.num_clients
    on_device = whole_program(factory, task, hparams, **options)
    on = parts(
        factory,
        task,
        hparams,
        **{name: x for name, x in options.items() if name != "checked"},
    )
    everywhere, apart = (
        on.mesh and NamedSharding(on.mesh, spec) for spec in (P(), P(AXIS))
    )
    draw, jit = (
        jax.jit(on.draw),
        functools.partial(jax.jit, compiler_options=compiler_options()),
    )
    draw_all = jax.jit(on.init, compiler_options=init_options())
    train, score = jit(on.train, donate_argnums=3), jit(on.score, static_argnums=6)
    like = jax.eval_shape(on.init, jax.random.key(0), on.traced)
    places, slot = slices(on.lengths), architectures.slots(task)

    def here(state: State, ids: np.ndarray, lengths: tuple[int, ...]) -> State:
        known = np.minimum(ids, n - 1)
        inside = lambda g, x: x[np.minimum(slot[known[slices(lengths)[g]]], len(x) - 1)]
        rows = architectures.per_group(lambda x: x[known], inside, state.clients)
        return State(state.server, jax.device_put(rows, apart))

    def place(state: State) -> State:
        return State(
            jax.device_put(state.server, everywhere),
            jax.tree.map(np.array, state.clients),
        )

    def init(key: Array, traced: Traced, where: Placement | None = None) -> State:
        return place(jax.device_get(draw_all(*_on_cpu((key, traced)))))

    def round(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        evaluated: Array,
    ) -> tuple[State, Round]:
        validate.state(state, like)
        _check_writable(state.clients)
        ids, active = jax.device_get(draw(on.placement, key, t))
        new, known = train(
            key,
            traced,
            federation,
            here(state, ids, on.lengths),
            ids,
            active,
            t,
            evaluated,
        )

        def put(
            old: np.ndarray, rows: Array, at: np.ndarray, on: np.ndarray
        ) -> np.ndarray:
            old[at[on]] = np.asarray(rows)[on]
            return old

        def inside(g: int, old: np.ndarray, rows: Array) -> np.ndarray:
            return put(
                old, rows, slot[np.minimum(ids[places[g]], n - 1)], active[places[g]]
            )

        architectures.per_group(
            lambda old, rows: put(old, rows, ids, active),
            inside,
            state.clients,
            new.clients,
        )
        return State(new.server, state.clients), known

    def blocks() -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """All clients, as many at once as a round has places for."""
        for g, length in enumerate(on.lengths):
            members = architectures.members(task, g)
            members = np.append(members, n + np.arange(-len(members) % length)).astype(
                np.int32
            )
            only = tuple(length if h == g else 0 for h in range(len(on.lengths)))
            yield from ((ids, only) for ids in members.reshape(-1, length))

    def scores(
        key: Array, traced: Traced, federation: Federation, state: State, t: Array
    ) -> dict[str, Any]:
        validate.state(state, like)
        found: dict[str, np.ndarray] = {}
        for ids, lengths in blocks():
            block = jax.device_get(
                score(
                    key, traced, federation, here(state, ids, lengths), ids, t, lengths
                )
            )
            for name, values in block.items():
                found.setdefault(name, np.full(n, np.nan, values.dtype))[
                    ids[ids < n]
                ] = values[ids < n]
        return found

    def predict(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: State,
        t: Array,
        id: int,
        x: Array,
    ) -> PyTree:
        return on_device.predict(
            key, traced, federation, on_device.place(state), t, id, x
        )

    functions = (init, round, scores, predict, place, lambda state: state)
    return Program(on.traced, *functions, on.placement, on.mesh, True, on_device.task)


def _check_some_stay(task: Task) -> None:
    n, most = task.num_clients, max(task.cohort_sizes)
    if jax.process_count() > 1:
        raise InputError("client_memory=host is for a single process: leave it out.")
    if most == n:
        raise InputError(
            "client_memory=host keeps the clients that are not in the round on the "
            "host, but with participation=1 "
            f"all {n} are: leave it out."
        )


def _check_writable(clients: PyTree) -> None:
    if not all(
        isinstance(x, np.ndarray) and x.flags.writeable
        for x in jax.tree.leaves(clients)
    ):
        raise InputError(
            "Clients' rows must be NumPy arrays, which rounds overwrite: `place` the "
            "state first."
        )


def _on_cpu(tree: PyTree) -> PyTree:
    """Moved to where the N rows begin: beside an accelerator on the CPU, if JAX may use
    it.

    Arguments that lie on a mesh would be computed with on all of it, whatever the
    default device."""
    try:
        return jax.device_put(tree, jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return tree
