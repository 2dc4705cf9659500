"""One process at a time writes a run directory."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fedjax_pfl.errors import InputError

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

NAME = "lock"


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Locks an existing run directory; the system frees the lock of a process that
    ends, however it ends.

    Over a network file system this holds as far as the system's `flock` does; without
    one, nothing is locked.

    Raises:
      InputError: another process holds it; the message names its id and host.
      OSError: the directory cannot be written.
    """
    file = _locked(path)
    try:
        yield
    finally:
        if file is not None:
            # of a directory that is gone, or not writable any more
            with contextlib.suppress(OSError):
                os.unlink(path / NAME)
            os.close(file)


def _locked(path: Path) -> int | None:
    """The descriptor of the lock's file, locked, with who holds it written in it; None
    where locks are not known."""
    while fcntl is not None:
        file = os.open(path / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = (
                os.read(file, 1000).decode(errors="replace").strip()
                or "another process"
            )
            os.close(file)
            way = "wait until it ends, or choose another --workdir"
            raise InputError(
                f"The run directory {path} is being written by {owner}: {way}."
            ) from None
        except OSError:  # a file system without locks
            os.close(file)
            return None
        if _is_there(path / NAME, file):
            # of a full disk: the lock holds without a name
            with contextlib.suppress(OSError):
                os.truncate(file, 0)
                os.write(
                    file, f"process {os.getpid()} on {socket.gethostname()}\n".encode()
                )
            return file
        os.close(file)  # whoever held it has just ended and removed the file
    return None


def _is_there(path: Path, file: int) -> bool:
    """Is an open file the one that has this name now?"""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
