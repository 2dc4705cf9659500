"""Runs an experiment into its run directory, round by round."""

import functools
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import (
    account,
    build,
    clients,
    events,
    layouts,
    phases,
    published,
    report,
    schema,
    stopping,
    targets,
    unseen,
    validation,
)
from experiments.files import read_derived, write_json
from experiments.interrupt import Interrupt
from experiments.pace import Pace
from experiments.recorded import Layout
from experiments.runs import RunDirectory
from fedjax_pfl import local, server_optimizer, simulate
from fedjax_pfl.engine import multihost
from fedjax_pfl.types import State


class Stopped(Exception):
    """The user asked to stop; args: the rounds that are done, and the signal's number."""


def compiled(experiment: build.Experiment, layout: Layout) -> simulate.Compiled:
    """What the rounds of an experiment run, compiled for a layout; InputError if it takes more
    memory than there is."""
    program = validation.scored(experiment, experiment.program(layout.width, layout.devices.count))
    functions = simulate.compiled(program, experiment.key, experiment.federation, **intervals(experiment))
    layouts.check_memory(functions.memory, experiment, layout)
    return functions


def intervals(experiment: build.Experiment) -> dict[str, int]:
    """After how many rounds each the clients are scored, and the state is wanted."""
    return {"eval_every": experiment.config.eval_every, "state_every": experiment.config.checkpoint_every}


def directory(path: Path, experiment: build.Experiment) -> RunDirectory:
    """The run directory of an experiment."""
    partial = experiment.task.participation != (1.0, 1.0)
    planned = local.planned(experiment.task, experiment.task.sizes)
    own, sizes = experiment.partition.test_sizes, validation.sizes(experiment)
    return RunDirectory(path, own, partial, planned, experiment.headline, experiment.network_names, sizes)


def train(
    experiment: build.Experiment,
    layout: Layout,
    run: RunDirectory,
    start: int,
    state: State | None,
    console: Console,
    functions: simulate.Compiled,
    clock: "Clock",
) -> int:
    """Runs the rounds from `start` and keeps everything; the rows, the state and the summary are
    safe when it raises.

    Returns:
      the number of a signal that came in the last round, or 0.

    Raises:
      Stopped: after a signal, with a checkpoint; simulate.DivergenceError; OSError where something
        cannot be written.
    """
    rounds, c = experiment.config.rounds, experiment.config
    words = f"Aborted; go on from the last checkpoint with {command(run.path)}"
    reporter = report.Reporter(console, start, rounds, experiment.headline)
    ask = lambda: reporter.say("Stopping after this round; Ctrl-C again aborts at once.")
    progress = stopping.progress(c, experiment.headline, run.rows)
    ended: list[str] = multihost.everywhere(list, [why for why in [progress and progress.why()] if why])
    results = multihost.everywhere(course, experiment, layout, functions, start, state, ended)
    written = events.written(run.path, run.rows, c.tensorboard, reporter.say)
    with reporter, Interrupt(ask, words) as interrupt, written as event:
        files = Files(run, experiment, clock)

        try:
            for found in reporter.watched(iter(lambda: multihost.everywhere(next, results, None), None)):
                whole = functools.cache(lambda at=found: multihost.everywhere(multihost.fetch, at)[0].state)
                (result, held_out), number = validation.apart(found[0]), interrupt.asked or found[1]
                row = event(run.append(result, held_out | unseen_scores(experiment, result, layout.width, whole)))
                reporter.update(row)
                if result.state is None:
                    continue
                if progress is not None:
                    progress = progress.after(row)
                    if not ended and (why := progress.why()):
                        multihost.everywhere(ended.append, why)
                done = result.round + (result.metrics is not None)
                stop = number and done < rounds
                if stop or ended or done % c.checkpoint_every == 0 or done == rounds:
                    with phases.said(console, f"Writing the checkpoint after round {done}, and the tables"):
                        program = experiment.program(layout.width, layout.devices.count)
                        # on the host: no device holds everybody's rows
                        files.keep("interrupted" if stop else "running", done, program.unplace(whole()))
                if stop:
                    raise Stopped(done, number)
        except simulate.DivergenceError:
            files.show("diverged")
            raise
    with phases.said(console, "Writing tables and curves"):
        files.show("complete", ended[0] if ended else None)
    return number


def course(
    experiment: build.Experiment,
    layout: Layout,
    functions: simulate.Compiled,
    start: int,
    state: State | None,
    ended: list[str],
) -> Iterator[tuple[simulate.Result, int]]:
    """The rounds from `start`, as every process goes through them, until `ended` has a reason: each
    result, and the number of a signal to any of the processes, or 0."""
    program, c = experiment.program(layout.width, layout.devices.count), experiment.config
    options: dict[str, Any] = {"rounds": c.rounds, "start": start, "functions": functions} | intervals(experiment)
    options["state"] = None if state is None else program.place(state)
    if stopping.progress(c, experiment.headline, ()) is not None:
        options["until"] = lambda: bool(ended)
    for result in simulate.rounds(program, experiment.key, experiment.federation, **options):
        # whoever was asked, all stop after the same round
        yield result, 0 if result.state is None else multihost.largest(Interrupt.asked or 0)


def unseen_scores(
    experiment: build.Experiment, result: simulate.Result, width: int, state: Callable[[], Any]
) -> dict[str, Any]:
    """The scores of the clients that do not train, after the last round, whose state is asked
    for."""
    if result.metrics is not None or experiment.unseen is None:
        return {}
    server = server_optimizer.plain(multihost.fetch(state().server))
    return unseen.scores(
        experiment.config.replace(rounds=result.round), experiment.task, experiment.unseen, server, width
    )


class Files:
    """What is written of a run beside its rows: tables and summary (`show`), and the state before
    them (`keep`)."""

    def __init__(self, run: RunDirectory, experiment: build.Experiment, clock: "Clock"):
        self._run, self._experiment, self._clock = run, experiment, clock
        self._now_and_then = Pace(self.show)

    def show(self, status: str, ended: str | None = None) -> None:
        self._run.tables()
        if status != "running":
            clients.write(self._experiment, self._run.path)
        _summarise(self._run, self._experiment, status, self._clock.seconds(), ended)

    def keep(self, status: str, done: int, state: State) -> None:
        self._run.save(done, state)
        self.show(status) if status == "interrupted" else self._now_and_then(status)


class Clock:
    """Seconds of this run, those of the sessions before a resume included.

    Args:
      compiling: gives the seconds in which was compiled so far, see `versions.compile_clock`.
      runs: that share this process's time, in equal parts.
    """

    def __init__(self, path: Path, compiling: Callable[[], float], runs: int = 1):
        file = path / "summary.json"
        before = read_derived(file, schema.SECONDS).get("seconds", {})
        self.before = {name: before.get(name, 0.0) for name in ("compile", "train")}
        self._start, self._compiling, self._runs = time.perf_counter(), compiling, runs

    def seconds(self) -> dict[str, float]:
        """Compiling apart from the rest of the rounds, evaluation and writing included."""
        spent, compiling = time.perf_counter() - self._start, self._compiling()
        now = {"compile": compiling, "train": spent - compiling}
        return {name: round(self.before[name] + value / self._runs, 3) for name, value in now.items()}


def _summarise(run: RunDirectory, experiment: build.Experiment, status: str, seconds: dict, ended: str | None) -> None:
    """Writes summary.json."""
    flops = account.flops(experiment) if experiment.config.targets else None
    spent = functools.reduce(targets.Spent.after, run.rows, targets.Spent())
    done, totals = spent.rounds, spent.total(flops)
    content = {"status": status, "rounds": done, "seconds": seconds} | report.summary(run.rows, experiment.headline)
    content |= {"work": {name: totals[name] for name in ("client_steps", "client_flops")} | {"note": targets.NOTE}}
    content |= {"initial_broadcast": account.initial_broadcast(experiment)}
    if ended and done < experiment.config.rounds:
        content |= {"ended": {"why": ended} | stopping.given(experiment.config)}
    if experiment.config.targets:
        content |= {"targets": targets.summary(run.rows, experiment.config, flops, experiment.headline)}
    content |= {"examples": experiment.examples}
    content |= {"preset": published.comparison(experiment.config.replace(rounds=done), experiment.examples)}
    write_json(run.path / "summary.json", content)


def command(path: Path) -> str:
    """The command that continues a run."""
    return f"{Path(sys.executable).name} -m experiments.main --resume --workdir={shlex.quote(str(path))}"
