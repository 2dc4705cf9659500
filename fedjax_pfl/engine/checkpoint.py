"""Checkpoints of a state: one orbax directory a step, written whole or not at all, and
checked before it is read.

On disk a tree is a flat dict {"/server/body/kernel": array, ...}, so that empty
subtrees and holes need no place. Beside the directory `20` stands `20.sha256` with the
digests of its files (`sha256sum -c` reads it), written last: without it a checkpoint is
not finished, and with it a byte that changed is noticed. Orbax is imported on first use
(two seconds).
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from fedjax_pfl.errors import InputError, first_line
from fedjax_pfl.types import PyTree

KEEP = 2  # checkpoints that stay
_TRIES = 20  # to read the last one, while a run writes others
_NOTHING = "nothing"  # what is stored of a state without leaves
_SLACK = 2**18  # bytes that a checkpoint takes beside its arrays


def said(leaf: tuple[tuple[int, ...], Any] | None) -> str:
    """The shape and the type of a leaf, in words."""
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def steps(path: str | Path) -> list[int]:
    """The steps that have a finished checkpoint below `path`, ascending."""
    finished = (
        p.stem for p in Path(path).glob("*.sha256") if p.with_suffix("").is_dir()
    )
    return sorted(int(name) for name in finished if name.isdecimal())


def save(path: str | Path, step: int, tree: PyTree) -> None:
    """Writes `tree` as the checkpoint of `step` and deletes all but the last two; an
    existing one is left as it is.

    Raises:
      OSError: it cannot be written, for whatever reason orbax had.
    """
    path = Path(path).absolute()
    if step in steps(path):
        return
    import orbax.checkpoint as ocp

    leaves = {
        name: np.asarray(x)
        for name, x in _named(jax.device_get(_without_keys(tree))).items()
        if np.size(x)
    }
    leaves = leaves or {_NOTHING: np.zeros(1)}  # orbax refuses an empty tree
    path.mkdir(parents=True, exist_ok=True)
    _check_space(path, sum(x.nbytes for x in leaves.values()))
    # of a folder that was deleted: it would finish the new one early
    (path / f"{step}.sha256").unlink(missing_ok=True)
    try:
        with _quiet(), _checkpointer() as checkpointer:
            checkpointer.save(
                path / str(step), args=ocp.args.PyTreeSave(leaves), force=True
            )
    except OSError:
        raise
    except Exception as error:  # tensorstore reports a full disk as a ValueError
        raise OSError(
            f"cannot write {path / str(step)}: {first_line(error)[:200]}"
        ) from error
    _write_digests(path / str(step))
    _tidy(path)


def restore(path: str | Path, like: PyTree) -> tuple[int, PyTree]:
    """Reads the last checkpoint below `path`.

    Args:
      like: a tree of the same structure; of its leaves only shapes and types matter
        (`jax.eval_shape` will do).

    Returns:
      the step and a tree of NumPy arrays (and keys): for `Program.place`, which puts
      each row where it belongs.

    Raises:
      InputError: there is none, it is damaged, or it belongs to something else.
    """
    step, leaves = _last(path)
    _check_same(Path(path).absolute() / str(step), leaves, _named(like))
    return step, _filled(like, leaves)


def _last(path: str | Path) -> tuple[int, dict[str, np.ndarray]]:
    """The last step and its leaves; a run that goes on may delete them while they are
    read."""
    for _ in range(_TRIES):
        if not (found := steps(path)):
            raise InputError(f"There is no checkpoint in {path}.")
        folder = Path(path).absolute() / str(found[-1])
        try:
            _check_digests(folder)
            return found[-1], _read(folder)
        except (InputError, OSError):
            if steps(path)[-1:] == found[-1:]:  # nobody has written a later one
                raise
    raise InputError(
        f"The run writes checkpoints to {path} faster than they can be read: wait for "
        "its end."
    )


def _read(folder: Path) -> dict[str, np.ndarray]:
    try:
        with _quiet(), _checkpointer() as checkpointer:
            return {
                name: np.asarray(x)
                for name, x in checkpointer.restore(folder).items()
                if name != _NOTHING
            }
    except Exception as error:
        # orbax, tensorstore and json each raise their own types on damaged files
        raise InputError(
            f"Checkpoint {folder} cannot be read ({first_line(error)[:200]}): "
            f"{_way_out(folder)}."
        ) from error


def _checkpointer() -> Any:
    """Of this process alone: orbax would wait for the others."""
    import orbax.checkpoint as ocp

    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        multiprocessing_options=alone,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs what it also raises; one of the two is enough."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_space(path: Path, size: int) -> None:
    """Raises OSError where the disk is too full: tensorstore would fill it, then fail
    with pages of text."""
    free = shutil.disk_usage(path).free
    if free < size + _SLACK:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {size + _SLACK:,} bytes, {free:,} are free",
            str(path),
        )


def _check_same(
    folder: Path, leaves: dict[str, np.ndarray], wanted: dict[str, Any]
) -> None:
    shapes = {name: _shape(x) for name, x in wanted.items() if np.prod(x.shape)}
    found = {name: (x.shape, str(x.dtype)) for name, x in leaves.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise InputError(
                f"Checkpoint {folder} is of another experiment: {name} is "
                f"{said(found.get(name))} there, "
                f"but {said(shapes.get(name))} here."
            )


def _filled(like: PyTree, leaves: dict[str, np.ndarray]) -> PyTree:
    def fill(name: str, x: Any) -> Any:
        array = leaves.get(name, np.zeros(*_shape(x)))  # empty leaves are not stored
        return _as_key(array, x.dtype) if _is_key(x) else array

    values = [fill(name, x) for name, x in _named(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _named(tree: PyTree) -> dict[str, Any]:
    """{"/path/of/a/leaf": leaf}, in the order of the tree's leaves.

    Raises:
      InputError: two leaves have one name.
    """
    found: dict[str, Any] = {}
    for path, x in jax.tree.leaves_with_path(tree):
        name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
        if name in found:
            raise InputError(
                f"Two leaves of the state are called {name}: leave the / out of the "
                "names of its dicts."
            )
        found[name] = x
    return found


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_key(data: np.ndarray, dtype: Any) -> Any:
    return jax.random.wrap_key_data(
        jnp.asarray(data), impl=jax.random.key_impl(jnp.empty((), dtype))
    )


def _without_keys(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, tree)


def _shape(x: Any) -> tuple[tuple[int, ...], str]:
    data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
    return tuple(data.shape), str(data.dtype)


def _write_digests(folder: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    lines = [
        f"{_digest(p)}  {p.relative_to(folder.parent).as_posix()}\n" for p in files
    ]
    part = folder.with_suffix(".part")
    part.write_text("".join(lines), encoding="utf-8", newline="\n")
    os.replace(part, folder.with_suffix(".sha256"))


def _check_digests(folder: Path) -> None:
    """Before orbax reads a file: on damage it fails in many ways, some of them in other
    threads."""
    digests = folder.with_suffix(".sha256")
    lines = [
        line.partition("  ")
        for line in digests.read_text("utf-8", errors="replace").splitlines()
    ]
    wrong = [
        name or digests.name
        for digest, _, name in lines
        if not _is_as_written(folder.parent / name, digest)
    ]
    if wrong or not lines:
        name = wrong[0] if lines else digests.name
        raise InputError(
            f"Checkpoint {folder} is damaged ({name!r} is not as it was written): "
            f"{_way_out(folder)}."
        )


def _is_as_written(file: Path, digest: str) -> bool:
    # Path.is_file fails on names that are too long
    return os.path.isfile(file) and _digest(file) == digest


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tidy(path: Path) -> None:
    """Deletes older checkpoints, and what an interrupted save left."""
    kept = {
        f"{step}{suffix}" for step in steps(path)[-KEEP:] for suffix in ("", ".sha256")
    }
    for old in path.iterdir():
        if old.name in kept or not old.name.split(".")[0].isdecimal():
            continue
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink()


def _way_out(folder: Path) -> str:
    earlier = [step for step in steps(folder.parent) if step < int(folder.name)]
    back = f"resume from step {earlier[-1]}" if earlier else "start again from round 0"
    return f"delete that folder to {back}"
