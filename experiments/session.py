"""One run: from its settings, or from where it stopped, to what it leaves in its directory."""

import contextlib
import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments import (
    account,
    build,
    closing,
    entry,
    layouts,
    lock,
    phases,
    runs,
    schema,
    settings,
    stopping,
    targets,
    train,
)
from experiments.config import Config
from experiments.entry import DIVERGED, INTERRUPTED, LOST, UNWRITABLE
from experiments.files import read_derived
from experiments.recorded import Layout
from experiments.versions import changed, compile_clock, versions
from fedjax_pfl import simulate
from fedjax_pfl.data.federate import ROOM
from fedjax_pfl.engine import memory, multihost
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import State

NOTHING = "Interrupted before the first round: nothing to resume."


class Run(NamedTuple):
    """A run in its directory, before its first round or the next."""

    directory: runs.RunDirectory
    experiment: build.Experiment
    recorded: Layout | None  # of a run that goes on
    devices: int  # over which its clients are trained


def train_into(
    user: dict[str, Any], workdir: str | None, resume: bool, room: Sequence[int] = ROOM, say: int = closing.SHORT
) -> int:
    """Trains with the settings that a user gave and returns the exit code.

    Args:
      user: as `flags.Parsed.settings`.
      room: as `federate` takes it; results do not depend on it.
      say: how much of the run is said: closing.ONE, SHORT, or ALL.

    Raises:
      InputError, KeyboardInterrupt: before there is anything to resume.
    """
    console = terminal()
    with contextlib.ExitStack() as held:  # the lock of the run directory
        path, config, resume = where(user, workdir, resume, held)
        if resume and (ended := stopping.ended(path, config)):
            console.print(ended)
            return 0
        try:
            return _into(path, config, resume, room, console, held, say)
        except KeyboardInterrupt:
            if not runs.is_run(path):
                raise
            entry.errors().print(f"Interrupted; go on with {train.command(path)}")
            return INTERRUPTED


def terminal() -> Console:
    """Where a run says how it goes."""
    # a file gets whole lines
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


def _into(
    path: Path,
    config: Config,
    resume: bool,
    room: Sequence[int],
    console: Console,
    held: contextlib.ExitStack,
    say: int,
) -> int:
    """Trains into a run directory, from its start or from where it stopped."""
    run = loaded(path, config, resume, room, console)
    console.print(account.describe(run.experiment))
    try:
        if run.recorded is None:
            make(path, held)
        run, laid = laid_out(run, console)
        with compile_clock() as compiling:
            clock = train.Clock(path, compiling)
            with phases.said(console, "Compiling"):
                functions = multihost.everywhere(train.compiled, run.experiment, laid)
            start, state = begin(run, laid, functions.memory, console)
            quiet = shown(console, say)
            quiet.print(f"Run directory: {path}; {said(config, laid, functions.memory, resume)}")
            entry.check_interrupt()
            asked = train.train(run.experiment, laid, run.directory, start, state, quiet, functions, clock)
    except (simulate.DivergenceError, train.Stopped, multihost.LostError, OSError) as error:
        return stopped(error, run.directory)
    closing.show(console, run.directory, run.experiment, say)
    return 128 + asked if asked else 0  # the run is complete, what follows it is not wanted


def loaded(path: Path, config: Config, resume: bool, room: Sequence[int], console: Console) -> Run:
    """The data and the clients of a run; everything wrong is found here."""
    recorded = runs.read_layout(path) if resume else None
    conv = recorded.conv if recorded is not None and config.conv == "auto" else config.conv
    with phases.said(console, "Loading the data and making the clients"):
        experiment = multihost.everywhere(build.prepare, config, conv, room)
        count = layouts.devices(config.devices, experiment, recorded and recorded.devices.count)
        targets.check_possible(experiment)
        stopping.check_possible(experiment)
        own = multihost.everywhere(runs.digests, experiment)
        multihost.everywhere(runs.check_digests, experiment, own, dict(own), "process 0 has")  # the copy is sent
    return Run(train.directory(path, experiment), experiment, recorded, count)


def laid_out(run: Run, console: Console) -> tuple[Run, Layout]:
    """The run in the form that is used, and how it is laid out here: of a run that goes on as its
    settings say, and as recorded where they say auto."""
    width = run.experiment.config.width
    if run.recorded is not None:
        known = run.recorded.width if width == "auto" else int(width)
        return run, layouts.laid_out(run.experiment, known, run.devices)
    with phases.said(console, "Trying how many clients to train at once"):
        experiment, laid = layouts.choose(run.experiment, width, run.devices)
    return run._replace(experiment=experiment), laid


def begin(run: Run, laid: Layout, found: memory.Memory, console: Console) -> tuple[int, State | None]:
    """Writes what a new run directory begins with, or goes back to the last checkpoint: the round
    and the state to go on with (None: from the start)."""
    directory, experiment, before = run.directory, run.experiment, run.recorded
    if before is None:
        directory.start(experiment, laid.content(found), versions())
        return 0, None
    with phases.said(console, "Reading the rows and the last checkpoint"):
        file = directory.path / "versions.json"
        recorded, now = read_derived(file, schema.VERSIONS), versions()
        build.check_growth(experiment, runs.read_config(directory.path).rounds)
        start, state = directory.reopen(experiment)
        if differing := changed(recorded, now) if recorded else []:
            console.print(
                f"Not the software or device of the start ({', '.join(differing)}): the last bits may differ."
            )
        if relaid := before.changes(laid):
            console.print(f"The layout changes ({relaid}): from here on the run is the same only to rounding.")
            # where the settings leave the number of devices open, the recorded one is wanted again on a machine that
            # has it
            kept = laid._replace(devices=before.devices) if experiment.config.devices == "auto" else laid
            runs.write_json(directory.path / "layout.json", kept.content(found))
            now["layout"] = relaid
        runs.write_json(file, recorded | {"resumed": [*recorded.get("resumed", []), {"round": start, **now}]})
        console.print(f"Resuming after round {start} of {experiment.config.rounds}.")
        return start, state


def said(config: Config, laid: Layout, found: memory.Memory, resume: bool) -> str:
    """Layout and memory in words."""
    parts = [layouts.say(laid, config.width == "auto" and not resume), memory.say(found)]
    return "; ".join(filter(None, parts))


def shown(console: Console, say: int) -> Console:
    """Where the rounds are shown, as the bar has test scores."""
    hidden = say == closing.HELD_OUT or (say == closing.ONE and not console.is_terminal)
    return Console(quiet=True) if hidden else console


def where(
    user: dict[str, Any], workdir: str | None, resume: bool, held: contextlib.ExitStack
) -> tuple[Path, Config, bool]:
    """The run directory, locked if there is one to resume, the settings of the run, and whether it
    is a resume."""
    if resume and workdir:
        path = entry.directory(workdir)
    elif resume and not user.get("algo"):
        raise InputError("--resume needs --workdir=DIRECTORY: the run that it is to continue.")
    else:
        config = settings.resolve(user)
        path = entry.directory(workdir or settings.default_workdir(user, config))
    if resume:
        if runs.is_run(path):
            _lock(path, held)
        runs.check_format(path)
        return path, settings.resumed(runs.read_config(path), user), True
    runs.check_free(path)
    return path, config, False


def make(path: Path, held: contextlib.ExitStack) -> None:
    """Makes and locks the directory of a new run."""
    runs.make(path)
    _lock(path, held)
    runs.check_free(path)  # another process may have been faster


def _lock(path: Path, held: contextlib.ExitStack) -> None:
    try:
        held.enter_context(lock.held(path))
    except OSError as error:
        raise runs.unusable(path, error) from error


def stopped(error: Exception, directory: runs.RunDirectory) -> int:
    """Says in one sentence why a run ended early, and how it goes on."""
    errors = entry.errors()
    resume = train.command(directory.path)
    again = f"go on with {resume}" if runs.is_run(directory.path) else "start again"
    if isinstance(error, train.Stopped):
        errors.print(f"Stopped after {error.args[0]} rounds; go on with {resume}")
        return 128 + error.args[1]
    if isinstance(error, simulate.DivergenceError):
        errors.print(f"{error} What was written is kept in {directory.path}.")
        return DIVERGED
    if isinstance(error, multihost.LostError):
        errors.print(f"{error}; {again}")
        return LOST
    then = ["make room"] if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) else []
    errors.print(f"Cannot write to {directory.path} ({error}): {', then '.join([*then, again])}")
    return UNWRITABLE
