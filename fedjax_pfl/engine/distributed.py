"""One run by several processes, on one host or many.

Every process runs the same program with the same arguments (SPMD); process 0 writes. A
mesh has the devices of all processes, so that an array may have shards that a process
cannot read: `fetch` copies it to every host. With a single process nothing changes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from fedjax_pfl.errors import InputError
from fedjax_pfl.types import PyTree

SHUTDOWN = 60  # seconds that a process waits at its end for the others


def connect(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a run, before JAX starts.

    Args:
      coordinator: HOST:PORT of process 0; None if `jax.distributed` finds it (SLURM,
        Open MPI, Cloud TPU, ...).
      num_processes: needed with a coordinator.
      process_id: from 0; needed with a coordinator.

    Raises:
      InputError: the processes cannot be joined.
    """
    if jax.distributed.is_initialized():
        return
    # its handler of SIGTERM would replace the caller's
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, shutdown_timeout_seconds=SHUTDOWN
        )
        largest(0)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"The processes cannot be joined: {error}") from error


def several() -> bool:
    """Returns True for one of several processes, without starting JAX."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def largest(number: int) -> int:
    """Returns the largest of the processes' numbers (int32)."""
    if not several():
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).max())


def fetch(tree: PyTree) -> PyTree:
    """Copies a tree to every host; all processes must call it.

    One leaf after another: there is never more than one whole on the devices.
    """
    return jax.device_get(jax.tree.map(_whole, tree) if several() else tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _whole(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.is_fully_replicated:
        return x.addressable_data(0)
    return multihost_utils.process_allgather(x, tiled=True)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copies a tree, the same in all processes, to every device of the mesh."""
    if several():
        _meet(mesh)
    everywhere = NamedSharding(mesh, P())
    return place(tree, jax.tree.map(lambda _: everywhere, tree))


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Copies the leaves of a tree, the same in all processes, to where they belong."""
    if not several():
        return jax.device_put(tree, shardings)

    def put(x: Any, where: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = put(jax.random.key_data(x), where)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, where, lambda at: x[at])

    return jax.tree.map(put, tree, shardings)


def _meet(mesh: Mesh) -> None:
    """Connects the devices before one process compiles for longer than the others: the
    first time they wait for 30 seconds only on a CPU (JAX 0.10)."""
    each = NamedSharding(mesh, P(mesh.axis_names))
    one = np.zeros(1, np.float32)
    fetch(jax.make_array_from_callback((mesh.size,), each, lambda _: one))
