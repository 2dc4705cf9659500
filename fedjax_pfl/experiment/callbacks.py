"""Callbacks of `train`.

A callback is called with every `Result`, whose state is valid until the next round; it
stops the training by returning True. It may have `start(experiment, start)`, called
before the first round, and `close()`. One of your own:

    class StopAt:
        def __init__(self, accuracy):
            self.accuracy = accuracy

        def __call__(self, result):
            return result.pre is not None and result.pre["acc"].mean() >= self.accuracy
"""

import math
import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
import pandas as pd
import rich.console
import rich.progress
from flax.training import early_stopping

from fedjax_pfl import evaluation
from fedjax_pfl.engine import distributed
from fedjax_pfl.engine.parts import BENIGN
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import (
    answers,
    figures,
    metrics,
    results,
    text,
    warm_start,
)
from fedjax_pfl.experiment.build import unseen_scorer
from fedjax_pfl.experiment.checkpoints import BEST
from fedjax_pfl.experiment.run_directory import RunDirectory
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.simulate import Result
from fedjax_pfl.types import RunState


class Stopped(Exception):
    """The training was interrupted after a checkpoint; args: the signal's number."""


class Callback:
    """A callback that knows the experiment, and the run directory if there is one."""

    experiment: Experiment

    def __init__(self, directory: RunDirectory | None = None):
        self.directory: Any = directory

    def start(self, experiment: Experiment, start: int) -> None:
        """Prepares for the rounds from `start` on."""
        self.experiment = experiment


class EarlyStopping(Callback):
    """Stops after `patience` evaluations without a better validation score, and keeps
    the checkpoint of the best.

    Attributes:
      state: the best one so far; None before the first evaluation.
    """

    def __init__(self, patience: int, directory: RunDirectory | None = None):
        super().__init__(directory)
        self._patience = patience
        self._stop = early_stopping.EarlyStopping(patience=patience - 1)
        self.state: RunState | None = None

    def start(self, experiment: Experiment, start: int) -> None:
        score, better = experiment.headline
        if experiment.task.malicious is not None and not score.startswith(BENIGN):
            score = BENIGN + score
        self.experiment, self._score = experiment, score
        self._sign = 1 if better == "min" else -1
        if not (experiment.partition.val_sizes.any() and experiment.config.eval_every):
            raise InputError("--patience needs --val_fraction and --eval_every.")
        for row in self.directory.rows("metrics.jsonl") if self.directory else ():
            if f"val/{score}" in row and "loss" in row:
                self._update(row[f"val/{score}"])
        if start:
            self._before = self.directory.restore(experiment)[1]
            self.state = self.directory.restore(experiment, BEST)[1]
        else:
            self._before = warm_start.first_state(experiment)

    def _update(self, value: float | None) -> bool:
        """Returns whether a value is the best so far."""
        cost = math.inf if value is None or value != value else self._sign * value
        self._stop = self._stop.update(cost)  # type: ignore[no-untyped-call]
        return self._stop.has_improved

    def __call__(self, result: Result) -> bool:
        e, found = self.experiment, metrics.points(result).get("val", {})
        if self._score in found:
            sizes = e.partition.val_sizes
            value = evaluation.statistics(found[self._score], sizes)["macro"]
            if self._update(value):
                self._keep(result.round, None if math.isnan(value) else value)
                if self._stop.should_stop:  # decided by the one before
                    self._stopped(" before the last")
        if result.metrics is None:
            return False
        following, last = result.round + 1, e.config.rounds - 1
        evaluated = following % e.config.eval_every == 0 or following >= last
        if evaluated or self._stop.should_stop:
            self._before = e.fetch(result.state)
        if self._stop.should_stop:
            self._stopped()
        return self._stop.should_stop

    def _stopped(self, when: str = "") -> None:
        """Records why the run ends."""
        if self.directory:
            n = text.plural(self._patience, "evaluation")
            why = f"No better val/{self._score} in {n}{when}"
            self.directory.summarize(stopped=why)

    def _keep(self, rounds: int, value: float | None) -> None:
        """Keeps the state before the round that scored best."""
        self.state = self._before
        if self.directory:
            self.directory.save(rounds, self.state, BEST)
            best = {"watch": f"val/{self._score}", "round": rounds, "value": value}
            self.directory.summarize(best=best)


class UnseenClients(Callback):
    """Personalises and scores unseen clients after the last round, by the best server
    of early stopping if there is one.

    Attributes:
      scores: {"unseen", "unseen_post": {score: [U]}}; empty before the last round.
    """

    def __init__(self, early: EarlyStopping | None = None) -> None:
        self._early = early
        self.scores: dict[str, dict[str, np.ndarray]] = {}

    def __call__(self, result: Result) -> None:
        e = self.experiment
        if e.unseen is not None and result.metrics is None:
            score = jax.jit(unseen_scorer(e, e.unseen))
            best = self._early.state if self._early else None
            server = (e.fetch(result.state) if best is None else best).server
            given = (e.key, e.unseen.federation, server, np.int32(result.round))
            self.scores = jax.device_get(score(*given))


class Answers(Callback):
    """Adds the scores of generated answers to `pre` of the last result: put it before
    MetricsWriter."""

    def __call__(self, result: Result) -> None:
        e = self.experiment
        if result.metrics is None and result.pre is not None:
            result.pre.update(answers.scores(e, e.fetch(result.state), result.round))


class MetricsWriter(Callback):
    """Writes metrics.jsonl and scores.jsonl."""

    def __init__(self, directory: RunDirectory, unseen: UnseenClients | None = None):
        super().__init__(directory)
        self._unseen = unseen or UnseenClients()

    def start(self, experiment: Experiment, start: int) -> None:
        self.experiment = experiment
        self._latest: dict[str, np.ndarray] = {}
        for row in self.directory.rows("scores.jsonl"):
            self._remember(row)

    def __call__(self, result: Result) -> None:
        more = self._unseen.scores
        scores = metrics.by_client(result, more)
        self._remember(scores)
        some = self.experiment.task.participation != (1.0, 1.0)
        latest = self._latest if some else None
        self.directory.append(
            metrics.row(result, self.experiment, latest, more), scores
        )

    def _remember(self, scores: metrics.Row) -> None:
        for name, values in scores.get("post", {}).items():
            unknown = np.full(self.experiment.task.num_clients, np.nan, np.float32)
            known = self._latest.setdefault(name, unknown)
            known[scores["ids"]] = np.array(values, np.float32)  # NaN for None


class Interrupt:
    """Notes SIGINT and SIGTERM; a second signal ends the process at once.

    A thread reads the signals, as Python runs no handler during a compiled round.

    Attributes:
      number: of the signal that came, or 0.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    number = 0

    def start(self, experiment: Experiment, start: int) -> None:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._handlers = [signal.signal(x, lambda *_: None) for x in self.SIGNALS]
        self._file = signal.set_wakeup_fd(write)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.number = os.read(self._read, 1)[0]
        print("Stopping after this round; again: at once.", file=sys.stderr)
        os._exit(128 + os.read(self._read, 1)[0])

    def __call__(self, result: Result) -> None:
        """Does nothing: `Checkpointer` stops."""

    def close(self) -> None:
        signal.set_wakeup_fd(self._file)
        for number, handler in zip(self.SIGNALS, self._handlers, strict=True):
            signal.signal(number, handler)


class Checkpointer(Callback):
    """Writes checkpoints and summary.json: put it last.

    Raises:
      Stopped: after the checkpoint of a round in which a signal came.
    """

    def __init__(
        self,
        directory: RunDirectory,
        every: int = 10,
        interrupt: Interrupt | None = None,
    ):
        super().__init__(directory)
        self._every, self._interrupt = every, interrupt

    def start(self, experiment: Experiment, start: int) -> None:
        self.experiment, self._begin = experiment, time.perf_counter()
        self._before = self.directory.summary.get("seconds", {}).get("train", 0.0)

    def __call__(self, result: Result) -> None:
        if result.state is None:
            return
        last, signal = result.metrics is None, 0
        if self._interrupt and not last:
            signal = distributed.largest(self._interrupt.number)
        done = result.round + (not last)
        if not (last or signal or done % self._every == 0):
            return
        self.directory.save(done, self.experiment.fetch(result.state))
        e = self.experiment
        spent = (time.perf_counter() - self._begin) / e.batch
        seconds = self.directory.summary.get("seconds", {})
        self.directory.summarize(
            status="complete" if last else "interrupted" if signal else "running",
            rounds=done,
            seconds=seconds | {"train": round(self._before + spent, 3)},
            unseen_rounds=e.config.unseen_rounds,
            patience=e.config.patience,
            examples=e.examples,
        )
        if signal:
            raise Stopped(signal)


class ProgressBar(Callback):
    """Shows rounds, loss and headline as a bar, or as 20 lines without a terminal."""

    def start(self, experiment: Experiment, start: int) -> None:
        self.experiment, self._score = experiment, ""
        quiet = jax.process_index() > 0
        self._console = rich.console.Console(highlight=False, width=100, quiet=quiet)
        self._bar = rich.progress.Progress(
            *("round", rich.progress.MofNCompleteColumn(), "{task.description}"),
            rich.progress.TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=experiment.config.rounds)
        self._bar.start()

    def __call__(self, result: Result) -> None:
        if result.metrics is None:
            return
        done, rounds = result.round + 1, self.experiment.config.rounds
        if result.pre is not None:
            name = self.experiment.headline[0]
            name = BENIGN + name if BENIGN + name in result.pre else name
            if name not in result.pre:  # of the last result alone
                name = next(iter(result.pre))
            mean = metrics.quantity(name, float(np.nanmean(result.pre[name])))
            self._score = f"  {name} {mean} before round {done}"
        loss = np.mean(result.metrics.loss[result.metrics.active])
        shown = f"loss {loss:.4g}{self._score}"
        self._bar.update(self._task, completed=done, description=shown)
        due = done in (1, rounds) or done % max(1, rounds // 20) == 0
        if due and not self._console.is_terminal:
            self._console.print(f"round {done}/{rounds}  {shown}")

    def close(self) -> None:
        self._bar.stop()


class TensorBoard(Callback):
    """Writes the rows of metrics.jsonl as events: put it after MetricsWriter."""

    def start(self, experiment: Experiment, start: int) -> None:
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(
            str(self.directory.path),
            purge_step=start,
            write_to_disk=jax.process_index() == 0,
        )
        self.close = self._writer.close

    def __call__(self, result: Result) -> None:
        for name, value in self.directory.row.items():
            if value is not None and "/" in name:
                self._writer.add_scalar(name, value, result.round)


class WandB(Callback):
    """Logs the rows to Weights & Biases: put it after MetricsWriter."""

    def start(self, experiment: Experiment, start: int) -> None:
        import wandb

        self._run = wandb.init(
            project="fedjax_pfl",
            id=self.directory.path.name,
            config=experiment.config.flat(),
            resume="allow",
            mode="disabled" if jax.process_index() else None,
        )

    def __call__(self, result: Result) -> None:
        self._run.log(self.directory.row, step=result.round)

    def close(self) -> None:
        self._run.finish()


class ClientTable(Callback):
    """Writes clients.csv, a row per client with its last scores, and metrics.csv."""

    def __call__(self, result: Result) -> None:
        if result.metrics is not None or jax.process_index():
            return
        run = results.load(self.directory.path)
        run.metrics.to_csv(run.path / "metrics.csv", index=False)
        e, parts = self.experiment, []
        unseen = [f"unseen {name}" for name in (e.unseen.names if e.unseen else ())]
        rows = run.scores.assign(score=run.scores["point"] + "/" + run.scores["score"])
        away = rows["point"].str.startswith("unseen")
        if run.best is not None:
            rows, away = (x[away | (rows["round"] <= run.best)] for x in (rows, away))
        for part, names in ((rows[~away], e.names), (rows[away], unseen)):
            last = part.groupby(["client", "score"], sort=False)["value"].last()
            table = last.unstack()
            parts.append(table.set_axis([names[i] for i in table.index]))
        sizes = pd.Series(e.partition.train_sizes, e.names, name="train")
        table = pd.concat(parts).join(sizes)
        table.to_csv(run.path / "clients.csv", index_label="client")


class Curves(Callback):
    """Draws curves.png and partition.png after the last round."""

    def __call__(self, result: Result) -> None:
        if result.metrics is None and jax.process_index() == 0:
            run = results.load(self.directory.path)
            e = self.experiment
            figures.of_run(run).savefig(run.path / "curves.png")
            drawn = figures.partition(e.task.class_counts, "", e.names, e.classes or ())
            drawn.savefig(run.path / "partition.png")
