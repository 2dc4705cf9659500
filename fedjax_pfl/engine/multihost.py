"""One run by several processes, on one host or many: joining them, and how process 0
leads.

A mesh spans the devices of all (`clients.make_mesh`), so an array may lie where a
process cannot read it: `fetch` brings it to every host. What computes on such a mesh
must be run by every process, with the same arguments: a process that takes another way
leaves the others waiting. A program in Python can be such that it is the same on all. A
command is run by process 0 alone, which reads, writes, talks and decides; the others
`follow`: they run the functions that it gives to `run_on_all`. In a single process each
of these functions does its work and nothing more.
"""

import contextlib
import io
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_pfl.engine.distributed import SHUTDOWN, fetch, largest, replicate, several
from fedjax_pfl.errors import InputError

PIECE = 2**24  # bytes that are sent at once
__all__ = ["fetch", "largest", "replicate", "several"]
T = TypeVar("T")
# what each function of `run_on_all` returned in this process, in order
_own: dict[Callable[..., Any], Any] = {}
# whether this process left a step before its end, so that it cannot take another with
# the others
_left = False


class LostError(RuntimeError):
    """Another process cannot be reached, or not any more: this one should end at
    once."""


@contextlib.contextmanager
def _step() -> Iterator[None]:
    """What the processes do together: nothing follows where it fails, or Ctrl-C is
    pressed."""
    global _left
    try:
        yield
    except KeyboardInterrupt:
        _left = True
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # ValueError: of JAX, where it starts
        _left = True
        raise LostError(
            "Lost another process, or failed "
            f"({(str(error) or repr(error)).splitlines()[0]})"
        ) from error


def connect(
    coordinator: str | None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a run, before JAX looks for its devices; does nothing
    without a coordinator, or if done.

    Args:
      coordinator: HOST:PORT, a free port where process 0 runs; or auto: as
        `jax.distributed.initialize` finds it (on SLURM, Open MPI, Cloud TPU, ...).
      num_processes: needed with HOST:PORT.
      process_id: of 0 to num_processes - 1; needed with HOST:PORT.

    Raises:
      InputError: these do not fit each other, nothing was found, or process 0 cannot
        listen there.
      LostError: the coordinator was found, but not the other processes.
    """
    if coordinator is None:
        if (num_processes, process_id) != (None, None):
            raise InputError(
                "--num_processes and --process_id need --coordinator=HOST:PORT, where "
                "process 0 listens."
            )
        return
    if jax.distributed.is_initialized():
        return
    if coordinator != "auto":
        _check_address(coordinator, num_processes, process_id)
    # it would take SIGTERM from whoever handles it here
    jax.config.update("jax_enable_preemption_service", False)
    address = None if coordinator == "auto" else coordinator
    try:
        jax.distributed.initialize(
            address, num_processes, process_id, shutdown_timeout_seconds=SHUTDOWN
        )
    except (RuntimeError, ValueError) as error:
        why = _not_numbers() or str(error).rstrip(".")
        raise InputError(
            f"--coordinator={coordinator} does not work here ({why}): --help says what "
            "to give."
        ) from error
    try:
        largest(0)  # as `_meet`
    except jax.errors.JaxRuntimeError as error:
        raise LostError(
            f"The processes have met, but {socket.gethostname()} and another host "
            "cannot reach each other "
            f"({str(error).splitlines()[0]}): each host's own name must stand for an "
            "address that the others reach, "
            "and often /etc/hosts says that it is 127.0.0.1 or 127.0.1.1."
        ) from error


def _not_numbers() -> str | None:
    """What in the environment is no number, though JAX reads it as one."""
    names = [f"SLURM_{name}" for name in ("JOB_ID", "NTASKS", "PROCID", "LOCALID")]
    names += [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK")]
    wrong = [
        f"{name}={os.environ[name]}"
        for name in names
        if not os.environ.get(name, "0").isdecimal()
    ]
    return f"{wrong[0]} is not a whole number" if wrong else None


def _check_address(
    coordinator: str, num_processes: int | None, process_id: int | None
) -> None:
    """JAX ends the process, some pages later, where process 0 cannot listen."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InputError(
            f"--coordinator={coordinator} must be HOST:PORT, where process 0 listens, "
            "or auto."
        )
    if num_processes is None or process_id is None:
        raise InputError(
            f"--coordinator={coordinator} needs --num_processes=N and --process_id=0 "
            "to N-1 as well."
        )
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id={process_id} is not one of the {num_processes} processes: "
            "they count from 0."
        )
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
        if process_id == 0:
            socket.create_server(("", int(port))).close()
    except OSError as error:
        raise InputError(
            f"--coordinator={coordinator} cannot be used ({error}): choose another."
        ) from None


def left() -> bool:
    """Did this process leave the others in the middle of a step, so that it should end
    at once?"""
    return _left


def forget() -> None:
    """Frees what was compiled, and the results that `run_on_all` keeps."""
    jax.clear_caches()
    _own.clear()


def run_on_all(function: Callable[..., T], *args: Any) -> T:
    """What `function(*args)` returns here, run by every process: by process 0, which
    calls this, and by those that `follow` it.

    Each keeps what the function returned until it is run again, and what was returned
    since. An argument that is, or holds, such a result is on each process its own; all
    else is sent, and must be picklable.

    Raises:
      what was raised here; else what was raised on another process, an InputError for
        its own and an OSError; without waiting for the others, LostError where JAX
        failed, and KeyboardInterrupt.
    """
    if not several():
        return function(*args)
    _Pickler(message := io.BytesIO()).dump((function, args))
    with _step():
        _broadcast(message.getvalue(), 0)
        value, error = _together(function, args)
    if error is not None:
        raise error
    return value


def follow() -> int:
    """On all but process 0: runs what that gives to `run_on_all`, until it says
    `dismiss`, and returns the number given there.

    A step: process 0 sends a function and its arguments; all run it, and say whether it
    raised; if it did elsewhere only, the first such process sends the sentence. Between
    steps nobody waits but for process 0.
    """
    while True:
        with _step():
            function, args = _read(_broadcast(b"", 0))
            if function is None:
                _own.clear()
                return int(args)
            # an error is process 0's, which goes on or dismisses
            _together(function, args)


def _read(message: bytes) -> tuple[Callable[..., Any] | None, Any]:
    """The function and its arguments; if they cannot be read here, what says so as it
    is run."""
    try:
        return _Unpickler(io.BytesIO(message)).load()
    except Exception as error:  # a module that this host lacks, say
        return _raise, (error,)


def _raise(error: Exception) -> None:
    raise error


def dismiss(number: int) -> None:
    """On process 0: ends `follow` on the others."""
    _own.clear()
    with _step():
        _broadcast(pickle.dumps((None, number)), 0)


def _together(
    function: Callable[..., T], args: tuple[Any, ...]
) -> tuple[T, BaseException | None]:
    """One step of every process: what it returned here and, on process 0, what was
    raised."""
    while function in _own:
        _own.popitem()
    _own[function] = error = None
    try:
        _own[function] = function(*args)
    except (jax.errors.JaxRuntimeError, KeyboardInterrupt):
        # perhaps while the others wait for it
        raise
    except BaseException as raised:  # whatever would end this process
        error = raised
    failed = multihost_utils.process_allgather(np.int32(error is not None))
    if failed.any() and not failed[0]:
        source, known = int(np.argmax(failed)), isinstance(error, InputError | OSError)
        said = (
            InputError(f"Process {source}: {error}")
            if known
            else RuntimeError(f"Process {source}: {error!r}")
        )
        error = pickle.loads(_broadcast(pickle.dumps(said), source))
    return _own[function], error


def _broadcast(content: bytes, source: int) -> bytes:
    """The content of one process on every process."""
    mine = jax.process_index() == source
    send: Callable[[np.ndarray], np.ndarray] = lambda x: (
        multihost_utils.broadcast_one_to_all(x, is_source=mine)
    )
    pieces, rest = send(np.array(divmod(len(content), PIECE), np.int32)).tolist()
    whole = (
        np.frombuffer(content, np.uint8)
        if mine
        else np.zeros(pieces * PIECE + rest, np.uint8)
    )
    return b"".join(
        [send(whole[i : i + PIECE]).tobytes() for i in range(0, len(whole), PIECE)]
    )


class _Pickler(pickle.Pickler):
    """Sends in place of what an earlier step returned which one it was."""

    def persistent_id(self, x: Any) -> int | None:
        return next(
            (i for i, own in enumerate(_own.values()) if x is own is not None), None
        )


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, i: int) -> Any:
        return list(_own.values())[i]
