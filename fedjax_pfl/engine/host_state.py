"""Client state in host memory: only the rows of a round's clients are on the devices.

For many clients with large personal models. The results are the same as with state on
the devices. A round's rows are copied both ways, and an evaluation copies everybody's,
S at a time.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from fedjax_pfl import architectures
from fedjax_pfl.engine import memory, validate
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.placement import AXIS, Placement, slices
from fedjax_pfl.engine.program import (
    Program,
    Round,
    parts,
    program as whole_program,
    set_up,
)
from fedjax_pfl.engine.xla import compiler_options, init_options
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import (
    Algorithm,
    Array,
    Federation,
    Method,
    PyTree,
    RunState,
    Task,
)

BLOCK = 2**28  # bytes of the first state that are drawn at once


def program(
    factory: Callable[..., Algorithm | Method] | str,
    task: Task,
    hparams: dict[str, Any] | None = None,
    *,
    width: int = 1,
    devices: int = 1,
    checked: bool = True,
    **options: Any,
) -> Program:
    """Makes a Program like `engine.program.program` with the rows of the state as NumPy
    arrays by client id, which rounds overwrite in place.

    Its functions are jitted where possible, and cannot be traced themselves.

    Raises:
      InputError: everybody takes part in a round, or there are several processes.
    """
    setting = set_up(factory, task, hparams, **options)
    task = setting.task
    n = task.num_clients
    if max(task.cohort_sizes) == n or jax.process_count() > 1:
        raise InputError(
            "client_memory=host needs participation below 1 and a single process."
        )
    layout: dict[str, Any] = {"width": width, "devices": devices}
    on_device = whole_program(
        factory, task, hparams, checked=checked, **layout, **options
    )
    on = parts(setting, **layout)
    everywhere, by_row = (
        on.mesh and NamedSharding(on.mesh, spec) for spec in (P(), P(AXIS))
    )
    jit = functools.partial(jax.jit, compiler_options=compiler_options())
    draw = jax.jit(on.draw)
    train, score = jit(on.train, donate_argnums=3), jit(on.score, static_argnums=6)
    like = jax.eval_shape(on.init, jax.random.key(0), on.traced)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))
    advice = "use a smaller --model or fewer --clients"
    memory.check(memory.Memory(kept, memory.host_total()), advice)
    draw_server, draw_rows = (
        jax.jit(f, static_argnums=3, compiler_options=init_options())
        for f in (_server_of(on.init), _rows_of(on.init))
    )
    segments, slot = slices(on.lengths), architectures.slots(task)

    def here(state: RunState, ids: np.ndarray, lengths: tuple[int, ...]) -> RunState:
        """Copies the rows of `ids` to the devices."""
        known = np.minimum(ids, n - 1)
        inside = lambda g, x: x[np.minimum(slot[known[slices(lengths)[g]]], len(x) - 1)]
        rows = architectures.per_group(lambda x: x[known], inside, state.rows)
        return state.with_rows(jax.device_put(rows, by_row))

    def place(state: RunState) -> RunState:
        rows = jax.tree.map(np.array, state.rows)
        server = state.with_rows(((), ()))
        return jax.device_put(server, everywhere).with_rows(rows)

    def init(key: Array, traced: Traced, where: Placement | None = None) -> RunState:
        given = _on_cpu((key, traced))
        server = jax.device_get(draw_server(*given, 0, 0))
        rows = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like.rows)
        # drawn at once, all rows would be in memory twice
        count = min(n, max(1, BLOCK * n // max(1, kept)))
        for first in range(0, n, count):
            block = draw_rows(*given, first, count)
            jax.tree.map(functools.partial(_fill, first), rows, block)
        return jax.device_put(server, everywhere).with_rows(rows)

    def round(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: RunState,
        t: Array,
        evaluated: Array,
    ) -> tuple[RunState, Round]:
        validate.state(state, like)
        ids, active = jax.device_get(draw(on.placement, key, t, record=state.record))
        rows = here(state, ids, on.lengths)
        new, known = train(key, traced, federation, rows, ids, active, t, evaluated)

        def put(old: np.ndarray, rows: Array, at: np.ndarray, on: np.ndarray) -> None:
            old[at[on]] = np.asarray(rows)[on]

        def inside(g: int, old: np.ndarray, rows: Array) -> None:
            at = slot[np.minimum(ids[segments[g]], n - 1)]
            put(old, rows, at, active[segments[g]])

        architectures.per_group(
            lambda old, rows: put(old, rows, ids, active),
            inside,
            state.rows,
            new.rows,
        )
        return new.with_rows(state.rows), known

    def blocks() -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
        """Yields the ids of all clients, as many at a time as a round has."""
        for g, length in enumerate(on.lengths):
            members = architectures.members(task, g)
            padding = n + np.arange(-len(members) % length)
            only = tuple(length if h == g else 0 for h in range(len(on.lengths)))
            padded = np.append(members, padding).astype(np.int32)
            yield from ((ids, only) for ids in padded.reshape(-1, length))

    def evaluate(
        key: Array, traced: Traced, federation: Federation, state: RunState, t: Array
    ) -> dict[str, Any]:
        validate.state(state, like)
        found: dict[str, np.ndarray] = {}
        for ids, lengths in blocks():
            rows = here(state, ids, lengths)
            scores = score(key, traced, federation, rows, ids, t, lengths)
            for name, values in jax.device_get(scores).items():
                whole = found.setdefault(name, np.full(n, np.nan, values.dtype))
                whole[ids[ids < n]] = values[ids < n]
        return found

    def predict(
        key: Array,
        traced: Traced,
        federation: Federation,
        state: RunState,
        t: Array,
        id: int,
        x: Array,
    ) -> PyTree:
        placed = on_device.place(state)
        return on_device.predict(key, traced, federation, placed, t, id, x)

    return Program(
        on.traced,
        init,
        round,
        evaluate,
        predict,
        place,
        lambda state: state,
        on.placement,
        on.mesh,
        on_host=True,
        setting=setting,
    )


def _server_of(init: Callable[..., RunState]) -> Callable[..., RunState]:
    """Returns (key, traced, first, count) -> the state without its rows."""
    return lambda key, traced, first, count: init(key, traced).with_rows(((), ()))


def _rows_of(init: Callable[..., RunState]) -> Callable[..., PyTree]:
    """Returns (key, traced, first, count) -> `count` rows of the state from `first` on,
    the last ones where there are fewer."""

    def rows(key: Array, traced: Traced, first: Array, count: int) -> PyTree:
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, min(count, len(x)))
        return jax.tree.map(cut, init(key, traced).rows)

    return rows


def _fill(first: int, rows: np.ndarray, block: Array) -> None:
    """Writes a block of `_rows_of` into its rows."""
    start = min(first, len(rows) - len(block))
    rows[start : start + len(block)] = block


def _on_cpu(tree: PyTree) -> PyTree:
    """Copies a tree to the CPU, if JAX may use it: arguments on a mesh would be
    computed with on all of its devices."""
    try:
        return jax.device_put(tree, jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return tree
