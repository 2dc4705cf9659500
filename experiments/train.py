"""Runs an experiment into its run directory, round by round."""

import functools
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import (
    account,
    build,
    clients,
    events,
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
    """What the rounds of an experiment run, compiled for a layout."""
    program = validation.scored(experiment, experiment.program(layout.width, layout.devices.count))
    return simulate.compiled(program, experiment.key, experiment.federation, **intervals(experiment))


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
    program = experiment.program(layout.width, layout.devices.count)
    options: dict[str, Any] = {"rounds": rounds} | intervals(experiment)
    progress = multihost.on_first(stopping.progress, c, experiment.headline, run.rows)  # which alone reads the rows
    ended, number = list[str](), 0
    if progress is not None:
        ended += filter(None, [progress.why()])
        options["until"] = lambda: bool(ended)
    options |= {"start": start, "state": None if state is None else program.place(state), "functions": functions}
    written = events.written(run.path, run.rows, c.tensorboard and multihost.first(), reporter.say)
    with reporter, Interrupt(ask, words) as interrupt, written as event:
        files = Files(run, experiment, clock)

        def add(*found: Any) -> report.Row:
            reporter.update(row := event(run.append(*found)))
            return row

        try:
            for found in reporter.watched(simulate.rounds(program, experiment.key, experiment.federation, **options)):
                result, held_out = validation.apart(found)
                apart = held_out | unseen_scores(experiment, result, layout.width)
                row = multihost.on_first(add, result, apart)
                if result.state is None:
                    continue
                if progress is not None:
                    progress = progress.after(row)
                    ended += filter(None, [progress.why()] if not ended else [])
                done = result.round + (result.metrics is not None)
                number = multihost.largest(interrupt.asked or 0)  # whoever was asked, all stop after the same round
                stop = number and done < rounds
                if stop or ended or done % c.checkpoint_every == 0 or done == rounds:
                    with phases.said(console, f"Writing the checkpoint after round {done}, and the tables"):
                        # on the host: no device holds everybody's rows
                        whole = program.unplace(multihost.fetch(result.state))
                        multihost.on_first(files.keep, "interrupted" if stop else "running", done, whole)
                if stop:
                    raise Stopped(done, number)
        except simulate.DivergenceError:
            multihost.on_first(files.show, "diverged")
            raise
    with phases.said(console, "Writing tables and curves"):
        multihost.on_first(files.show, "complete", ended[0] if ended else None)
    return number


def unseen_scores(experiment: build.Experiment, result: simulate.Result, width: int) -> dict[str, Any]:
    """The scores of the clients that do not train, after the last round."""
    if result.metrics is not None or experiment.unseen is None:
        return {}
    assert result.state is not None
    server = server_optimizer.plain(multihost.fetch(result.state.server))
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
