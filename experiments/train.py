"""The rounds of one run, or of several that are one compiled program, each into its own
run directory."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from experiments import build, events, layouts, phases, report, stopping, validation
from experiments.files import Row
from experiments.interrupt import Interrupt
from experiments.recorded import Layout
from experiments.recorder import Clock, Recorder
from experiments.runs import RunDirectory
from fedjax_pfl import simulate, trees
from fedjax_pfl.engine import multihost
from fedjax_pfl.engine.batch import stack
from fedjax_pfl.errors import DivergenceError
from fedjax_pfl.types import Array, Federation, State


class Stopped(Exception):
    """The user asked to stop; args: the rounds that are done, and the signal's
    number."""


class Batch(NamedTuple):
    """R runs as one compiled program; mostly R = 1, then no array has an axis for
    them."""

    experiments: Sequence[build.Experiment]
    layout: Layout
    program: simulate.Program
    key: Array  # [R]
    federation: Federation
    functions: simulate.Compiled


class Step(NamedTuple):
    """What came of one round."""

    results: list[simulate.Result | DivergenceError]  # of each run
    state: State | None  # of all on the devices; None: not to be had after this round
    signal: int  # to any of the processes, or 0


def compiled(experiments: Sequence[build.Experiment], layout: Layout) -> Batch:
    """What the rounds of some experiments run, compiled for a layout; NoRoomError if it
    takes more memory than there is."""
    programs = [
        validation.scored(each, layouts.program(each, layout)) for each in experiments
    ]
    program, key, federation = (
        programs[0],
        experiments[0].key,
        experiments[0].federation,
    )
    if len(experiments) > 1:
        program, federation = simulate.vectorized(
            programs, [e.federation for e in experiments], checked=False
        )
        key = jax.numpy.stack([each.key for each in experiments])
    functions = simulate.compiled(
        program, key, federation, **_intervals(experiments[0])
    )
    layouts.check_memory(functions.memory, experiments[0], layout)
    return Batch(experiments, layout, program, key, federation, functions)


def _intervals(experiment: build.Experiment) -> dict[str, int]:
    """After how many rounds each the clients are scored, and the state is wanted."""
    return {
        "eval_every": experiment.config.eval_every,
        "state_every": experiment.config.checkpoint_every,
    }


def train(
    batch: Batch,
    directories: Sequence[RunDirectory],
    clocks: Sequence[Clock],
    start: int,
    states: Sequence[State],
    console: Console,
    goes_on: str,
) -> tuple[list[bool], int]:
    """Runs the rounds from `start` and keeps everything; rows, states and summaries are
    safe when it raises.

    Args:
      states: of each run after `start` rounds; empty: from the beginning.
      goes_on: how the user continues, as the end of a sentence.

    Returns:
      for each run whether it diverged, and the number of a signal that came in the last
      round, or 0.

    Raises:
      Stopped: after a signal, with checkpoints; OSError where something cannot be
        written.
    """
    first = batch.experiments[0]
    c, number = first.config, 0
    reporter = report.Reporter(console, start, c.rounds, first.headline)
    ask = lambda: reporter.say(
        "Stopping after this round; Ctrl-C again aborts at once."
    )
    last_words = f"Aborted, without the rounds since the last checkpoint; {goes_on}"
    with (
        reporter,
        Interrupt(ask, last_words) as interrupt,
        contextlib.ExitStack() as stack,
    ):
        recorders = list[Recorder]()
        for run, experiment, clock in zip(
            directories, batch.experiments, clocks, strict=True
        ):
            event = stack.enter_context(
                events.written(
                    run.path, run.rows, experiment.config.tensorboard, reporter.say
                )
            )
            recorders.append(
                Recorder(run, experiment, batch.layout, clock, event, reporter.wrong)
            )
        ended: list[str] = multihost.run_on_all(list, _reasons(recorders))
        steps = multihost.run_on_all(_course, batch, start, states, ended)
        for step in reporter.watched(
            iter(lambda: multihost.run_on_all(next, steps, None), None)
        ):
            whole = functools.cache(
                functools.partial(multihost.run_on_all, _fetched, step)
            )
            state_of = functools.partial(_state, batch, whole)
            added = [
                one.add(step.results[i], functools.partial(state_of, i))
                for i, one in enumerate(recorders)
            ]
            if not (rows := [row for row in added if row is not None]):
                break
            reporter.update(rows[0] if len(rows) == 1 else _mean(rows))
            if step.state is None:
                continue
            if not ended and (reasons := _reasons(recorders)):
                multihost.run_on_all(ended.extend, reasons)
            done, number = (
                rows[0]["round"] + ("loss" in rows[0]),
                interrupt.asked or step.signal,
            )
            stop = number and done < c.rounds
            if stop or ended or done % c.checkpoint_every == 0 or done == c.rounds:
                with phases.said(
                    console,
                    f"Writing the checkpoint after round {done}, and the tables",
                ):
                    for i, one in enumerate(recorders):
                        one.keep(
                            "interrupted" if stop else "running", done, state_of(i)
                        )
            if stop:
                raise Stopped(done, number)
    with phases.said(console, "Writing tables and curves"):
        for clock in clocks:
            clock.stop()
        for one in recorders:
            one.end()
    return [one.diverged for one in recorders], interrupt.asked or number


def _course(
    batch: Batch, start: int, states: Sequence[State], ended: list[str]
) -> Iterator[Step]:
    """The rounds from `start`, as every process goes through them, until `ended` has a
    reason."""
    layout, first = batch.layout, batch.experiments[0]
    options: dict[str, Any] = {
        "rounds": first.config.rounds,
        "start": start,
    } | _intervals(first)
    if states:
        programs = [layouts.program(each, layout) for each in batch.experiments]
        placed = [
            program.place(state)
            for program, state in zip(programs, states, strict=True)
        ]
        options["state"] = stack(placed) if len(placed) > 1 else placed[0]
    if stopping.progress(first.config, first.headline, ()) is not None:
        options["until"] = lambda: bool(ended)
    for found in _rounds(batch, options):
        known = [result for result in found if isinstance(result, simulate.Result)]
        state = known[0].state if known else None
        # whoever was asked, all stop after the same round
        yield Step(
            found,
            state,
            0 if state is None else multihost.largest(Interrupt.asked or 0),
        )


def _rounds(
    batch: Batch, options: dict[str, Any]
) -> Iterator[list[simulate.Result | DivergenceError]]:
    """`simulate.rounds_at_once` for any number of runs."""
    arguments = batch.program, batch.key, batch.federation
    if len(batch.experiments) > 1:
        yield from simulate.rounds_at_once(*arguments, batch.functions, **options)
        return
    try:
        for result in simulate.rounds(*arguments, functions=batch.functions, **options):
            yield [result]
    except DivergenceError as error:
        yield [error]


def _fetched(step: Step) -> State:
    """The state of all runs on the host: a device may have no room for another copy."""
    return multihost.fetch(step.state)


def _state(batch: Batch, whole: Callable[[], State], i: int) -> State:
    """The state of one of the runs."""
    return trees.gather(whole(), i) if len(batch.experiments) > 1 else whole()


def _reasons(recorders: Sequence[Recorder]) -> list[str]:
    """Why the runs are to end before their last round."""
    return [why for one in recorders if (why := one.why())]


def _mean(rows: Sequence[Row]) -> Row:
    """The mean row of several runs, as the bar shows it; None for what not all have."""

    def mean(values: list[Any]) -> float | None:
        return (
            float(np.mean(values))
            if all(isinstance(x, int | float) for x in values)
            else None
        )

    return {name: mean([row.get(name) for row in rows]) for name in rows[0]} | {
        "round": rows[0]["round"]
    }
