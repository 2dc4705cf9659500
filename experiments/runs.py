"""The run directory: what a run leaves behind, how it is continued, and how it is read again.

config.json     the effective settings             versions.json   software, device and git revision
layout.json     width, convolution form, devices   partition.*     who owns what: .npz, hashes (.json), picture (.png)
metrics.jsonl   one row a round, and .csv          scores.jsonl    one row a round with every client's scores
curves.png, summary.json (results, traffic, times), checkpoints/ (orbax, the last two)
"""

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import build, figures
from fedjax_pfl import checkpoint, evaluate, simulate
from fedjax_pfl.checks import BadInput
from fedjax_pfl.data import partition
from fedjax_pfl.types import State

Row = dict[str, Any]


def check_free(path: Path) -> None:
    """Raises BadInput if a new run cannot go there."""
    if path.is_dir() and any(path.iterdir()):
        raise BadInput(
            f"The run directory {path} is not empty: continue it with --resume, or choose another --workdir."
        )
    if path.exists() and not path.is_dir():
        raise BadInput(f"The run directory {path} is a file: choose another --workdir.")


def read_json(path: Path) -> Any:
    """Reads a file of a run directory; BadInput if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"{path.parent} is not a run directory: it has no {path.name}.") from None
    except ValueError as error:
        raise BadInput(f"{path} is damaged ({error}): start a new run with another --workdir.") from None


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    _write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


class RunDirectory:
    """A run directory that is being written.

    Attributes:
      rows: the rows of the metrics so far.
      latest: {score: [N]}, every client's last score after local training; NaN for clients not seen yet.
    """

    def __init__(self, path: Path, test_sizes: np.ndarray, partial: bool):
        self.path = path
        self.rows: list[Row] = []
        self.latest: dict[str, np.ndarray] = {}
        self._test_sizes, self._partial = test_sizes, partial

    def start(self, experiment: build.Experiment, layout: Row, versions: Row) -> None:
        """Writes what is known before the first round, config.json last: where it is, the others are."""
        self.path.mkdir(parents=True, exist_ok=True)
        partition.save(self.path / "partition.npz", experiment.partition)
        figures.draw_partition(experiment.partition, experiment.dataset, self.path / "partition.png")
        contents = {
            "partition": digests(experiment),
            "layout": layout,
            "versions": versions,
            "config": experiment.config,
        }
        for name, content in contents.items():
            write_json(self.path / f"{name}.json", content)

    def reopen(self, experiment: build.Experiment) -> tuple[int, State | None]:
        """Goes back to the last checkpoint: the next round and its state (None: from the start)."""
        recorded, found = read_json(self.path / "partition.json"), digests(experiment)
        for name, what in (("data", f"The data set {experiment.dataset.name}"), ("partition", "The partition")):
            if recorded.get(name) != found[name]:
                raise BadInput(f"{what} is not the one that {self.path} was started with: start a new run.")
        start, state = 0, None
        if checkpoint.steps(self.path / "checkpoints"):
            start, state = checkpoint.restore(self.path / "checkpoints", experiment.state_shapes())
        self._rewind(start, experiment.config)
        return start, state

    def _rewind(self, start: int, config: dict[str, Any]) -> None:
        """Drops rows from round `start` on, and scores of rounds that the (grown) run does not evaluate."""
        rows = complete(self.path / "metrics.jsonl", start)
        scores = complete(self.path / "scores.jsonl", start)
        for row, score in zip(rows, scores, strict=True):
            if not wanted(row["round"], config["rounds"], config["eval_every"]):
                for name in [name for name in row if name.startswith(("pre/", "post/", "post_latest/"))]:
                    del row[name]
                score.pop("pre", None), score.pop("post", None)
            self._remember(score)
        self.rows = rows
        write_json(self.path / "config.json", config)
        for name, content in (("metrics", rows), ("scores", scores)):
            _write(self.path / f"{name}.jsonl", "".join(map(_line, content)))

    def append(self, result: simulate.Result) -> Row:
        """Writes one round's rows and returns its metrics."""
        row = {name: _finite(value) for name, value in simulate.record(result, self._test_sizes).items()}
        scores = client_scores(result)
        self._remember(scores)
        if self._partial and "post" in scores:
            row |= statistics("post_latest", self.latest, self._test_sizes)
        for name, content in (("metrics", row), ("scores", scores)):
            with open(self.path / f"{name}.jsonl", "a") as file:
                file.write(_line(content))
        self.rows.append(row)
        return row

    def _remember(self, scores: Row) -> None:
        for name, values in scores.get("post", {}).items():
            known = self.latest.setdefault(name, np.full(len(self._test_sizes), np.nan, np.float32))
            known[scores["ids"]] = [np.nan if value is None else value for value in values]

    def save(self, step: int, state: State) -> None:
        """Makes everything so far safe: rows on the disk first, then the state."""
        for name in ("metrics", "scores"):
            with open(self.path / f"{name}.jsonl", "a") as file:
                os.fsync(file.fileno())
        checkpoint.save(self.path / "checkpoints", step, state)
        self.tables()

    def tables(self) -> None:
        """Writes metrics.csv and the curves anew."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        _write(self.path / "metrics.csv", text.getvalue())
        figures.draw_curves(self.rows, self.path / "curves.png")


def wanted(t: int, rounds: int, eval_every: int) -> bool:
    """Is round t evaluated? As `simulate.rounds` decides it."""
    return bool(eval_every) and (t % eval_every == 0 or t == rounds - 1)


def digests(experiment: build.Experiment) -> dict[str, str]:
    """The hashes of who owns what, and of the data."""
    return {"partition": partition.digest(experiment.partition), "data": build.data_digest(experiment.dataset)}


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def complete(path: Path, count: int) -> list[Row]:
    """The rows of rounds 0 to count - 1, which must all be there; what follows, a torn last line included, may go."""
    rows = [row for row in read_rows(path) if row["round"] < count]
    if [row["round"] for row in rows] != list(range(count)):
        raise BadInput(f"{path} does not hold the rounds 0 to {count - 1} once each, so the run cannot be continued.")
    return rows


def read_rows(path: Path) -> list[Row]:
    """Reads a .jsonl up to its first torn line."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def client_scores(result: simulate.Result) -> Row:
    """The per-client part of a round: participants' ids and losses, `post` in their order, `pre` of all clients."""
    row: Row = {"round": result.round}
    if result.metrics is not None:
        active = result.metrics["active"]
        row |= {"ids": result.metrics["ids"][active].tolist(), "loss": _plain(result.metrics["loss"][active])}
        post = {name: values[active] for name, values in result.metrics["post"].items()}
        if any(np.isfinite(values).any() for values in post.values()):
            row["post"] = {name: _plain(values) for name, values in post.items()}
    if result.pre is not None:
        row["pre"] = {name: _plain(values) for name, values in result.pre.items()}
    return row


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None  # JSON has no NaN


def _plain(values: np.ndarray) -> list[float | None]:
    """Short numbers that read back to the same float32; null for NaN."""
    return [None if np.isnan(x) else float(str(x)) for x in np.asarray(values, np.float32)]


def statistics(point: str, scores: dict[str, np.ndarray], weights: np.ndarray) -> Row:
    """Statistics over the clients that have a score, named as `simulate.record` names them."""
    row = {}
    for name, values in scores.items():
        if np.isnan(values).all():
            continue
        for statistic, value in evaluate.statistics(values, weights).items():
            row[f"{point}/{name}" + ("" if statistic == "macro" else f"_{statistic}")] = value
    return row


class Run(NamedTuple):
    """A run directory that was read."""

    config: dict[str, Any]
    metrics: list[Row]
    scores: list[Row]
    round: int  # rounds that `state` has behind it
    state: State
    experiment: build.Experiment

    def predictor(self, client_id: int) -> Callable[[Any], jax.Array]:
        """One client's model at the last checkpoint: raw inputs [B, *input], as the data set has them, -> outputs."""
        if not 0 <= client_id < self.config["clients"]:
            raise BadInput(f"client {client_id} is not one of 0..{self.config['clients'] - 1}.")
        program, e = self.experiment.program(), self.experiment
        values = {name: jnp.float32(value) for name, value in program.numbers.items()}

        @jax.jit
        def predict(x):
            return program.predict(e.key, values, e.federation, self.state, jnp.int32(self.round), client_id, x)

        return lambda x: predict(jnp.asarray(x))


def load(workdir: str | Path) -> Run:
    """Reads a run directory: its settings, its rows and the state of its last checkpoint.

    Raises:
      BadInput: it is not a run directory, has no checkpoint yet, or its data are not here any more.
    """
    path = Path(workdir)
    experiment = build.prepare(read_json(path / "config.json"), read_json(path / "layout.json")["conv"])
    step, state = checkpoint.restore(path / "checkpoints", experiment.state_shapes())
    rows = read_rows(path / "metrics.jsonl"), read_rows(path / "scores.jsonl")
    return Run(experiment.config, *rows, step, state, experiment)
