"""Runs an experiment into its run directory, round by round."""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from experiments import build, published, report, schema, targets, versions
from experiments.files import read_derived, write_json
from experiments.interrupt import Interrupt
from experiments.pace import Pace
from experiments.runs import RunDirectory
from fedjax_pfl import simulate
from fedjax_pfl.engine import multihost
from fedjax_pfl.types import State


class Stopped(Exception):
    """The user asked to stop; args: the signal's number."""


def train(
    experiment: build.Experiment, layout: dict, run: RunDirectory, start: int, state: State | None, console: Console
):
    """Runs the rounds from `start` and keeps everything; the rows, the state and the summary are safe when it raises.

    Raises:
      Stopped: after a signal, with a checkpoint; simulate.DivergenceError; OSError where something cannot be written.
    """
    rounds, c = experiment.config["rounds"], experiment.config
    words = f"Aborted; go on from the last checkpoint with {command(run.path)}"
    reporter = report.Reporter(console, start, rounds)
    ask = lambda: reporter.say("Stopping after this round; Ctrl-C again aborts at once.")
    program = experiment.program(layout["width"], layout["devices"]["count"])
    options = {"rounds": rounds, "eval_every": c["eval_every"], "state_every": c["checkpoint_every"]}
    options |= {"start": start, "state": None if state is None else program.place(state)}
    with versions.compile_clock() as compiling, reporter, Interrupt(ask, words) as interrupt:
        files = _Files(run, experiment, multihost.on_first(Clock, run.path), compiling)
        add = lambda result: reporter.update(run.append(result))
        try:
            for result in simulate.rounds(program, experiment.key, experiment.federation, **options):
                multihost.on_first(add, result)
                if result.state is None:
                    continue
                done = result.round + (result.metrics is not None)
                number = multihost.largest(interrupt.asked or 0)  # whoever was asked, all stop after the same round
                stop = number and done < rounds
                if stop or done % c["checkpoint_every"] == 0 or done == rounds:
                    whole = program.by_id(
                        multihost.fetch(result.state)
                    )  # on the host: no device holds everybody's rows
                    multihost.on_first(files.keep, "interrupted" if stop else "running", done, whole)
                if stop:
                    raise Stopped(number)
        except simulate.DivergenceError:
            multihost.on_first(files.show, "diverged")
            raise
    multihost.on_first(files.show, "complete")


class _Files:
    """What is written of a run beside its rows: tables and summary (`show`), and the state before them (`keep`)."""

    def __init__(self, run: RunDirectory, experiment: build.Experiment, clock: "Clock", compiling: Callable):
        self._run, self._experiment, self._clock, self._compiling = run, experiment, clock, compiling
        self._now_and_then = Pace(self.show)

    def show(self, status: str) -> None:
        self._run.tables()
        _summarise(self._run, self._experiment, status, self._clock, self._compiling())

    def keep(self, status: str, done: int, state: State) -> None:
        self._run.save(done, state)
        self.show(status) if status == "interrupted" else self._now_and_then(status)


class Clock:
    """Seconds of this run, those of the sessions before a resume included."""

    def __init__(self, path: Path):
        file = path / "summary.json"
        before = read_derived(file, schema.SECONDS).get("seconds", {})
        self.before = {name: before.get(name, 0.0) for name in ("compile", "train")}
        self._start = time.perf_counter()

    def seconds(self, compiling: float) -> dict[str, float]:
        """Compiling apart from the rest of the rounds, evaluation and writing included."""
        spent = time.perf_counter() - self._start
        now = {"compile": compiling, "train": spent - compiling}
        return {name: round(self.before[name] + value, 3) for name, value in now.items()}


def _summarise(run: RunDirectory, experiment: build.Experiment, status: str, clock: Clock, compiling: float) -> None:
    """Writes summary.json."""
    done, flops = sum("loss" in row for row in run.rows), build.flops(experiment)
    content = {"status": status, "rounds": done, "seconds": clock.seconds(compiling)} | report.summary(run.rows)
    totals = targets.spent(run.rows, flops)
    content |= {"work": {name: totals[name] for name in ("client_steps", "client_flops")} | {"note": targets.NOTE}}
    content |= {"initial_broadcast": build.initial_broadcast(experiment)}
    content |= {"targets": targets.summary(run.rows, experiment.config, flops)}
    content |= {"examples": experiment.examples}
    content |= {"preset": published.comparison(experiment.config | {"rounds": done}, experiment.examples)}
    write_json(run.path / "summary.json", content)


def command(path: Path) -> str:
    """The command that continues a run."""
    return f"{Path(sys.executable).name} -m experiments.main --resume --workdir={shlex.quote(str(path))}"
