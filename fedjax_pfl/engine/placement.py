"""Assignment of clients to devices and of client state to rows.

The rows of State.clients, and the clients of a round, are segments of one architecture
each; every device has equally many rows of a segment.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from fedjax_pfl import architectures, local_training, trees
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import Array, PyTree, RunState, Task

AXIS = "clients"  # of the mesh
BASE = "base"  # its other axis: devices that share one copy of the frozen variables


class Placement(NamedTuple):
    """Maps clients to rows of State.clients, which are ordered by architecture and
    distributed over the devices; R rows in all, empty ones included."""

    client: Array  # [R] int32, the client of each row; N or more: an empty row
    row: Array  # [N] int32, the row of each client
    work: Array  # [N], estimated cost of a client's round in any unit


def take(devices: int) -> list[jax.Device]:
    """Returns the first `devices` devices, equally many of each process.

    Raises:
      InputError: there are not that many, or the processes cannot share them.
    """
    found, processes = jax.devices(), jax.process_count()
    why = "set jax_num_cpu_devices before JAX starts"
    check("devices", devices, 1, len(found), whole=True, why=why)
    if devices % processes:
        raise InputError(
            f"`devices` must be a multiple of the {processes} processes, got {devices}."
        )
    each = devices // processes
    return [
        device
        for i in range(processes)
        for device in [x for x in found if x.process_index == i][:each]
    ]


def make_mesh(groups: int, base: int = 1) -> Mesh | None:
    """Returns a mesh of several devices, [groups] or [groups, base]; a single one needs
    none (each of several processes then computes everything)."""
    if groups * base == 1:
        return None
    sizes = {AXIS: groups} if base == 1 else {AXIS: groups, BASE: base}
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=take(groups * base),
    )


def assign(work: Array, devices: int, load: Array | None = None) -> Array:
    """Assigns clients to devices, equally many to each and with balanced load: the
    longest first, each to the least loaded device that is not full.

    Args:
      work: [S], in any unit.
      load: [D], the work that the devices already have; None: none.

    Returns:
      [D ceil(S / D)] int32, the positions of the first device's clients, then the
      second's, ...; S or more is padding. No value occurs twice.
    """
    count = work.shape[0]
    capacity = -(-count // devices)
    order = jnp.argsort(-work).astype(jnp.int32)

    def give(
        carry: tuple[Array, Array], position: Array
    ) -> tuple[tuple[Array, Array], Array]:
        load, held = carry
        device = jnp.argmin(jnp.where(held < capacity, load, jnp.inf))
        slot = device * capacity + held[device]
        return (load.at[device].add(work[position]), held.at[device].add(1)), slot

    start = (
        jnp.zeros(devices) if load is None else load,
        jnp.zeros(devices, jnp.int32),
    )
    _, slots = jax.lax.scan(give, start, order)
    assigned = jnp.full(devices * capacity, count, jnp.int32).at[slots].set(order)
    empty = assigned == count
    return jnp.where(empty, count - 1 + jnp.cumsum(empty), assigned)


def loaded(load: Array, work: Array, slots: Array) -> Array:
    """Returns the work [D] of each device after clients with `work` [S] were assigned
    to `slots` (see `assign`)."""
    real = slots < len(work)
    here: Array = jnp.where(real, work[jnp.minimum(slots, len(work) - 1)], 0)
    return load + jnp.sum(here.reshape(len(load), -1), axis=1)


def segments(task: Task, count: int, devices: int) -> tuple[int, ...]:
    """Returns the largest number of clients per architecture [G] among `count` drawn
    ones, rounded up to the devices."""
    sizes = (
        min(count, len(architectures.members(task, group)))
        for group in range(len(task.models))
    )
    return tuple(-(-size // devices) * devices for size in sizes)


def slices(lengths: tuple[int, ...]) -> list[slice]:
    """Returns the slice of each segment, [G]."""
    ends = [0, *np.cumsum(lengths).tolist()]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def placement(task: Task, devices: int) -> Placement | None:
    """Assigns the rows of all clients to the devices by their work; NumPy arrays.

    The work is the number of steps: each architecture is a segment, of which all
    devices have equally many rows. None on a single device with one architecture: row
    i is client i's.
    """
    if devices == 1 and len(task.models) == 1:
        return None
    n = task.num_clients
    work = local_training.planned(task, task.sizes)[0].astype(np.float32)
    parts: list[np.ndarray] = []
    load = jnp.zeros(devices)
    for group in range(len(task.models)):
        ids = architectures.members(task, group)
        at = np.arange(len(ids))
        if devices > 1:
            slots = jax.jit(assign, static_argnums=1)(work[ids], devices, load)
            load, at = loaded(load, jnp.asarray(work[ids]), slots), np.asarray(slots)
        # distinct over all segments
        empty = n + sum(map(len, parts)) + np.arange(len(at))
        parts.append(np.where(at < len(ids), ids[np.minimum(at, len(ids) - 1)], empty))
    client = np.concatenate(parts).astype(np.int32)
    row = np.zeros(n, np.int32)
    row[client[client < n]] = np.flatnonzero(client < n)
    return Placement(client, row, work)  # type: ignore[arg-type]  # on the host


def arrange(
    task: Task, where: Placement | None, ids: Array, active: Array, devices: int
) -> tuple[Array, Array]:
    """Orders a round's sample, ids and active [S], by architecture and balanced over
    the devices.

    If everybody is sampled, the order is that of the rows. Padding has distinct ids
    from N on.
    """
    if where is None:
        return ids, active
    n, count = task.num_clients, len(ids)
    if count == n:
        client = jnp.asarray(where.client)
        return client, active[jnp.minimum(client, n - 1)] & (client < n)
    parts: list[tuple[Array, Array]] = []
    nobody, load = n, jnp.zeros(devices)
    for group in range(len(task.models)):
        mine, on, here = _of_group(task, group, ids, active)
        if devices > 1:
            work = jnp.where(on, jnp.asarray(where.work)[mine], 0)
            slots = assign(work, devices, load)
            load = loaded(load, work, slots)
            at, real = jnp.minimum(slots, len(mine) - 1), slots < len(mine)
            mine, on, here = mine[at], on[at] & real, here[at] & real
        parts.append(
            (jnp.where(here, mine, nobody + jnp.arange(len(mine), dtype=jnp.int32)), on)
        )
        nobody += len(mine)
    joined, on = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return joined, on


def _of_group(
    task: Task, group: int, ids: Array, active: Array
) -> tuple[Array, Array, Array]:
    """Returns the ids of one architecture's clients in a sample, which of them are
    active, and which are no padding."""
    if len(task.models) == 1:
        return ids, active, jnp.ones(len(ids), bool)
    own = jnp.asarray(task.architecture == group)[ids]
    first = jnp.argsort(~own, stable=True)[
        : min(len(ids), len(architectures.members(task, group)))
    ]
    return ids[first], active[first] & own[first], own[first]


class Layout(NamedTuple):
    """The clients of a round on devices."""

    lengths: tuple[int, ...]  # per architecture, padding included, as Task.models
    width: int = 1  # clients per vmapped batch on each device
    devices: int = 1  # each with its clients; groups of devices with a shared base
    mesh: Mesh | None = None  # of several devices
    placement: Placement | None = None


def lay_out(task: Task, width: int = 1, devices: int = 1, base: int = 1) -> Layout:
    """Returns the layout of a task's rounds; `base` devices share the frozen variables
    and their clients."""
    groups = devices // base
    lengths = segments(task, max(task.cohort_sizes), groups)
    mesh = make_mesh(groups, base)
    return Layout(lengths, width, groups, mesh, placement(task, groups))


class StateRows:
    """Reads and writes the rows of State.clients.

    Args:
      where: the placement, or None.
    """

    def __init__(self, task: Task, where: Placement | None, devices: int):
        self._task, self.where = task, where
        self._parts = slices(segments(task, task.num_clients, devices))

    def of(self, ids: Array) -> Array:
        """Returns the rows of the clients `ids` [S]; any row for padding."""
        return ids if self.where is None else jnp.asarray(self.where.row)[ids]

    def gather(self, clients: PyTree, at: Array, lengths: tuple[int, ...]) -> PyTree:
        """Reads rows `at` [S] of a round with segments of these lengths."""
        inside = lambda g, x: x[jnp.clip(self._part(at, g, lengths), 0, len(x) - 1)]
        return architectures.per_group(lambda x: x[at], inside, clients)

    def scatter(
        self,
        clients: PyTree,
        at: Array,
        new: PyTree,
        active: Array,
        lengths: tuple[int, ...],
    ) -> PyTree:
        """Replaces the rows of the active clients of a round."""

        def inside(g: int, old: Array, rows: Array) -> PyTree:
            return trees.scatter(
                old, self._part(at, g, lengths), rows, active[slices(lengths)[g]]
            )

        return architectures.per_group(
            lambda old, rows: trees.scatter(old, at, rows, active), inside, clients, new
        )

    def keep(self, new: PyTree, old: PyTree, active: Array) -> PyTree:
        """Returns the new rows of active clients and the old ones of others, where
        everybody is in the round."""
        inside = lambda g, a, b: trees.where(active[self._parts[g]], a, b)
        return architectures.per_group(
            lambda a, b: trees.where(active, a, b), inside, new, old
        )

    def _part(self, at: Array, group: int, lengths: tuple[int, ...]) -> Array:
        return at[slices(lengths)[group]] - self._parts[group].start

    def place(self, state: RunState) -> RunState:
        """Orders rows by client id (Grouped ones by rank within the architecture) by
        the placement."""
        if self.where is None:
            return state
        client = jnp.minimum(jnp.asarray(self.where.client), self._task.num_clients - 1)
        slot = jnp.asarray(architectures.slots(self._task))[client]
        inside = lambda g, x: x[jnp.minimum(slot[self._parts[g]], len(x) - 1)]
        return state.with_rows(
            architectures.per_group(lambda x: x[client], inside, state.rows)
        )

    def unplace(self, state: RunState) -> RunState:
        """Inverts `place`."""
        if self.where is None:
            return state
        row = self.where.row[: self._task.num_clients]
        inside = lambda g, x: x[
            row[architectures.members(self._task, g)] - self._parts[g].start
        ]
        return state.with_rows(
            architectures.per_group(lambda x: x[row], inside, state.rows)
        )


def sharded(tree: PyTree, mesh: Mesh | None, spec: P) -> PyTree:
    """Constrains the sharding of a tree's leaves, if there is a mesh."""
    if mesh is None:
        return tree
    return without_mesh(
        jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)),
            tree,
        )
    )


_unmark = Primitive("unmark")  # the identity
_unmark.def_impl(lambda x: x)
_unmark.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_unmark, lambda ctx, x: [x])
batching.defvectorized(_unmark)
ad.deflinear2(_unmark, lambda ct, _: [ct])


def without_mesh(tree: PyTree) -> PyTree:
    """Returns the same arrays without the mesh in their type.

    Arrays over which `client` closes enter the shard_map unchanged. Some functions of
    JAX (indexing and broadcasting in 0.10) refuse operands there whose type has an
    automatic mesh.
    """
    return jax.tree.map(_unmark.bind, tree)


def free(mesh: Mesh | None, *arguments: PyTree) -> tuple[PyTree, ...]:
    """Returns the arguments without the mesh in the arrays' types."""
    return arguments if mesh is None else without_mesh(arguments)
