"""What is written of one run while it trains: rows, event files, the state, tables, the
summary."""

import functools
import time
from collections.abc import Callable
from typing import Any

from experiments import (
    account,
    build,
    clients,
    layouts,
    published,
    report,
    schema,
    stopping,
    targets,
    unseen,
    validation,
)
from experiments.files import Row, read_derived, write_json
from experiments.recorded import Layout
from experiments.runs import RunDirectory
from fedjax_pfl import server_optimizer
from fedjax_pfl.errors import DivergenceError
from fedjax_pfl.simulate import Result
from fedjax_pfl.types import State

SHARE = 0.05  # of the time, for what is written now and then


class Clock:
    """Seconds of this run's rounds, those of the sessions before a resume included;
    made before the first round.

    Args:
      compiling: gives the seconds in which was compiled so far, see
        `versions.compile_clock`.
      runs: that share this process's time, in equal parts.
    """

    def __init__(
        self, run: RunDirectory, compiling: Callable[[], float], runs: int = 1
    ):
        said = read_derived(run.path / "summary.json", schema.SECONDS)
        # after a crash the summary, whose seconds these are, may be of fewer rounds
        # than the checkpoint, or of more
        done, timed = (
            sum("loss" in row for row in run.rows),
            said.get("timed", said.get("rounds", 0)),
        )
        self.untimed = max(0, done - timed)
        self.before = {
            name: said.get("seconds", {}).get(name, 0.0)
            for name in ("compile", "train")
        }
        self.before["train"] *= min(1, done / max(1, timed))
        self._start, self._compiling, self._runs = time.perf_counter(), compiling, runs
        self._end: tuple[float, float] | None = None
        self._compiled = compiling()  # before the rounds

    def stop(self) -> None:
        """Counts no further: what is written of one run at the end is no time of the
        others."""
        self._end = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter() - self._start, self._compiling()

    def seconds(self) -> dict[str, float]:
        """Compiling apart from the rest of the rounds, evaluation and what is written
        meanwhile included."""
        spent, compiling = self._end or self._now()
        now = {"compile": compiling, "train": spent - (compiling - self._compiled)}
        return {
            name: round(self.before[name] + value / self._runs, 3)
            for name, value in now.items()
        }


class Recorder:
    """Writes what becomes of one run, until it diverges.

    Args:
      event: adds a row to its event files, see `events.written`.
      wrong: says a sentence on standard error.
    """

    def __init__(
        self,
        run: RunDirectory,
        experiment: build.Experiment,
        layout: Layout,
        clock: Clock,
        event: Callable[[Row], Row],
        wrong: Callable[[str], None],
    ):
        self._run, self._experiment, self._layout, self._clock = (
            run,
            experiment,
            layout,
            clock,
        )
        self._event, self._wrong = event, wrong
        self._progress = stopping.progress(
            experiment.config, experiment.headline, run.rows
        )
        self._due = 0.0  # when tables, curves and summary are written again
        self.diverged = False

    def add(
        self, found: Result | DivergenceError, state: Callable[[], State]
    ) -> Row | None:
        """Writes and returns the row of a round; None: the run has diverged.

        Args:
          found: the result, or why there is none any more.
          state: gives the state after it on the host, and is asked only where that is
            needed.
        """
        if self.diverged:
            return None
        if isinstance(found, DivergenceError):
            self.diverged = True
            self._wrong(f"{found} What was written is kept in {self._run.path}.")
            self.show("diverged")
            return None
        result, held_out = validation.apart(found)
        row = self._event(
            self._run.append(result, held_out | self._unseen(result, state))
        )
        self._progress = self._progress and self._progress.after(row)
        return row

    def why(self) -> str | None:
        """Why the run is to end before its last round, in words; None: it goes on."""
        return self._progress.why() if self._progress else None

    def keep(self, status: str, done: int, state: State) -> None:
        """Writes the state after `done` rounds, on the host as the program has it; and
        tables, curves and summary, as often as they take `SHARE` of the time. After the
        last round `end` does."""
        if self.diverged:
            return
        program = layouts.program(self._experiment, self._layout)
        self._run.save(done, program.unplace(state))
        begin, last = time.perf_counter(), done == self._experiment.config.rounds
        if status == "interrupted" or (begin >= self._due and not last):
            self.show(status)
            self._due = begin + (time.perf_counter() - begin) / SHARE

    def end(self) -> None:
        """Writes the tables of a run that is done."""
        if not self.diverged:
            self.show("complete")

    def show(self, status: str) -> None:
        """Writes tables, curves and summary anew."""
        self._run.tables()
        if status != "running":
            clients.write(self._experiment, self._run.path)
        self._summarise(status)

    def _unseen(self, result: Result, state: Callable[[], State]) -> dict[str, Any]:
        """The scores of the clients that do not train, after the last round."""
        experiment, laid = self._experiment, self._layout
        if result.metrics is not None or (apart := experiment.unseen) is None:
            return {}
        server = server_optimizer.plain(state().server)
        trained, others = (
            experiment.in_form(task, laid.conv)
            for task in (experiment.task, apart.task)
        )
        config = experiment.config.replace(rounds=result.round)
        return unseen.scores(
            config, trained, apart._replace(task=others), server, laid.width
        )

    def _summarise(self, status: str) -> None:
        """Writes summary.json."""
        rows, experiment, config = (
            self._run.rows,
            self._experiment,
            self._experiment.config,
        )
        flops = account.flops(experiment) if targets.given(config.targets) else None
        spent = functools.reduce(targets.Spent.after, rows, targets.Spent())
        done, totals = spent.rounds, spent.total(flops)
        content = {"status": status, "rounds": done, "seconds": self._clock.seconds()}
        content |= {"timed": done - self._clock.untimed} if self._clock.untimed else {}
        content |= {"unseen_rounds": config.unseen_rounds} if config.unseen else {}
        content |= report.summary(rows, experiment.headline)
        work = {name: totals[name] for name in ("client_steps", "client_flops")} | {
            "note": targets.NOTE
        }
        content |= {
            "work": work | ({"flops_per_example": flops._asdict()} if flops else {})
        }
        if status == "complete" and (why := self.why()) and done < config.rounds:
            content |= {"ended": {"why": why} | stopping.given(config)}
        if targets.given(config.targets):
            content |= {
                "targets": targets.summary(rows, config, flops, experiment.headline)
            }
        content |= {"examples": experiment.examples}
        content |= {
            "preset": published.comparison(
                config.replace(rounds=done), experiment.examples
            )
        }
        write_json(self._run.path / "summary.json", content)
