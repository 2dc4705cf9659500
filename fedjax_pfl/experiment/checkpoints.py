"""Checkpoints of a run by orbax, with a digest of their numbers."""

import contextlib
import errno
import functools
import hashlib
import importlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl.errors import InputError, first_line
from fedjax_pfl.experiment.types import Trained
from fedjax_pfl.types import PyTree, RunState, State

CHECKPOINTS, BEST = "checkpoints", "best"
KEEP = {CHECKPOINTS: 2, BEST: 1}
DIGESTS = "digests.json"
_FILES = 2**17  # bytes of orbax's own files, and of the run's rows
_BY_NAME = "by name: "  # begins a digest of numbers in the order of their names


def read_json(file: Path, default: Any = None) -> Any:
    """Returns the content of a JSON file; InputError if it cannot be read.

    Args:
      default: returned if there is no file; None: there must be one.
    """
    if default is not None and not file.is_file():
        return default
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    replace(file, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def replace(file: Path, content: str) -> None:
    """Writes a file of text whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(content, encoding="utf-8")
    os.replace(part, file)


class Checkpoints:
    """Writes and reads the checkpoints of a run directory."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self._managers: dict[str, Any] = {}

    def save(self, step: int, state: RunState, kind: str = CHECKPOINTS) -> None:
        """Writes a checkpoint, and first its digest.

        Args:
          state: as `Experiment.fetch` returns it.
          kind: CHECKPOINTS, or BEST for that of early stopping.
        """
        if step in (kept := self._manager(kind).all_steps()):
            return
        sized = _sized(state)
        size = sum(x.nbytes for x in jax.tree.leaves(sized))
        if shutil.disk_usage(self.path).free < size + _FILES:
            why = f"{os.strerror(errno.ENOSPC)} for a checkpoint of {size:,} bytes"
            raise OSError(errno.ENOSPC, why, str(self.path))
        known = {
            name: digest
            for name, digest in self._digests.items()
            if not name.startswith(f"{kind}/") or int(name.split("/")[1]) in kept
        }
        write_json(self.path / DIGESTS, known | {f"{kind}/{step}": _digest(sized)})
        for later in (x for x in kept if x > step):  # of a run that was killed
            self._manager(kind).delete(later)
        try:
            with _silent():  # orbax logs an error's traceback in each of its threads
                self._manager(kind).save(step, args=ocp().args.StandardSave(sized))
        except ValueError as error:  # of tensorstore on a disk that is full by now
            why = first_line(error).rpartition(": ")[2]
            raise OSError(f"{self.path}: {why}") from error

    @property
    def _digests(self) -> dict[str, str]:
        return read_json(self.path / DIGESTS, {})

    def restore(
        self, experiment: Trained, kind: str = CHECKPOINTS
    ) -> tuple[int, RunState | None]:
        """Returns the step and the state of the last checkpoint of a kind, or 0 and
        None; InputError if its numbers are not those that were written."""
        known = (self.path / kind).is_dir()
        step = self._manager(kind).latest_step() if known else None
        if step is None:
            return 0, None
        like, old = experiment.state_shapes(), self._earlier(kind, step)
        if old and jax.tree.leaves(like._replace(method=State((), ()))):
            git = read_json(self.path / "versions.json")["git"]
            raise InputError(
                f"{self.path} was written by git {git}, whose state of options has "
                "another form: continue it there."
            )
        wanted = jax.eval_shape(_sized, like.method if old else like)
        found = self._read(kind, step, wanted)
        found = like._replace(method=found) if old else found
        return step, jax.tree.map(
            lambda x, stored: stored if x.size else np.zeros(x.shape, x.dtype),
            like,
            found,
        )

    def latest(self, experiment: Trained) -> tuple[int, RunState]:
        """Returns rounds and state of the best checkpoint of early stopping, else of
        the last one.

        Raises:
          InputError: there is none.
        """
        rounds, state = self.restore(experiment, self._latest)
        if state is None:
            raise InputError(f"{self.path} has no checkpoint yet.")
        return rounds, state

    def server(self) -> PyTree:
        """Returns the method's state of the server in the checkpoint of `latest`, as
        dictionaries of arrays.

        Raises:
          InputError: there is none, or its numbers are not those that were written.
        """
        kind = self._latest
        known = (self.path / kind).is_dir()
        step = self._manager(kind).latest_step() if known else None
        if step is None:
            raise InputError(f"{self.path} has no checkpoint yet.")
        found = self._read(kind, step)
        return found.get("method", found)["server"]  # of an earlier version: a State

    @property
    def _latest(self) -> str:
        early = "best" in read_json(self.path / "summary.json", {})
        return BEST if early else CHECKPOINTS

    def _read(self, kind: str, step: int, *wanted: PyTree) -> PyTree:
        """Returns a checkpoint like `wanted`, without it as dictionaries; InputError if
        it cannot be read."""
        try:
            args = ocp().args.StandardRestore(*wanted)
            found = self._manager(kind).restore(step, args=args)
            self._check(f"{kind}/{step}", found)
        except Exception as error:  # of many types in orbax and tensorstore
            path, why = self.path / kind / str(step), first_line(error)[:200]
            raise InputError(f"{path} cannot be read, delete it: {why}") from error
        return found

    def _check(self, name: str, found: PyTree) -> None:
        """Raises ValueError unless numbers are those that were written."""
        known = self._digests.get(name)
        # of an earlier version in the order of the leaves, which dictionaries lose
        by_name = known is None or known.startswith(_BY_NAME)
        if by_name and known not in (None, _digest(found)):
            raise ValueError("its numbers are not those that were written.")
        if not by_name and isinstance(found, tuple) and known != _in_order(found):
            raise ValueError("its numbers are not those that were written.")

    def _earlier(self, kind: str, step: int) -> bool:
        """Returns whether a checkpoint holds a State alone, as before RunState."""
        path = self.path.absolute() / kind / str(step) / "default"
        try:
            tree = ocp().PyTreeCheckpointHandler().metadata(path).tree
        except Exception:  # as in `restore`, which says why it cannot be read
            return False
        return {*tree} <= {*State._fields}

    def _manager(self, kind: str) -> Any:
        if kind not in self._managers:
            here = jax.process_index()
            options = ocp().CheckpointManagerOptions(
                max_to_keep=KEEP[kind],
                create=False,
                enable_async_checkpointing=False,
                multiprocessing_options=ocp().options.MultiprocessingOptions(
                    primary_host=here, active_processes={here}
                ),
            )
            path = self.path.absolute() / kind
            path.mkdir(exist_ok=True)
            self._managers[kind] = ocp().CheckpointManager(path, options=options)
        return self._managers[kind]


def ocp() -> Any:
    """Returns orbax, which takes two seconds to import."""
    return importlib.import_module("orbax.checkpoint")


def _sized(tree: PyTree) -> PyTree:
    """Returns the tree with one element in empty leaves, which orbax refuses."""
    return jax.tree.map(lambda x: x if x.size else np.zeros(1, bool), tree)


def _digest(tree: PyTree) -> str:
    """Returns the SHA-256 of a tree's numbers in the order of their names, the same of
    a NamedTuple and of the dictionary that orbax returns for one."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = sorted((name(path), i) for i, (path, _) in enumerate(pairs))
    return _BY_NAME + _in_order([pairs[i][1] for _, i in leaves])


def _in_order(tree: PyTree) -> str:
    """Returns the SHA-256 of a tree's numbers, in the order of its leaves."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if key else leaf)
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()
