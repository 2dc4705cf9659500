"""Storage of the rows of a run's state, on the devices or in host memory.

In host memory, for many clients with large personal models, only the rows of a round's
clients are on the devices. The results are the same. A round's rows are copied both
ways, and an evaluation copies everybody's, S at a time.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from fedjax_pfl import architectures, trees
from fedjax_pfl.engine import memory, validate
from fedjax_pfl.engine.method import Traced
from fedjax_pfl.engine.parts import Parts
from fedjax_pfl.engine.placement import (
    AXIS,
    Layout,
    Placement,
    StateRows,
    segments,
    sharded,
    slices,
)
from fedjax_pfl.engine.xla import compiler_options, init_options
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, PyTree, RunState, Task

BLOCK = 2**28  # bytes of the first state that are drawn at once
# the state with the rows of some clients, their ids, and how many per architecture
Cut = tuple[RunState, Any, tuple[int, ...]]


class OnDevices:
    """Rows on the devices, in the order of a placement.

    Attributes:
      where: the placement, None: row i is client i's.
    """

    def __init__(self, task: Task, layout: Layout, where: Placement | None = None):
        """Sets the attributes; `where` None is the layout's."""
        self.where = layout.placement if where is None else where
        self._task, self._layout = task, layout
        self._rows = StateRows(task, self.where, layout.devices)
        self._all = max(task.cohort_sizes) == task.num_clients

    def init(
        self, init: Callable[..., RunState], key: Array, traced: Traced
    ) -> RunState:
        """Returns the first state, of `Parts.init`."""
        return self.place(init(key, traced))

    def place(self, state: RunState) -> RunState:
        """Puts rows by client id in the order of the placement, over the devices."""
        return _spread(self._rows.place(state), self._layout.mesh)

    def unplace(self, state: RunState) -> RunState:
        """Inverts `place`."""
        return self._rows.unplace(state)

    def read(self, state: RunState, ids: Array, lengths: tuple[int, ...]) -> RunState:
        """Returns the state with the rows of these clients."""
        # on every device, as the sum over them is anyway: else the indices would
        # travel, leaf by leaf
        rows = self._rows.gather(state.rows, self._at(ids), lengths)
        return state.with_rows(sharded(rows, self._layout.mesh, P()))

    def of_round(self, state: RunState, ids: Array) -> RunState:
        """Returns the state with the rows of a round's clients."""
        # with everybody in their order rows need no gather
        return state if self._all else self.read(state, ids, self._layout.lengths)

    def write(
        self, state: RunState, new: RunState, ids: Array, active: Array
    ) -> RunState:
        """Returns the state after a round with the rows of all clients."""
        mesh, lengths = self._layout.mesh, self._layout.lengths
        if self._all:
            kept = self._rows.keep(new.rows, state.rows, active)
        else:  # on all devices at once: the indices then need not travel
            moved, on_all = sharded((new.rows, active), mesh, P())
            at = self._at(ids)
            kept = self._rows.scatter(state.rows, at, moved, on_all, lengths)
        return _spread(new.with_rows(kept), mesh)

    def everybody(self, state: RunState) -> Iterator[Cut]:
        """Yields all clients, in the order of their rows."""
        n, devices = self._task.num_clients, self._layout.devices
        ids = jnp.arange(n, dtype=jnp.int32)
        ids = ids if self.where is None else jnp.asarray(self.where.client)
        yield state, ids, segments(self._task, n, devices)

    def joined(self, found: Iterable[tuple[Array, PyTree]]) -> PyTree:
        """Returns by client id what was found of `everybody`."""
        ((_, only),) = found
        if self.where is None:
            return only
        rows = jnp.asarray(self.where.row)[: self._task.num_clients]
        return trees.gather(only, rows)

    def _at(self, ids: Array) -> Array:
        return sharded(self._rows.of(ids), self._layout.mesh, P())


class OnHost:
    """Rows as NumPy arrays by client id, which rounds overwrite in place.

    Raises:
      InputError: everybody takes part in a round, there are several processes, or the
        host's memory is too small.
    """

    def __init__(self, task: Task, on: Parts):
        n, layout = task.num_clients, on.layout
        if max(task.cohort_sizes) == n or jax.process_count() > 1:
            raise InputError(
                "client_memory=host needs participation below 1 and a single process."
            )
        self.where, self._lengths = layout.placement, layout.lengths
        self._task, self._slot = task, architectures.slots(task)
        self._everywhere, self._by_row = (
            layout.mesh and NamedSharding(layout.mesh, spec) for spec in (P(), P(AXIS))
        )
        self._like = jax.eval_shape(on.init, jax.random.key(0), on.traced)
        leaves = jax.tree.leaves(self._like)
        self._bytes = sum(x.size * x.dtype.itemsize for x in leaves)
        advice = "use a smaller --model or fewer --clients"
        memory.check(memory.Memory(self._bytes, memory.host_total()), advice)

    def init(
        self, init: Callable[..., RunState], key: Array, traced: Traced
    ) -> RunState:
        """Returns the first state, of `Parts.init`; drawn at once, all rows would be in
        memory twice."""
        given, n = _on_cpu((key, traced)), self._task.num_clients
        draw_server, draw_rows = (
            jax.jit(f, static_argnums=3, compiler_options=init_options())
            for f in (_server_of(init), _rows_of(init))
        )
        server = jax.device_get(draw_server(*given, 0, 0))
        rows = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), self._like.rows)
        count = min(n, max(1, BLOCK * n // max(1, self._bytes)))
        for first in range(0, n, count):
            block = draw_rows(*given, first, count)
            jax.tree.map(functools.partial(_fill, first), rows, block)
        return jax.device_put(server, self._everywhere).with_rows(rows)

    def check(self, state: RunState) -> None:
        """Raises InputError unless a state is like the first one."""
        validate.state(state, self._like)

    def place(self, state: RunState) -> RunState:
        """Copies the rows to host memory, and the rest to the devices."""
        rows = jax.tree.map(np.array, state.rows)
        server = state.with_rows(((), ()))
        return jax.device_put(server, self._everywhere).with_rows(rows)

    def unplace(self, state: RunState) -> RunState:
        """Returns the state."""
        return state

    def read(self, state: RunState, ids: Any, lengths: tuple[int, ...]) -> RunState:
        """Copies the rows of these clients to the devices."""
        known = np.minimum(ids, self._task.num_clients - 1)

        def inside(g: int, x: np.ndarray) -> np.ndarray:
            at: np.ndarray = self._slot[known[slices(lengths)[g]]]
            return x[np.minimum(at, len(x) - 1)]

        rows = architectures.per_group(lambda x: x[known], inside, state.rows)
        return state.with_rows(jax.device_put(rows, self._by_row))

    def of_round(self, state: RunState, ids: Array) -> RunState:
        """Copies the rows of a round's clients to the devices."""
        return self.read(state, ids, self._lengths)

    def write(
        self, state: RunState, new: RunState, ids: Array, active: Array
    ) -> RunState:
        """Overwrites the rows of active clients."""
        last = self._task.num_clients - 1

        def put(old: np.ndarray, rows: Array, at: Any, on: Any) -> None:
            old[at[on]] = np.asarray(rows)[on]

        def inside(g: int, old: np.ndarray, rows: Array) -> None:
            here = slices(self._lengths)[g]
            put(old, rows, self._slot[np.minimum(ids[here], last)], active[here])

        whole = lambda old, rows: put(old, rows, ids, active)
        architectures.per_group(whole, inside, state.rows, new.rows)
        return new.with_rows(state.rows)

    def everybody(self, state: RunState) -> Iterator[Cut]:
        """Yields all clients, as many at a time as a round has."""
        n = self._task.num_clients
        for g, length in enumerate(self._lengths):
            members = architectures.members(self._task, g)
            padding = n + np.arange(-len(members) % length)
            only = tuple(length if h == g else 0 for h in range(len(self._lengths)))
            padded = np.append(members, padding).astype(np.int32)
            for ids in padded.reshape(-1, length):
                yield self.read(state, ids, only), ids, only

    def joined(self, found: Iterable[tuple[Array, PyTree]]) -> PyTree:
        """Returns by client id what was found of `everybody`."""
        n = self._task.num_clients
        whole: dict[str, np.ndarray] = {}
        for ids, scores in found:
            for name, values in jax.device_get(scores).items():
                every = whole.setdefault(name, np.full(n, np.nan, values.dtype))
                every[ids[ids < n]] = values[ids < n]
        return whole


def jitted(on: Parts) -> Parts:
    """Returns the functions compiled one by one, with the drawn clients on the host."""
    jit = functools.partial(jax.jit, compiler_options=compiler_options())
    draw = jax.jit(on.draw)
    return on._replace(
        draw=lambda *args, **past: jax.device_get(draw(*args, **past)),
        train=jit(on.train, donate_argnums=1),
        score=jit(on.score, static_argnums=3),
    )


def _spread(state: RunState, mesh: Mesh | None) -> RunState:
    """Replicates the server's state and shards the clients' rows over the devices."""
    shared = sharded(state.with_rows(((), ())), mesh, P())
    return shared.with_rows(sharded(state.rows, mesh, P(AXIS)))


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
