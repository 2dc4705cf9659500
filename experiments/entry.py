"""What the command lines have in common: how they begin, and that each failure is one
sentence and an exit code."""

import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console

from experiments.interrupt import Interrupt
from fedjax_pfl.engine import multihost
from fedjax_pfl.errors import InputError, choose

BAD_INPUT, DIVERGED, UNWRITABLE, LOST, INTERRUPTED = 2, 3, 4, 5, 130
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu", "METAL", "proxy")
_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}


_interrupts: list[int] = []


def _interrupt(number: int, _frame: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was pressed: raised in a callback of another
    library, it would be lost."""
    if _interrupts:
        raise KeyboardInterrupt


def _unraisable(args: Any) -> None:
    """Says what was raised in a callback and lost, but for Ctrl-C, which
    `check_interrupt` finds."""
    if not issubclass(args.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(args)


def begin() -> None:
    """Prepares signals, output and warnings of a process that is a command line."""
    sys.unraisablehook = _unraisable
    if not sys.warnoptions:  # other libraries warn of what no user can change
        warnings.simplefilter("ignore")
    sys.stdout, sys.stderr = (_lenient(stream) for stream in (sys.stdout, sys.stderr))
    # last: what it raises is caught by `guarded`
    signal.signal(signal.SIGINT, _interrupt)


def guarded(command: Callable[[], int], interrupted: str = "Interrupted.") -> int:
    """Runs a command and returns its exit code; every failure is one sentence."""
    try:
        return command()
    except InputError as error:
        # what the user gave may have several lines
        errors().print(" ".join(str(error).splitlines()))
        return BAD_INPUT
    except multihost.LostError as error:
        errors().print(str(error))
        return LOST
    except OSError as error:
        errors().print(
            f"Cannot read or write {error.filename or 'a file'} "
            f"({error.strerror or error}): make room or choose "
            "another directory; then the same command goes on."
        )
        return UNWRITABLE
    except KeyboardInterrupt:
        errors().print(interrupted)
        return INTERRUPTED


def lead(command: Callable[[], int], interrupted: str) -> int:
    """Runs a command; of several processes process 0 does, `guarded` and as if there
    were no other: those follow, and end with the same exit code."""
    if not multihost.several():
        return command()
    if jax.process_index():
        with Interrupt(lambda: None, "Aborted."):
            return multihost.follow()
    code = 1  # with which Python ends where something else is raised
    try:
        code = guarded(command, interrupted)
    finally:
        if not multihost.left():
            multihost.dismiss(code)
    return code


def terminal() -> Console:
    """Where results are said."""
    # a file gets whole lines, and tables of up to this width
    to_file: dict[str, Any] = (
        {} if sys.stdout.isatty() else {"soft_wrap": True, "width": 200}
    )
    return Console(highlight=False, markup=False, emoji=False, **to_file)


def errors() -> Console:
    """Where failures are said."""
    return Console(
        stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False
    )


class _Output(io.FileIO):
    """A standard stream that goes on without a reader: a run does not end where `|
    head` has seen enough."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            return len(memoryview(content))


def _lenient(stream: Any) -> io.TextIOWrapper:
    """The stream, without errors where nobody reads or where the encoding lacks a
    letter."""
    raw = _Output(stream.fileno(), "w", closefd=False)
    made = io.BufferedWriter(raw)
    return io.TextIOWrapper(
        made, stream.encoding, errors="replace", line_buffering=True
    )


def enter(command: Callable[[list[str]], str], usage: str | None) -> int:
    """Runs a command line that prints a text, and returns its exit code."""
    begin()
    argv = sys.argv[1:]

    def printed() -> int:
        print(usage if {"--help", "-h"} & set(argv) else command(argv))
        return 0

    return guarded(printed)


def leave(code: int) -> NoReturn:
    """Ends the process."""
    # JAX would wait at the exit for whoever is lost, then abort; and crash in what was
    # interrupted while it compiles
    if (
        code == LOST
        or multihost.left()
        or (code == INTERRUPTED and not multihost.several())
    ):
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def directory(text: str) -> Path:
    """A path as the user wrote it, `~` for a home; InputError if there is no such
    user."""
    path = Path(os.path.expanduser(text))
    if text.startswith("~") and path == Path(text):
        raise InputError(
            f"There is no user {text.split('/')[0]!r}, so there is no directory {text}."
        )
    return path


def check_platform() -> None:
    """Starts JAX; InputError if it has not the devices that JAX_PLATFORMS asks for."""
    wanted = jax.config.values["jax_platforms"] or ""
    for name in filter(None, wanted.split(",")):
        choose("platform in JAX_PLATFORMS", name, _PLATFORMS)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # the latter: there is none, and JAX does not say which
        extra = next((extra for name, extra in _EXTRAS.items() if name in wanted), None)
        way = (
            f"pip install 'fedjax_pfl[{extra}]' on a machine that has it, or "
            if extra
            else ""
        )
        why = next(iter(str(error).splitlines()), "there is no such device").rstrip(
            ".:"
        )
        raise InputError(
            f"JAX cannot use JAX_PLATFORMS={wanted} ({why}): {way}leave JAX_PLATFORMS "
            "out."
        ) from error
