"""The run directory: what a run leaves behind, how it is continued, and how it is read
again.

config.json     the effective settings             versions.json   software, device and git revision
layout.json     width, convolution form, devices   partition.*     who owns what: .npz, hashes (.json), picture (.png)
metrics.jsonl   one row a round, and .csv          scores.jsonl    one row a round with every client's scores
curves.png, clients.csv (each client's last scores), summary.json (results, traffic,
times)
checkpoints/    the last two, of orbax
matrices/NAME/  what a method reports of pairs of clients, a file per evaluated round
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import build, figures, lock, matrices, records, schema, validation
from experiments.config import Config
from experiments.entry import directory
from experiments.files import (
    Row,
    Rows,
    damaged,
    read_derived,
    read_json,
    read_rows,
    write_csv,
    write_json,
)
from experiments.recorded import (
    Layout,
    complete,
    is_run,
    other_files,
    own_files,
    read_config,
    read_layout,
    signed,
)
from fedjax_pfl import local_training, simulate
from fedjax_pfl.data.partition import digest, save
from fedjax_pfl.engine import checkpoint, results
from fedjax_pfl.errors import InputError, check
from fedjax_pfl.types import State

# written before the first round, in this order
_JSON = ("partition", "layout", "versions", "config")
_WHOLE = ("partition.npz", "partition.png", *(f"{name}.json" for name in _JSON))
_STARTED = {f"{name}{suffix}" for name in _WHOLE for suffix in ("", ".part")} | {
    lock.NAME
}


def check_free(path: Path) -> None:
    """Raises InputError if a new run cannot go there; what a start that was killed left
    may be overwritten."""
    try:
        # Path's own fail on names that are too long
        if os.path.exists(path) and not os.path.isdir(path):
            raise InputError(
                f"The run directory {path} is a file: choose another --workdir."
            )
        found = set(os.listdir(path)) if os.path.isdir(path) else set()
    except OSError as error:
        raise unusable(path, error) from error
    if is_run(path):
        raise InputError(
            f"The run directory {path} is not empty: continue it with --resume, or "
            "choose another --workdir."
        )
    if found - _STARTED:
        raise InputError(
            f"The directory {path} is not empty and holds no run: choose another "
            "--workdir."
        )


def make(path: Path) -> None:
    """Makes a run directory; InputError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise unusable(path, error) from error


def unusable(path: Path, error: OSError) -> InputError:
    """What is said of a run directory that cannot be read or written."""
    return InputError(
        f"The run directory {path} cannot be used ({error.strerror or error}): choose "
        "another --workdir."
    )


class RunDirectory:
    """A run directory that is being written.

    Attributes:
      rows: the rows of the metrics so far, read from the disk whenever they are asked
        for.
      latest: {score: [N]}, every client's last score after local training; NaN for
        clients not seen yet.
    """

    def __init__(self, path: Path, experiment: build.Experiment):
        task, names = experiment.task, experiment.network_names
        self.path = path
        self.rows = Rows(path / "metrics.jsonl")
        self.latest: dict[str, np.ndarray] = {}
        self._test_sizes, self._sizes = (
            experiment.partition.test_sizes,
            validation.sizes(experiment),
        )
        self._partial, self._planned = (
            task.participation != (1.0, 1.0),
            local_training.planned(task, task.sizes),
        )
        self._headline = experiment.headline
        # where networks differ, the headline is also recorded for each
        self._architectures = np.full(len(names), "") if len(set(names)) == 1 else names

    def start(self, experiment: build.Experiment, layout: Row, versions: Row) -> None:
        """Writes what is known before the first round, config.json last: where it is,
        the others are."""
        make(self.path)
        self._partition(experiment)
        hashes: Row = digests(experiment) | {"moved": experiment.partition.moved}
        hashes |= {"marks": list(experiment.marks)} if experiment.marks else {}
        hashes |= (
            {"unseen": experiment.unseen.ids.tolist()} if experiment.unseen else {}
        )
        for name, content in zip(
            _JSON, (hashes, layout, versions, signed(experiment.config)), strict=True
        ):
            write_json(self.path / f"{name}.json", content)

    def reopen(self, experiment: build.Experiment) -> tuple[int, State | None]:
        """Goes back to the last checkpoint: the next round and its state (None: from
        the start)."""
        found = digests(experiment)
        recorded = read_json(self.path / "partition.json", schema.PARTITION)
        check_digests(
            experiment,
            found,
            recorded,
            f"{self.path} was started with: start a new run",
        )
        start, state = 0, None
        if checkpoint.steps(self.path / "checkpoints"):
            start, state = checkpoint.restore(
                self.path / "checkpoints", experiment.state_shapes()
            )
        self._rewind(start, experiment.config)
        self._partition(experiment)  # derived: what was damaged is written anew
        return start, state

    def _partition(self, experiment: build.Experiment) -> None:
        """Writes who owns what, as numbers and as a picture."""
        save(self.path / "partition.npz", experiment.everybody, experiment.unmarked)
        figures.draw_partition(
            experiment.everybody, experiment.dataset, self.path / "partition.png"
        )

    def _rewind(self, start: int, config: Config) -> None:
        """Drops rows from round `start` on, and scores of rounds that the (grown) run
        does not evaluate.

        Everything is read and checked before the first file is replaced; rows are never
        in memory together.
        """
        paths = [self.path / f"{name}.jsonl" for name in ("metrics", "scores")]
        parts = [path.with_name(path.name + ".part") for path in paths]
        pairs = zip(*(complete(path, start) for path in paths), strict=True)
        try:
            with open(parts[0], "wb") as metrics, open(parts[1], "wb") as scores:
                for (line, row), (scored, score) in pairs:
                    if not wanted(row["round"], config.rounds, config.eval_every):
                        points = ("pre/", "post/", "post_latest/", "val/")
                        row = {
                            name: value
                            for name, value in row.items()
                            if not name.startswith(points)
                        }
                        score = {
                            name: values
                            for name, values in score.items()
                            if f"{name}/" not in points
                        }
                        line, scored = _line(row).encode(), _line(score).encode()
                    metrics.write(line), scores.write(scored)
                    try:
                        self._remember(score)
                    except (KeyError, IndexError, ValueError):
                        raise damaged(
                            paths[1], f"round {row['round']} is of other clients"
                        ) from None
            self._go_on()
            write_json(self.path / "config.json", signed(config))
            for part, path in zip(parts, paths, strict=True):
                os.replace(part, path)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        matrices.rewind(
            self.path, start, lambda t: wanted(t, config.rounds, config.eval_every)
        )

    def _go_on(self) -> None:
        """Says in the summary that the run is no longer at its end; its seconds stay,
        see `recorder.Clock`."""
        said = read_derived(self.path / "summary.json", schema.SUMMARY)
        if said.pop("ended", None) or said.get("status", "running") != "running":
            write_json(self.path / "summary.json", said | {"status": "running"})

    def append(
        self,
        result: simulate.Result,
        more: dict[str, dict[str, np.ndarray]] | None = None,
    ) -> Row:
        """Writes one round's rows and returns its metrics; `more`: {point: {score:
        [clients]}} of further points."""
        wide = records.by_architecture(result, self._architectures, self._headline[0])
        row = simulate.record(wide, self._test_sizes)
        if result.metrics is not None:
            here = result.metrics.ids[result.metrics.active]
            steps, examples = (int(work[here].sum()) for work in self._planned)
            row |= {"work/steps": steps, "work/examples": examples}
        scores = records.client_scores(result, more)
        if "post" in scores and result.metrics is not None:
            matrices.save(self.path, result.round, result.metrics.server)
        self._remember(scores)
        # of all clients in training, whose networks are known
        if more and validation.POINT in more:
            held_out = records.parts(
                more[validation.POINT], self._architectures, self._headline[0]
            )
            more = more | {validation.POINT: held_out}
        for point, values in (more or {}).items():
            row |= results.statistics(point, values, self._sizes[point])
        counted = records.client_scores(wide, more)
        for point in ("pre", "post", *(more or {})):
            row |= records.clients(point, counted.get(point, {}))
        if self._partial and "post" in scores:
            latest = records.parts(self.latest, self._architectures, self._headline[0])
            row |= results.statistics("post_latest", latest, self._test_sizes)
            row |= records.clients("post_latest", latest)
        row = {name: records.finite(value) for name, value in row.items()}
        for name, content in (("metrics", row), ("scores", scores)):
            with open(
                self.path / f"{name}.jsonl", "a", encoding="utf-8", newline="\n"
            ) as file:
                file.write(_line(content))
        return row

    def _remember(self, scores: Row) -> None:
        for name, values in scores.get("post", {}).items():
            known = self.latest.setdefault(
                name, np.full(len(self._test_sizes), np.nan, np.float32)
            )
            known[scores["ids"]] = [
                np.nan if value is None else value for value in values
            ]

    def save(self, step: int, state: State) -> None:
        """Makes everything so far safe: rows on the disk first, then the state."""
        for name in ("metrics", "scores"):
            with open(self.path / f"{name}.jsonl", "a", encoding="utf-8") as file:
                os.fsync(file.fileno())
        checkpoint.save(self.path / "checkpoints", step, state)

    def tables(self) -> None:
        """Writes metrics.csv and the curves anew."""
        write_csv(self.path / "metrics.csv", self.rows)
        figures.draw_curves(self.rows, self.path / "curves.png", self._headline)


def wanted(t: int, rounds: int, eval_every: int) -> bool:
    """Is round t evaluated? As `simulate.rounds` decides it."""
    return bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)


def digests(experiment: build.Experiment) -> dict[str, str]:
    """The hashes of who owns what, of the data, and of the files of a user's own
    parts."""
    found = own_files(experiment.config, len(experiment.everybody.train))
    found |= {
        "partition": digest(experiment.everybody),
        "data": build.data_digest(experiment.dataset),
    }
    if experiment.public is not None:
        found["public"] = build.data_digest(experiment.public)
    return found


def check_digests(
    experiment: build.Experiment, found: Row, recorded: Row, whose: str
) -> None:
    """Raises InputError where the `digests` found are not the recorded ones; `whose`
    ends its sentence."""
    names = {
        "data": f"The data set {experiment.dataset.name}",
        "partition": "The partition",
    }
    names |= {"public": f"The public data set {experiment.config.public}"}
    other = [f"The file of the {what}" for what in other_files(recorded, found)]
    other += [
        what for name, what in names.items() if recorded.get(name) != found.get(name)
    ]
    if other:
        raise InputError(f"{other[0]} is not the one that {whose}.")


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


class Run(NamedTuple):
    """A run directory that was read."""

    path: Path
    config: Config
    round: int  # rounds that `state` has behind it
    state: State
    experiment: build.Experiment
    layout: Layout

    @property
    def metrics(self) -> list[Row]:
        """The rows of the metrics; they are read when asked for."""
        return read_rows(self.path / "metrics.jsonl")

    @property
    def scores(self) -> list[Row]:
        """The rows with every client's scores; they are read when asked for, and may be
        many."""
        return read_rows(self.path / "scores.jsonl")

    def predictor(self, client_id: int) -> Callable[[Any], jax.Array]:
        """One client's model at the last checkpoint: raw inputs [B, *input], as the
        data set has them, -> outputs, of several models [B, C, M] those of the one that
        `acc` scores."""
        program, e = self.experiment.program(conv=self.layout.conv), self.experiment
        check("client", client_id, 0, e.task.num_clients - 1, whole=True)
        values = {name: jnp.float32(value) for name, value in program.traced.items()}

        # the id chooses the model
        predict, t = jax.jit(program.predict, static_argnums=5), jnp.int32(self.round)
        # rows by client id, which several architectures have in another order
        state = program.place(self.state)
        return lambda x: first(
            predict(e.key, values, e.federation, state, t, client_id, jnp.asarray(x))
        )


def first(outputs: Any) -> Any:
    """The logits [B, C] of the model that `acc` scores, of several [B, C, M]; other
    outputs as they are."""
    several = isinstance(outputs, jax.Array | np.ndarray) and outputs.ndim == 3
    return outputs[..., 0] if several else outputs


def load(workdir: str | Path) -> Run:
    """Reads a run directory: its settings and the state of its last checkpoint.

    Raises:
      InputError: it is not a run directory, has no checkpoint yet, or its data are not
        here any more.
    """
    path = directory(str(workdir))
    experiment, layout = build.prepare(read_config(path)), read_layout(path)
    step, state = checkpoint.restore(path / "checkpoints", experiment.state_shapes())
    return Run(path, experiment.config, step, state, experiment, layout)
