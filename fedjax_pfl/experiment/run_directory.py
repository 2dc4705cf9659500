"""Files of one run.

config.json     all settings               versions.json   software, device, revision
partition.npz   rows of each client        partition.json  digests, names of clients
metrics.jsonl   a row per round            scores.jsonl    a row per round, by client
summary.json    status, seconds, scores    checkpoints/    the last two, by orbax
best/           checkpoint of --patience   digests.json    hashes of checkpoints
preparation.json    of texts and tables: what new raw rows need, with tokenizer.json
inputs.json         shapes and types, for predictions without the data set
"""

import contextlib
import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock
import jax
from absl import logging

import fedjax_pfl
from fedjax_pfl import user_code
from fedjax_pfl.data import partition
from fedjax_pfl.data.sources import chat
from fedjax_pfl.engine import distributed
from fedjax_pfl.errors import InputError
from fedjax_pfl.experiment import inputs, metrics, standalone
from fedjax_pfl.experiment.build import (
    OPTIONS_CODE,
    check_growth,
    code_of_options,
    digests,
    own_code,
)
from fedjax_pfl.experiment.checkpoints import (
    BEST,
    CHECKPOINTS,
    DIGESTS,
    Checkpoints,
    read_json,
    replace,
    write_json,
)
from fedjax_pfl.experiment.config import Config, read
from fedjax_pfl.experiment.metrics import Row
from fedjax_pfl.experiment.types import Experiment
from fedjax_pfl.types import RunState

_ROWS = ("metrics.jsonl", "scores.jsonl")
_STARTED = {
    "lock",
    "partition.npz",
    "partition.json",
    "versions.json",
    "summary.json",
}
# files of a run without a finished round, whose directory is free
_REFUSED = {
    *(
        "config.json",
        "preparation.json",
        standalone.FILE,
        inputs.TOKENIZER,
        CHECKPOINTS,
        BEST,
        DIGESTS,
    ),
    *_ROWS,
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
_OPTIONS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")


class RunDirectory:
    """Writes and reads the files of a run; of several processes, process 0 writes.

    Attributes:
      path: the directory.
      row: the last row of metrics.jsonl.
      last: the last value of each column of metrics.jsonl.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.row: Row = {}
        self.last: Row = {}
        self._writes = jax.process_index() == 0
        self._checkpoints = Checkpoints(self.path)
        self._lock = filelock.FileLock(self.path / "lock")

    @property
    def recorded(self) -> bool:
        """Returns whether there are settings of a run."""
        return (self.path / "config.json").is_file()

    @property
    def begun(self) -> bool:
        """Returns whether there is a run with a finished round."""
        saved = any((self.path / CHECKPOINTS).glob("*"))
        rows = next(self.rows(_ROWS[0]), None) is not None
        return self.recorded and (saved or rows)

    @property
    def config(self) -> Config:
        """Returns the recorded settings."""
        return read(self.path / "config.json")

    @property
    def summary(self) -> Row:
        """Returns the content of summary.json, without one an empty dict."""
        return self.read("summary.json", {})

    def lock(self) -> None:
        """Locks the directory; InputError if another process writes it."""
        if self._writes:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                raise InputError(f"Another process writes {self.path}.") from None

    def unlock(self) -> None:
        """Releases the lock, and removes the directory of a run that was refused."""
        self._lock.release(force=True)
        if self._writes and not self.recorded:
            (self.path / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there are other files
                self.path.rmdir()

    def check_free(self) -> None:
        """Raises InputError on process 0 unless a new run can begin here."""
        if self._writes and self.begun:
            raise InputError(f"{self.path} holds a run: --resume continues it.")
        known = _STARTED | _REFUSED if self.recorded else _STARTED
        found = {file.name for file in self.path.glob("*")} - known
        if self._writes and (found or self.path.is_file()):
            raise InputError(f"{self.path} is not an empty directory.")

    def open(self, experiment: Experiment) -> tuple[int, RunState | None]:
        """Begins a run, or goes back to the last checkpoint of the one that is there.

        Returns:
          the next round, and the state to go on with (None: from the start).

        Raises:
          InputError: the data or the user's files are not those of the start.
        """
        e, hashes, now = experiment, digests(experiment), versions()
        self.lock()
        # process 0 decides before it writes
        begun = distributed.largest(int(self._writes and self.begun))
        found = self._reopen(e, hashes, now) if begun else self._begin(e, hashes, now)
        self.summarize(headline={"score": e.headline[0], "better": e.headline[1]})
        self.write("config.json", e.config.flat())
        return found

    def _begin(self, e: Experiment, hashes: Row, now: Row) -> tuple[int, None]:
        self.check_free()
        if self._writes:
            for name in ("summary.json", *_ROWS):  # of a run without a finished round
                (self.path / name).unlink(missing_ok=True)
        more: Row = {"moved": e.everybody.moved, "marks": e.marks, "clients": e.names}
        more["unseen"] = e.unseen.ids.tolist() if e.unseen else []
        more["unseen_clients"] = e.unseen.names if e.unseen else []
        self.write("partition.json", hashes | more)
        self.write("versions.json", now)
        if self._writes:
            file = self.path / "partition.npz"
            partition.save(file, e.everybody, e.unmarked, e.dataset)
        if e.preparation is not None:
            self.write(inputs.FILE, e.preparation.as_json())
            tokenizer = Path(e.preparation.tokenizer or "").expanduser()
            if self._writes and tokenizer.suffix == ".json":
                shutil.copyfile(tokenizer, self.path / inputs.TOKENIZER)
                for file in filter(Path.exists, chat.files(tokenizer)):
                    shutil.copy(file, self.path)
        self.write(standalone.FILE, standalone.recorded(e))
        return 0, None

    def _reopen(
        self, experiment: Experiment, hashes: Row, now: Row
    ) -> tuple[int, RunState | None]:
        recorded, before = self.read("partition.json"), self.read("versions.json")
        known = {OPTIONS_CODE: hashes.get(OPTIONS_CODE)} | recorded
        if other := [name for name, x in hashes.items() if known.get(name) != x]:
            code = {"code": own_code, OPTIONS_CODE: code_of_options}
            for i, of in ((other.index(x), code[x]) for x in code if x in other):
                own = dict.fromkeys(user_code.module_names(of(experiment)))
                other[i] += f" ({', '.join(own)})" if own else ""
            raise InputError(f"{self.path} was begun with other {', '.join(other)}.")
        if changed := [name for name, x in now.items() if before.get(name) != x]:
            names = ", ".join(changed)
            logging.warning("Other %s than at the start: last bits may differ.", names)
        hparams = self.read("config.json")["hparams"]
        for name, value in experiment.config.hparams.items():
            if name not in hparams:  # an earlier version had no such hyperparameter
                logging.warning("%s was not recorded, its default is %s.", name, value)
        check_growth(experiment, self.config.rounds)
        start, state = self.restore(experiment)
        evaluation, last = experiment.config.evaluation, experiment.config.rounds - 1
        given = start, evaluation.eval_every, last
        files = {name: self._rewound(name, *given) for name in _ROWS}
        distributed.largest(0)  # all processes have read
        for name, rows in files.items():
            if self._writes:
                text = "".join(json.dumps(row) + "\n" for row in rows)
                replace(self.path / name, text)
        for row in files[_ROWS[0]]:
            self.last |= row
        resumed = [*before.get("resumed", []), {"round": start, **now}]
        self.write("versions.json", before | {"resumed": resumed})
        return start, state

    def _rewound(self, name: str, start: int, every: int, last: int) -> list[Row]:
        """Returns the rows of rounds before `start`.

        A run that grew does not evaluate the last round that it had before.

        Args:
          every: rounds between evaluations, 0 for none.
          last: the last round.
        """
        rows = list(itertools.islice(self.rows(name), start))
        if [row["round"] for row in rows] != list(range(start)):
            raise InputError(f"{self.path / name} lacks rows before round {start}.")
        points = ("pre", "post", "post_latest", "val")
        for row in rows:
            t = row["round"]
            if not every or (t % every and t != last):
                for column in [x for x in row if x.split("/")[0] in points]:
                    del row[column]
        return rows

    def rows(self, name: str) -> Iterator[Row]:
        """Yields the rows of a .jsonl file up to the first line that is torn."""
        if not (self.path / name).is_file():
            return
        with open(self.path / name) as file, contextlib.suppress(ValueError):
            for line in file:
                yield metrics.renamed(json.loads(line))

    def append(self, row: Row, scores: Row) -> None:
        """Writes a round to metrics.jsonl and scores.jsonl."""
        self.row, self.last = row, self.last | row
        for name, content in zip(_ROWS, (row, scores), strict=True):
            if self._writes:
                with open(self.path / name, "a") as file:
                    file.write(json.dumps(content) + "\n")

    def save(self, step: int, state: RunState, kind: str = CHECKPOINTS) -> None:
        """Writes a checkpoint after the rows so far; arguments as of
        `Checkpoints.save`."""
        if self._writes:
            for name in (x for x in _ROWS if (self.path / x).exists()):
                with open(self.path / name, "a") as file:
                    os.fsync(file.fileno())
            self._checkpoints.save(step, state, kind)

    def restore(
        self, experiment: Experiment, kind: str = CHECKPOINTS
    ) -> tuple[int, RunState | None]:
        """Returns what `Checkpoints.restore` returns."""
        return self._checkpoints.restore(experiment, kind)

    def summarize(self, **values: Any) -> None:
        """Changes entries of summary.json."""
        scores = {name: x for name, x in self.last.items() if "/" in name}
        self.write("summary.json", self.summary | {"scores": scores} | values)

    def read(self, name: str, default: Any = None) -> Any:
        """Returns what `checkpoints.read_json` returns of a file."""
        return read_json(self.path / name, default)

    def write(self, name: str, content: Any) -> None:
        """Writes a JSON file whole or not at all."""
        if self._writes:
            write_json(self.path / name, content)


def versions() -> Row:
    """Returns software, options of JAX, device and revision, which decide last bits."""
    git, folder = "", Path(fedjax_pfl.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        git = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    kind = f"{jax.devices()[0].device_kind} ({jax.default_backend()})"
    return {
        "fedjax_pfl": fedjax_pfl.__version__,
        "git": git,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        **{name: getattr(jax.config, name) for name in _OPTIONS},
        "platform": platform.platform(),
        "device": f"{jax.device_count()} x {kind}",
    }
