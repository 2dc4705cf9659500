"""Runs that differ in seed and numeric hyperparameters only, trained as one compiled program: each
has its own directory, and what is in it is that of the run alone, to rounding."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from experiments import (
    account,
    build,
    closing,
    entry,
    events,
    report,
    runs,
    session,
    stopping,
    train,
    validation,
)
from experiments.config import Config
from experiments.entry import DIVERGED, INTERRUPTED
from experiments.interrupt import Interrupt
from experiments.phases import said
from experiments.recorded import Layout
from experiments.session import Run
from experiments.versions import compile_clock
from fedjax_pfl import simulate
from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.engine import memory, vectorized
from fedjax_pfl.errors import InputError
from fedjax_pfl.types import Array, Federation, State

GOES_ON = "the same command goes on"


class ApartError(Exception):
    """Runs cannot be one program; args: why, as the end of a sentence. No round was trained."""


class TooManyError(Exception):
    """Runs take more memory as one program than there is; args: how much, as a sentence."""


class Given(NamedTuple):
    """One of the runs, as `session.train_into` takes it."""

    user: dict[str, Any]
    path: Path
    resume: bool


class _Batch(NamedTuple):
    """Runs that are one program."""

    runs: list[Run]
    laid: Layout
    program: simulate.Program
    keys: Array  # [R]
    federation: Federation
    functions: simulate.Compiled


def train_into(given: Sequence[Given], room: Sequence[int], say: int) -> int:
    """Trains all and returns the first exit code that is not 0.

    Args:
      given: all new, or all stopped after the same round.
      room: as `federate` takes it, for the clients of each.
      say: as of `session.train_into`.

    Raises:
      ApartError, TooManyError: they cannot be one program, or something is wrong with one of them;
        KeyboardInterrupt: before there is anything to resume.
    """
    console = session.terminal()
    with contextlib.ExitStack() as held:  # the locks of the run directories
        try:
            return _into(given, room, console, held, say)
        except KeyboardInterrupt:
            if not any(runs.is_run(one.path) for one in given):
                raise
            entry.errors().print(f"Interrupted; {GOES_ON}.")
            return INTERRUPTED
        except train.Stopped as error:
            entry.errors().print(f"Stopped after {error.args[0]} rounds; {GOES_ON}.")
            return 128 + int(error.args[1])
        except OSError as error:
            entry.errors().print(f"Cannot write ({error}): make room if it is full, and {GOES_ON}.")
            return entry.UNWRITABLE
        except jax.errors.JaxRuntimeError as error:  # the account has not all that lies in a device's memory
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise TooManyError(f"There is no room for {len(given)} runs as one program.") from None


def _into(given: Sequence[Given], room: Sequence[int], console: Console, held: contextlib.ExitStack, say: int) -> int:
    found = list[Run]()
    with _each_alone():
        where = [session.where(user, str(path), resume, held) for user, path, resume in given]
        _check_settings([config for _, config, _ in where])
        for each in where:
            run = session.loaded(*each, room, console)
            found.append(_sharing(run, found[0]) if found else run)
    console.print(f"{account.describe(found[0].experiment)}; {len(found)} runs as one program")
    _check(found)
    with _each_alone():
        for run in found:
            if run.recorded is None:
                session.make(run.directory.path, held)
    with compile_clock() as compiling:
        clocks = [train.Clock(run.directory.path, compiling, len(found)) for run in found]
        with said(console, "Compiling"):
            batch = _compiled(found, console)
        needed = batch.functions.memory
        with _each_alone():
            begun = [session.begin(run, batch.laid, needed, console) for run in batch.runs]
        if len({start for start, _ in begun}) > 1:  # another process went on with one meanwhile
            raise ApartError("they go on from different rounds")
        quiet = session.shown(console, say)
        first = found[0].experiment.config
        words = session.said(first, batch.laid, needed, found[0].recorded is not None)
        quiet.print(f"Run directories: {', '.join(str(one.path) for one in given)}; {words}")
        entry.check_interrupt()
        diverged, asked = _train(batch, clocks, begun, quiet)
    for run, lost in zip(batch.runs, diverged, strict=True):
        if not lost:
            console.print(f"{run.directory.path}:")
            closing.show(console, run.directory, run.experiment, say)
    return 128 + asked if asked else DIVERGED if any(diverged) else 0


@contextlib.contextmanager
def _each_alone() -> Iterator[None]:
    """What is wrong with one of the runs is said by itself alone, and stops no other."""
    try:
        yield
    except InputError as error:
        raise ApartError(f"one cannot run as it is ({' '.join(str(error).splitlines()).rstrip('.')})") from None


def _sharing(run: Run, first: Run) -> Run:
    """The run with the first one's arrays of the examples where it has the same."""
    one, other = first.experiment, run.experiment
    names = {"dataset": "examples", "public": "public"}  # on the host and on the device
    same = [name for name in names if _same_examples(getattr(one, name), getattr(other, name))]
    arrays: dict[str, Any] = {names[name]: getattr(one.federation, names[name]) for name in same}
    share = lambda federation: federation._replace(**arrays)
    others = other.unseen and other.unseen._replace(federation=share(other.unseen.federation))
    shared = other._replace(federation=share(other.federation), unseen=others)
    return run._replace(experiment=shared._replace(**{name: getattr(one, name) for name in same}))


def _same_examples(a: Dataset | None, b: Dataset | None) -> bool:
    if a is None or b is None:
        return a is b
    return np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)


def _check_settings(configs: Sequence[Config]) -> None:
    """Raises ApartError for settings that are not those of one program, before anything is
    loaded."""
    first = configs[0]
    if stopping.given(first) != stopping.given(first.replace(stop_at=None, patience=0)):
        raise ApartError("each ends by itself with --stop_at or --patience")
    if first.client_memory == "host":
        raise ApartError("that needs the clients' rows in the devices' memory")
    # those that go on have their own where the command says none
    if len({(c.rounds, c.checkpoint_every, c.client_memory, c.devices) for c in configs}) > 1:
        raise ApartError("they were begun with other rounds, checkpoints, devices or memory")


def _check(found: Sequence[Run]) -> None:
    """Raises ApartError for runs that cannot be one program."""
    first = found[0].experiment
    if found[0].devices > 1 and first.config.devices != "auto":
        raise ApartError("that needs one device")
    digests = {build.lowered(run.experiment) for run in found}
    if len(digests) > 1:
        raise ApartError("their partitions make other programs of them")


def _compiled(found: list[Run], console: Console) -> _Batch:
    """The runs as one program, laid out as the first."""
    _, laid = session.laid_out(found[0]._replace(devices=1), console)
    laid = laid._replace(runs=len(found))
    found = [one._replace(experiment=one.experiment.in_form(laid.conv)) for one in found]
    experiments = [one.experiment for one in found]
    programs = [validation.scored(each, each.program(laid.width)) for each in experiments]
    program, federation = simulate.vectorized(programs, [each.federation for each in experiments])
    keys = jax.numpy.stack([each.key for each in experiments])
    functions = simulate.compiled(program, keys, federation, **train.intervals(experiments[0]))
    try:
        memory.check(functions.memory, "")
    except InputError as error:
        raise TooManyError(f"{str(error).rstrip(': .')}.") from None
    return _Batch(found, laid, program, keys, federation, functions)


def _train(
    batch: _Batch, clocks: Sequence[train.Clock], begun: Sequence[tuple[int, State | None]], console: Console
) -> tuple[list[bool], int]:
    """Runs the rounds and keeps everything, as `train.train` does of one.

    Returns:
      for each run whether it diverged, and the number of a signal in the last round, or 0.

    Raises:
      train.Stopped: after a signal, with checkpoints; OSError where something cannot be written.
    """
    first = batch.runs[0].experiment
    c, start = first.config, begun[0][0]
    reporter = report.Reporter(console, start, c.rounds, first.headline)
    ask = lambda: reporter.say("Stopping after this round; Ctrl-C again aborts at once.")
    options: dict[str, Any] = {"rounds": c.rounds, "start": start} | train.intervals(first)
    known = [(run.experiment, state) for run, (_, state) in zip(batch.runs, begun, strict=True) if state is not None]
    if known:
        options["state"] = vectorized.stack([each.program(batch.laid.width).place(state) for each, state in known])
    course = simulate.rounds_at_once(batch.program, batch.keys, batch.federation, batch.functions, **options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(reporter)
        interrupt = stack.enter_context(Interrupt(ask, f"Aborted; {GOES_ON} from the last checkpoints"))
        kept = [_Kept(i, batch, clock, reporter, stack) for i, clock in enumerate(clocks)]
        for found in reporter.watched(course):
            rows = [row for one, result in zip(kept, found, strict=True) if (row := one.add(result))]
            if not rows:
                break
            reporter.update(_mean(rows))
            result = next(result for result in found if isinstance(result, simulate.Result))
            if result.state is None:
                continue
            done = result.round + (result.metrics is not None)
            stop = interrupt.asked if done < c.rounds else None
            if stop or done % c.checkpoint_every == 0 or done == c.rounds:
                with said(console, f"Writing the checkpoints after round {done}, and the tables"):
                    whole = jax.device_get(result.state)  # where no further copy of all takes the device's memory
                    for one in kept:
                        one.keep("interrupted" if stop else "running", done, whole)
            if stop:
                raise train.Stopped(done, stop)
    for one in kept:
        one.end()
    return [one.diverged for one in kept], interrupt.asked or 0


class _Kept:
    """What is written of one of the runs, until it diverges."""

    def __init__(
        self, i: int, batch: _Batch, clock: train.Clock, reporter: report.Reporter, stack: contextlib.ExitStack
    ):
        self._i, self._width = i, batch.laid.width
        self._directory, self._experiment = batch.runs[i].directory, batch.runs[i].experiment
        self._files = train.Files(self._directory, self._experiment, clock)
        wanted = self._experiment.config.tensorboard
        written = events.written(self._directory.path, self._directory.rows, wanted, reporter.say)
        self._event = stack.enter_context(written)
        self.diverged = False

    def add(self, found: simulate.Result | simulate.DivergenceError) -> report.Row | None:
        """Writes and returns the row of a round; None: the run has diverged."""
        if self.diverged:
            return None
        if isinstance(found, simulate.DivergenceError):
            self.diverged = True
            session.stopped(found, self._directory)
            self._files.show("diverged")
            return None
        result, held_out = validation.apart(found)
        if result.metrics is None:
            result = result._replace(state=vectorized.one(result.state, self._i))
        unseen = train.unseen_scores(self._experiment, result, self._width, lambda: result.state)
        return self._event(self._directory.append(result, held_out | unseen))

    def keep(self, status: str, done: int, whole: State) -> None:
        """Writes the checkpoint, of the state of all runs on the host, and what else is due."""
        if not self.diverged:
            program = self._experiment.program(self._width)
            self._files.keep(status, done, program.unplace(vectorized.one(whole, self._i)))

    def end(self) -> None:
        """Writes the tables of a run that is done."""
        if not self.diverged:
            self._files.show("complete")


def _mean(rows: Sequence[report.Row]) -> report.Row:
    """The mean row of several runs, as the bar shows it."""
    names = [name for name in rows[0] if all(isinstance(row.get(name), int | float) for row in rows)]
    return {name: float(np.mean([row[name] for row in rows])) for name in names} | {"round": rows[0]["round"]}
