"""Where clients lie: their rows at rest and their places in a round, by architecture
and over the devices.

The rows of State.clients, and the places of a round, are segments of one architecture
each, one after another; every segment is as long for each device as for the others.
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
from fedjax_pfl.models.nnx_model import step_flops
from fedjax_pfl.types import Array, PyTree, State, Task

AXIS = "clients"  # of the mesh


class Placement(NamedTuple):
    """Maps clients to rows of State.clients, which are ordered by architecture and
    distributed over the devices; R rows in all, empty ones included."""

    client: Array  # [R] int32, whose row it is; N or more: an empty row
    row: Array  # [N] int32, the row of each client
    # [N], estimated cost of a client's round in any unit, to balance the load of the
    # devices
    work: Array


def take(devices: int, local: bool = False) -> list[jax.Device]:
    """The first `devices` devices, of each process equally many; `local`: of this
    process alone.

    Raises:
      InputError: there are not that many, or the processes cannot share them.
    """
    found, processes = (
        (jax.local_devices(), 1) if local else (jax.devices(), jax.process_count())
    )
    kind = found[0].platform
    more = (
        '; jax.config.update("jax_num_cpu_devices", n) at the start makes more'
        if kind == "cpu"
        else ""
    )
    check(
        "devices",
        devices,
        1,
        len(found),
        whole=True,
        why=f"JAX has so many devices of kind {kind}{more}",
    )
    if devices % processes:
        raise InputError(
            f"devices={devices} cannot be shared by {processes} processes: take a "
            f"multiple of {processes}."
        )
    if processes == 1:
        return found[:devices]
    own = [
        [device for device in found if device.process_index == i]
        for i in range(processes)
    ]
    return [device for part in own for device in part[: devices // processes]]


def make_mesh(devices: int, local: bool = False) -> Mesh | None:
    """A mesh of the devices that `take` gives; None for a single one, which needs no
    mesh (of several processes each then computes everything)."""
    if devices == 1:
        return None
    return jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=take(devices, local)
    )


def assign(work: Array, devices: int, load: Array | None = None) -> Array:
    """Assigns clients to devices, equally many to each and with balanced load: the
    longest first, each to the least loaded device that has a place left.

    Args:
      work: [S], of any unit.
      load: [D], the work that the devices have already; None: none.

    Returns:
      [D ceil(S / D)] int32, the positions of the first device's clients, then the
      second's, ...; what is S or more stands for an empty place. No value occurs twice.
    """
    count = work.shape[0]
    capacity = -(-count // devices)
    order = jnp.argsort(-work).astype(jnp.int32)

    def give(
        carry: tuple[Array, Array], position: Array
    ) -> tuple[tuple[Array, Array], Array]:
        load, held = carry
        device = jnp.argmin(jnp.where(held < capacity, load, jnp.inf))
        place = device * capacity + held[device]
        return (load.at[device].add(work[position]), held.at[device].add(1)), place

    start = (
        jnp.zeros(devices) if load is None else load,
        jnp.zeros(devices, jnp.int32),
    )
    _, places = jax.lax.scan(give, start, order)
    assigned = jnp.full(devices * capacity, count, jnp.int32).at[places].set(order)
    empty = assigned == count
    return jnp.where(empty, count - 1 + jnp.cumsum(empty), assigned)


def loaded(load: Array, work: Array, places: Array) -> Array:
    """The work [D] of each device after those clients, `work` [S], that `assign` gave
    `places`."""
    real = places < len(work)
    here: Array = jnp.where(real, work[jnp.minimum(places, len(work) - 1)], 0)
    return load + jnp.sum(here.reshape(len(load), -1), axis=1)


def padding_overhead(work: np.ndarray, width: int, devices: int = 1) -> float:
    """How many steps are computed for each that is wanted, where clients are laid out
    as a Cohort does it: in a chunk all go on until the longest client has ended, and a
    last chunk has empty places.

    Args:
      work: [S] steps of each client.
      width: clients at once on each device.

    Returns:
      1 or more; over several devices as many as if all had as many as the slowest.
    """
    places = (
        np.asarray(jax.jit(assign, static_argnums=1)(work, devices))
        if devices > 1
        else np.arange(len(work))
    )
    blocks = np.append(work, np.zeros(len(places) - len(work)))[places].reshape(
        devices, -1
    )
    width = min(width, blocks.shape[1])
    longest = -np.sort(-blocks)[:, ::width]  # of each chunk
    return (
        float(devices * width * longest.sum(axis=1).max() / work.sum())
        if work.any()
        else 1.0
    )


def segments(task: Task, count: int, devices: int) -> tuple[int, ...]:
    """The places [G] per architecture of `count` clients of which any may be drawn,
    rounded up to the devices."""
    sizes = (
        min(count, len(architectures.members(task, group)))
        for group in range(len(task.models))
    )
    return tuple(-(-size // devices) * devices for size in sizes)


def slices(lengths: tuple[int, ...]) -> list[slice]:
    """Where each of the segments lies, [G]."""
    return [
        slice(*ends) for ends in itertools.pairwise([0, *np.cumsum(lengths).tolist()])
    ]


def relative_operations(task: Task) -> np.ndarray:
    """What a training step of each architecture costs by the cheapest's, [G] float32; 1
    where it cannot be counted, since only the balance depends on it."""
    try:
        x = jax.eval_shape(
            lambda x: task.prepare(jnp.repeat(x[None], task.batch_size, axis=0)),
            task.input,
        )
        count = np.array([step_flops(model, x) for model in task.models], np.float32)
    except Exception:
        # of a network that is somebody's own: the round will say what is wrong with it
        count = np.zeros(len(task.models), np.float32)
    return count / count.min() if count.all() else np.ones_like(count)


def placement(task: Task, devices: int) -> Placement | None:
    """The rows of all clients, assigned to the devices by their work: their steps,
    times the operations of one where there are several architectures; NumPy arrays.

    None on a single device with one architecture, where row i is client i's.
    """
    if devices == 1 and len(task.models) == 1:
        return None
    n, work = (
        task.num_clients,
        local_training.planned(task, task.sizes)[0].astype(np.float32),
    )
    if devices > 1 and len(task.models) > 1:
        work *= relative_operations(task)[task.architecture]
    parts: list[np.ndarray] = []
    load = jnp.zeros(devices)
    for group in range(len(task.models)):
        ids = architectures.members(task, group)
        at = np.arange(len(ids))
        if devices > 1:
            places = jax.jit(assign, static_argnums=1)(work[ids], devices, load)
            load, at = loaded(load, jnp.asarray(work[ids]), places), np.asarray(places)
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
    """The places of a round's sample: ids and active [S] of `sample`, by architecture
    and balanced over the devices.

    If the sample is everybody, each client stays where its row lies. Padding has
    distinct ids from N on.
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
            places = assign(work, devices, load)
            load = loaded(load, work, places)
            at, real = jnp.minimum(places, len(mine) - 1), places < len(mine)
            mine, on, here = mine[at], on[at] & real, here[at] & real
        parts.append(
            (jnp.where(here, mine, nobody + jnp.arange(len(mine), dtype=jnp.int32)), on)
        )
        nobody += len(mine)
    joined = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return next(joined), next(joined)


def _of_group(
    task: Task, group: int, ids: Array, active: Array
) -> tuple[Array, Array, Array]:
    """Of a sample those of one architecture, padded to the most that can be drawn: ids,
    active, and whether it is one of them."""
    if len(task.models) == 1:
        return ids, active, jnp.ones(len(ids), bool)
    own = jnp.asarray(task.architecture == group)[ids]
    first = jnp.argsort(~own, stable=True)[
        : min(len(ids), len(architectures.members(task, group)))
    ]
    return ids[first], active[first] & own[first], own[first]


class StateRows:
    """Reading and writing the rows of State.clients at rest.

    Args:
      where: the placement, or None.
    """

    def __init__(self, task: Task, where: Placement | None, devices: int):
        self._task, self._where = task, where
        self._parts = slices(segments(task, task.num_clients, devices))

    def of(self, ids: Array) -> Array:
        """The rows of the clients `ids` [S]; some row for padding."""
        return ids if self._where is None else jnp.asarray(self._where.row)[ids]

    def gather(self, clients: PyTree, at: Array, lengths: tuple[int, ...]) -> PyTree:
        """Rows `at` [S] of a round with segments of these lengths."""
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
        """The rows with those of the active clients of a round replaced."""

        def inside(g: int, old: Array, rows: Array) -> PyTree:
            return trees.scatter(
                old, self._part(at, g, lengths), rows, active[slices(lengths)[g]]
            )

        return architectures.per_group(
            lambda old, rows: trees.scatter(old, at, rows, active), inside, clients, new
        )

    def keep(self, new: PyTree, old: PyTree, active: Array) -> PyTree:
        """Where everybody has a place: the new rows of the active clients, the old ones
        of the others."""
        inside = lambda g, a, b: trees.where(active[self._parts[g]], a, b)
        return architectures.per_group(
            lambda a, b: trees.where(active, a, b), inside, new, old
        )

    def _part(self, at: Array, group: int, lengths: tuple[int, ...]) -> Array:
        return at[slices(lengths)[group]] - self._parts[group].start

    def place(self, state: State) -> State:
        """Rows by client id (Grouped ones by rank within the architecture) -> rows at
        rest."""
        if self._where is None:
            return state
        client = jnp.minimum(
            jnp.asarray(self._where.client), self._task.num_clients - 1
        )
        slot = jnp.asarray(architectures.slots(self._task))[client]
        inside = lambda g, x: x[jnp.minimum(slot[self._parts[g]], len(x) - 1)]
        return state._replace(
            clients=architectures.per_group(lambda x: x[client], inside, state.clients)
        )

    def unplace(self, state: State) -> State:
        """The inverse of `place`."""
        if self._where is None:
            return state
        row = self._where.row[: self._task.num_clients]
        inside = lambda g, x: x[
            row[architectures.members(self._task, g)] - self._parts[g].start
        ]
        return state._replace(
            clients=architectures.per_group(lambda x: x[row], inside, state.clients)
        )


def sharded(tree: PyTree, mesh: Mesh | None, spec: P) -> PyTree:
    """The tree with a constraint on where its leaves lie; without a mesh, the tree."""
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
    """The same arrays without the mesh in their type.

    What `client` closes over enters the shard_map as it is; some of jax's functions
    refuse an operand whose type says that the mesh is automatic where they run inside
    of it (seen with JAX 0.10: indexing, broadcasting).
    """
    return jax.tree.map(_unmark.bind, tree)
