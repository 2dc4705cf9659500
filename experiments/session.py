"""A run, or several as one program: from the settings, or from where it stopped, to
what it leaves in its directory."""

import contextlib
import errno
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from experiments import (
    account,
    at_once,
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
from experiments.plain import plural
from experiments.recorded import Layout
from experiments.recorder import Clock
from experiments.versions import changed, check_draws, compile_clock, versions
from fedjax_pfl.data.federate import ROOM
from fedjax_pfl.engine import memory, multihost
from fedjax_pfl.errors import InputError, NoRoomError
from fedjax_pfl.types import State

NOTHING = "Interrupted before the first round: nothing to resume."


class Given(NamedTuple):
    """What a user gave of a run."""

    user: dict[str, Any]  # as `flags.Parsed.settings`
    workdir: str | None
    resume: bool = False


class Run(NamedTuple):
    """A run in its directory, before its first round or the next."""

    directory: runs.RunDirectory
    experiment: build.Experiment
    recorded: Layout | None  # of a run that goes on
    devices: int  # over which its clients are trained


def train_into(
    given: Sequence[Given],
    room: Sequence[int] = ROOM,
    say: int = closing.SHORT,
    like: Layout | None = None,
) -> int:
    """Trains one run, or several as one program, and returns the exit code.

    Args:
      given: several are all new, or all stopped after the same round.
      room: as `federate` takes it, for the clients of each; results do not depend on
        it.
      say: how much of the run is said: closing.ONE, SHORT, or ALL.
      like: the layout that new runs take where their settings say auto; None: it is
        chosen.

    Raises:
      InputError, KeyboardInterrupt: before there is anything to resume.
      NoRoomError: the device ran out of memory, at any time.
      at_once.ApartError, at_once.TooManyError: several that cannot be one program, or
        something is wrong with one of them.
    """
    console = entry.terminal()
    with contextlib.ExitStack() as held:  # the locks of the run directories
        with at_once.each_alone(len(given)):
            places = [where(one, held) for one in given]
        paths = [path for path, *_ in places]
        if (
            len(paths) == 1
            and given[0].resume
            and (ended := _settled(*places[0][:2], say))
        ):
            console.print(ended)
            return 0
        try:
            return _into(places, room, console, held, say, like)
        except KeyboardInterrupt:
            if not any(map(runs.is_run, paths)):
                raise
            entry.errors().print(f"Interrupted; {_goes_on(paths)}")
            return INTERRUPTED
        except (train.Stopped, multihost.LostError, OSError) as error:
            return stopped(error, paths)
        except jax.errors.JaxRuntimeError as error:
            # the account has not all that lies in a device's memory
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if len(given) == 1:
                way = (
                    f"go on with {command(paths[0])} and"
                    if runs.is_run(paths[0])
                    else "take"
                )
                raise NoRoomError(
                    f"The device has no memory left for {paths[0]}: {way} a smaller "
                    "--width, or begin a run with a "
                    "smaller --model or fewer --clients."
                ) from None
            raise at_once.TooManyError(
                f"There is no room for {len(given)} runs as one program."
            ) from None


def _settled(path: Path, config: Config, say: int) -> str | None:
    """What is said of a run that has ended, where nothing else of it is asked for."""
    known = runs.read_config(path)
    same = (config.targets, config.tensorboard) == (known.targets, known.tensorboard)
    return stopping.ended(path, config) if same and say != closing.ALL else None


def _into(
    places: Sequence[tuple[Path, Config, bool]],
    room: Sequence[int],
    console: Console,
    held: contextlib.ExitStack,
    say: int,
    like: Layout | None,
) -> int:
    """Trains into run directories, from their start or from where they stopped."""
    paths, count = [path for path, *_ in places], len(places)
    if count > 1:
        at_once.check_settings([config for _, config, _ in places])
    found = list[Run]()
    with at_once.each_alone(count):
        for place in places:
            run = loaded(*place, room, console)
            shared = (
                at_once.sharing(run.experiment, found[0].experiment)
                if found
                else run.experiment
            )
            found.append(run._replace(experiment=shared))
    several = f"; {count} runs as one program" if count > 1 else ""
    console.print(f"{account.describe(found[0].experiment)}{several}")
    if count > 1:
        at_once.check([run.experiment for run in found], found[0].devices)
    with at_once.each_alone(count):
        for run in found:
            if run.recorded is None:
                make(run.directory.path, held)
    laid = laid_out(found, like, console)
    with compile_clock() as compiling:
        batch = compiled([run.experiment for run in found], laid, console)
        with at_once.each_alone(count):
            begun = [begin(run, laid, batch.functions.memory, console) for run in found]
        # another process went on with one meanwhile
        if len({start for start, _ in begun}) > 1:
            raise at_once.ApartError("they go on from different rounds")
        quiet, words = shown(console, say), said(batch, found[0].recorded is not None)
        quiet.print(
            f"Run director{'y' if count == 1 else 'ies'}: "
            f"{', '.join(map(str, paths))}; {words}"
        )
        entry.check_interrupt()
        clocks = [Clock(run.directory, compiling, count) for run in found]
        states, directories = (
            [state for _, state in begun if state is not None],
            [run.directory for run in found],
        )
        diverged, asked = train.train(
            batch, directories, clocks, begun[0][0], states, quiet, _goes_on(paths)
        )
    for run, lost in zip(found, diverged, strict=True):
        if not lost:
            if count > 1:
                console.print(f"{run.directory.path}:")
            closing.show(console, run.directory, run.experiment, say)
    return 128 + asked if asked else DIVERGED if any(diverged) else 0


def loaded(
    path: Path, config: Config, resume: bool, room: Sequence[int], console: Console
) -> Run:
    """The data and the clients of a run; everything wrong is found here."""
    recorded = runs.read_layout(path) if resume else None
    check_draws(read_derived(path / "versions.json", schema.VERSIONS) if resume else {})
    with phases.said(console, "Loading the data and making the clients"):
        experiment = multihost.run_on_all(build.prepare, config, room)
        count = layouts.devices(
            config.devices, experiment, recorded and recorded.devices.count
        )
        targets.check_possible(experiment)
        stopping.check_possible(experiment)
        own = multihost.run_on_all(runs.digests, experiment)
        # the copy is sent
        multihost.run_on_all(
            runs.check_digests, experiment, own, dict(own), "process 0 has"
        )
    return Run(runs.RunDirectory(path, experiment), experiment, recorded, count)


def laid_out(found: list[Run], like: Layout | None, console: Console) -> Layout:
    """How the first run, and so all, are laid out here."""
    run, count = found[0], len(found)
    with phases.said(console, "Trying how many clients to train at once"):
        laid = layouts.choose(
            run.experiment, run.devices if count == 1 else 1, run.recorded or like
        )
    return laid._replace(runs=count)


def compiled(
    experiments: list[build.Experiment], laid: Layout, console: Console
) -> train.Batch:
    """The runs as one program on every process."""
    with phases.said(console, "Compiling"):
        try:
            return multihost.run_on_all(train.compiled, experiments, laid)
        except NoRoomError as error:
            if len(experiments) == 1:
                raise
            raise at_once.TooManyError(f"{str(error).partition(':')[0]}.") from None


def begin(
    run: Run, laid: Layout, found: memory.Memory, console: Console
) -> tuple[int, State | None]:
    """Writes what a new run directory begins with, or goes back to the last checkpoint:
    the round and the state to go on with (None: from the start)."""
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
                f"Not the software or device of the start ({', '.join(differing)}): "
                "the last bits may differ."
            )
        if relaid := before.changes(laid):
            console.print(
                f"The layout changes ({relaid}): from here on the run is the same only "
                "to rounding."
            )
            # where the settings leave the number of devices open, the recorded one is
            # wanted again on a machine that has it
            kept = (
                laid._replace(devices=before.devices)
                if experiment.config.devices == "auto"
                else laid
            )
            runs.write_json(directory.path / "layout.json", kept.content(found))
            now["layout"] = relaid
        runs.write_json(
            file,
            recorded
            | {"resumed": [*recorded.get("resumed", []), {"round": start, **now}]},
        )
        console.print(f"Resuming after round {start} of {experiment.config.rounds}.")
        return start, state


def said(batch: train.Batch, resume: bool) -> str:
    """Layout and memory in words."""
    chosen = batch.experiments[0].config.width == "auto" and not resume
    parts = [layouts.say(batch.layout, chosen), memory.say(batch.functions.memory)]
    return "; ".join(filter(None, parts))


def shown(console: Console, say: int) -> Console:
    """Where the rounds are shown, as the bar has test scores."""
    hidden = say == closing.HELD_OUT or (say == closing.ONE and not console.is_terminal)
    return Console(quiet=True) if hidden else console


def where(given: Given, held: contextlib.ExitStack) -> tuple[Path, Config, bool]:
    """The run directory, locked if there is one to resume, the settings of the run, and
    whether it is a resume."""
    user, workdir, resume = given
    if resume and workdir:
        path = entry.directory(workdir)
    elif resume and not user.get("algo"):
        raise InputError(
            "--resume needs --workdir=DIRECTORY: the run that it is to continue."
        )
    else:
        config = settings.resolve(user)
        path = entry.directory(workdir or settings.default_workdir(user, config))
    if resume:
        if runs.is_run(path):
            _lock(path, held)
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


def stopped(error: Exception, paths: Sequence[Path]) -> int:
    """Says in one sentence why runs ended early, and how they go on."""
    errors, goes_on = entry.errors(), _goes_on(paths)
    again = goes_on if any(map(runs.is_run, paths)) else "start again"
    if isinstance(error, train.Stopped):
        errors.print(f"Stopped after {plural(error.args[0], 'round')}; {goes_on}")
        return 128 + int(error.args[1])
    if isinstance(error, multihost.LostError):
        errors.print(f"{error}; {again}")
        return LOST
    then = (
        ["make room"]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        else []
    )
    place = paths[0] if len(paths) == 1 else f"one of {', '.join(map(str, paths))}"
    errors.print(f"Cannot write to {place} ({error}): {', then '.join([*then, again])}")
    return UNWRITABLE


def _goes_on(paths: Sequence[Path]) -> str:
    """How the user goes on, as the end of a sentence."""
    return (
        f"go on with {command(paths[0])}"
        if len(paths) == 1
        else "the same command goes on."
    )


def command(path: Path) -> str:
    """The command that continues a run."""
    return (
        f"{Path(sys.executable).name} -m experiments.main --resume "
        f"--workdir={shlex.quote(str(path))}"
    )
