"""What the command lines have in common: how they begin, and that each failure is one sentence and an exit code."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from fedjax_pfl.errors import InputError, choose

BAD_INPUT, DIVERGED, UNWRITABLE, LOST, INTERRUPTED = 2, 3, 4, 5, 130
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu", "METAL", "proxy")
_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}


_interrupts: list[int] = []


def _interrupt(number: int, _frame: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raises KeyboardInterrupt if Ctrl-C was pressed: raised in a callback of another library, it would be lost."""
    if _interrupts:
        raise KeyboardInterrupt


def _unraisable(args: Any) -> None:
    """Says what was raised in a callback and lost, but for Ctrl-C, which `check_interrupt` finds."""
    if not issubclass(args.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(args)


def begin() -> None:
    """Prepares signals, output and warnings of a process that is a command line."""
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    if not sys.warnoptions:  # other libraries warn of what no user can change
        warnings.simplefilter("ignore")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # an output that is not UTF-8 has no arrows


def enter(command: Callable[[list[str]], str], usage: str | None) -> int:
    """Runs a command line that prints a text, and returns its exit code."""
    begin()
    argv = sys.argv[1:]
    try:
        print(usage if {"--help", "-h"} & set(argv) else command(argv))
        return 0
    except InputError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def options(argv: list[str], known: tuple[str, ...]) -> tuple[dict[str, str], list[Path]]:
    """Reads `--name=value` of the known names, and paths.

    Raises:
      InputError: a flag is unknown, or there is no path.
    """
    given, paths = {}, []
    for word in argv:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            paths.append(directory(word))
            continue
        choose("flag", f"--{name}", [f"--{x}" for x in known])
        if not equals or not value:
            raise InputError(f"{word}: write it as --{name}=VALUE.")
        given[name] = value
    if not paths:
        raise InputError("Name the run directories: --help says how.")
    return given, paths


def directory(text: str) -> Path:
    """A path as the user wrote it, `~` for a home; InputError if there is no such user."""
    path = Path(os.path.expanduser(text))
    if text.startswith("~") and path == Path(text):
        raise InputError(f"There is no user {text.split('/')[0]!r}, so there is no directory {text}.")
    return path


def check_platform() -> None:
    """Starts JAX; InputError if it has not the devices that JAX_PLATFORMS asks for."""
    wanted = jax.config.values["jax_platforms"] or ""
    for name in filter(None, wanted.split(",")):
        if name not in _PLATFORMS:
            choose("platform in JAX_PLATFORMS", name, _PLATFORMS)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter: there is none, and JAX does not say which
        extra = next((extra for name, extra in _EXTRAS.items() if name in wanted), None)
        way = f"pip install 'fedjax_pfl[{extra}]' on a machine that has it, or " if extra else ""
        why = next(iter(str(error).splitlines()), "there is no such device").rstrip(".:")
        raise InputError(f"JAX cannot use JAX_PLATFORMS={wanted} ({why}): {way}leave JAX_PLATFORMS out.") from error
