"""One run by several processes, on one host or many: joining them, and what they tell each other
beside the rounds.

Every process runs the same program on the same numbers. A mesh spans the devices of all
(`clients.make_mesh`), so an array may lie where a process cannot read it: `fetch` brings it to
every host. Whatever else a process finds by itself, on its disk or its clock, it must share before
all go on: a process that takes another way leaves the others waiting. In a single process each of
these functions does its work and nothing more.
"""

import os
import pickle
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_pfl.errors import InputError
from fedjax_pfl.types import PyTree

PIECE = 2**24  # bytes that are sent at once
SHUTDOWN = 60  # seconds that a process which ends waits for the others to end
T = TypeVar("T")


class UnreachableError(RuntimeError):
    """The processes have met at the coordinator, but their devices cannot speak to each other."""


def connect(coordinator: str | None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the processes of a run, before JAX looks for its devices; does nothing without a
    coordinator, or if done.

    Args:
      coordinator: HOST:PORT, a free port where process 0 runs; or auto: as
        `jax.distributed.initialize` finds it (on SLURM, Open MPI, Cloud TPU, ...).
      num_processes: needed with HOST:PORT.
      process_id: of 0 to num_processes - 1; needed with HOST:PORT.

    Raises:
      InputError: these do not fit each other, nothing was found, or process 0 cannot listen there.
      UnreachableError: the coordinator was found, but not the other processes; this one should end
        at once.
    """
    if coordinator is None:
        if (num_processes, process_id) != (None, None):
            raise InputError("--num_processes and --process_id need --coordinator=HOST:PORT, where process 0 listens.")
        return
    if jax.distributed.is_initialized():
        return
    if coordinator != "auto":
        _check_address(coordinator, num_processes, process_id)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from whoever handles it here
    address = None if coordinator == "auto" else coordinator
    try:
        jax.distributed.initialize(address, num_processes, process_id, shutdown_timeout_seconds=SHUTDOWN)
    except (RuntimeError, ValueError) as error:
        why = _not_numbers() or str(error).rstrip(".")
        raise InputError(
            f"--coordinator={coordinator} does not work here ({why}): --help says what to give."
        ) from error
    try:
        largest(0)  # as `_meet`
    except jax.errors.JaxRuntimeError as error:
        raise UnreachableError(
            f"The processes have met, but {socket.gethostname()} and another host cannot reach each other "
            f"({str(error).splitlines()[0]}): each host's own name must stand for an address that the others reach, "
            "and often /etc/hosts says that it is 127.0.0.1 or 127.0.1.1."
        ) from error


def _not_numbers() -> str | None:
    """What in the environment is no number, though JAX reads it as one."""
    names = [f"SLURM_{name}" for name in ("JOB_ID", "NTASKS", "PROCID", "LOCALID")]
    names += [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK")]
    wrong = [f"{name}={os.environ[name]}" for name in names if not os.environ.get(name, "0").isdigit()]
    return f"{wrong[0]} is not a whole number" if wrong else None


def _check_address(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    """JAX ends the process, some pages later, where process 0 cannot listen."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise InputError(f"--coordinator={coordinator} must be HOST:PORT, where process 0 listens, or auto.")
    if num_processes is None or process_id is None:
        raise InputError(f"--coordinator={coordinator} needs --num_processes=N and --process_id=0 to N-1 as well.")
    if not 0 <= process_id < num_processes:
        raise InputError(f"--process_id={process_id} is not one of the {num_processes} processes: they count from 0.")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
        if process_id == 0:
            socket.create_server(("", int(port))).close()
    except OSError as error:
        raise InputError(f"--coordinator={coordinator} cannot be used ({error}): choose another.") from None


def several() -> bool:
    """Is this one of several processes? JAX is not started to find out."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Is this process 0, the one that reads and writes the run's files and talks to the user?"""
    return not several() or jax.process_index() == 0


def fetch(tree: PyTree) -> PyTree:
    """The tree on the host, whole on every one; all processes must call it.

    One leaf after another: on the devices there is never more than one whole.
    """
    return jax.device_get(jax.tree.map(_whole, tree) if several() else tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_whole(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return x.addressable_data(0) if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """The tree on every device of the mesh; the processes must give the same, which is not
    checked."""
    everywhere = NamedSharding(mesh, P())
    if not several():
        return jax.device_put(tree, everywhere)
    _meet(mesh)

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            key: jax.Array = jax.random.wrap_key_data(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            return key
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, everywhere, lambda _: x)

    return jax.tree.map(put, tree)


def _meet(mesh: Mesh) -> None:
    """Lets the devices find each other while the processes are level, before one of them compiles
    for longer.

    When they speak for the first time they wait for 30 seconds on a CPU, later without a limit
    (seen with JAX 0.10).
    """
    each = NamedSharding(mesh, P(mesh.axis_names))
    fetch(jax.make_array_from_callback((mesh.size,), each, lambda _: np.zeros(1, np.float32)))


def largest(number: int) -> int:
    """The largest of the processes' numbers (int32)."""
    return int(multihost_utils.process_allgather(np.int32(number)).max()) if several() else number


def on_first(action: Callable[..., T], *args: Any) -> T:
    """`action(*args)` on process 0 alone; what it returns or raises, on every process (it must be
    picklable)."""
    if not several():
        return action(*args)
    outcome: tuple[T, BaseException | None] = _shared(_outcome(action, args) if first() else None, 0)
    return _settled(outcome)


def everywhere(action: Callable[..., T], *args: Any) -> T:
    """`action(*args)` on every process; where it raises on some, the first one's error on every
    process."""
    if not several():
        return action(*args)
    outcome: tuple[T, BaseException | None] = _outcome(action, args)
    failed = multihost_utils.process_allgather(np.int32(outcome[1] is not None))
    if not failed.any():
        return outcome[0]
    source, error = int(np.argmax(failed)), outcome[1]
    if source and isinstance(error, InputError):
        error = InputError(f"Process {source}: {error}")
    outcome = _shared((None, error), source)
    return _settled(outcome)


def same(here: T, check: Callable[[T, T], None]) -> None:
    """`check(here, what process 0 has)` on every process, as `everywhere`; nothing where there is
    only one."""
    if several():
        everywhere(check, here, on_first(lambda: here))


def _outcome(action: Callable[..., T], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return action(*args), None
    except BaseException as error:  # whatever would end this process
        return None, error


def _settled(outcome: tuple[T, BaseException | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _shared(outcome: Any, source: int) -> Any:
    """The outcome of one process on every process, pickled; (None, None) travels as nothing."""
    mine = jax.process_index() == source
    content = b"" if not mine or outcome == (None, None) else _pickled(outcome)
    send: Callable[[np.ndarray], np.ndarray] = lambda x: multihost_utils.broadcast_one_to_all(x, is_source=mine)
    pieces, rest = send(np.array(divmod(len(content), PIECE), np.int32)).tolist()
    whole = np.frombuffer(content, np.uint8) if mine else np.zeros(pieces * PIECE + rest, np.uint8)
    parts = [send(whole[i : i + PIECE]).tobytes() for i in range(0, len(whole), PIECE)]
    if mine:
        return outcome
    return pickle.loads(b"".join(parts)) if parts else (None, None)


def _pickled(outcome: tuple[Any, BaseException | None]) -> bytes:
    value, error = outcome
    if error is None:
        return pickle.dumps((value, None))
    try:
        pickle.loads(content := pickle.dumps((None, error)))
    except Exception:  # of a class that does not let its objects travel
        content = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return content
