"""Partitions: the rows of every client, with their checks, digest and file format."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.datasets import Dataset
from fedjax_pfl.data.sources.arrays import read, required
from fedjax_pfl.errors import InputError

_PARTS = ("train", "test", "val")
_FILE = (
    *("train", "train_sizes", "test", "test_sizes"),
    *("val", "val_sizes", "labels"),  # optional
)


class Partition(NamedTuple):
    """Examples per client as row numbers of Dataset.x, shuffled, padded with 0 past the
    sizes."""

    train: np.ndarray  # [N, M] int32
    train_sizes: np.ndarray  # [N] int32, at least 1
    test: np.ndarray  # [N, M'] int32
    test_sizes: np.ndarray  # [N] int32, at least 1
    val: np.ndarray  # [N, M''] int32; M'' is 0 without validation examples
    val_sizes: np.ndarray  # [N] int32
    moved: int = 0  # examples moved so that every client has its minimum


def class_counts(p: Partition, dataset: Dataset) -> np.ndarray:
    """Returns the training labels of each class, 0 for regression: [N, C] int32."""
    client = np.repeat(np.arange(len(p.train)), p.train_sizes)
    y = dataset.y[flat(p.train, p.train_sizes)]
    if y.dtype.kind in "iu":
        valid = y >= 0
        client = np.broadcast_to(client.reshape(-1, *[1] * (y.ndim - 1)), y.shape)[
            valid
        ]
        y = y[valid]
        return tally(client, y, len(p.train), dataset.num_classes).astype(np.int32)
    found = np.zeros((len(p.train), dataset.num_classes), np.int32)
    np.add.at(found, client, y if y.dtype == bool else 0)
    return found


def tally(
    client: np.ndarray, label: np.ndarray, num_clients: int, num_classes: int
) -> np.ndarray:
    """Returns counts [N, C] of (client, label) pairs."""
    return np.bincount(
        client * num_classes + label, minlength=num_clients * num_classes
    ).reshape(num_clients, -1)


def digest(p: Partition) -> str:
    """Returns the SHA-256 (hex) of the rows of all clients in order, without padding
    and `moved`."""
    content = hashlib.sha256()
    for name, array in _contents(p).items():
        content.update(f"{name} {len(array)}\n".encode())
        content.update(array.astype("<i4").tobytes())
    return content.hexdigest()


def save(
    path: str | Path, p: Partition, dataset: Dataset, used: Dataset | None = None
) -> None:
    """Writes a partition of a data set as the .npz that `file:PATH` reads, atomically.

    Args:
      used: the same rows with the labels of a run, if it has others, such as the words
        of a vocabulary.
    """
    part = Path(f"{path}.part")
    with open(part, "wb") as file:
        counts = class_counts(p, dataset if used is None else used)
        facts = {"labels": _labels(dataset), "class_counts": counts}
        np.savez_compressed(file, **facts, **_contents(p))  # type: ignore[arg-type]  # numpy's stub
    os.replace(part, path)


def _labels(dataset: Dataset) -> np.ndarray:
    """Returns a hash of the labels, [1] int64, which identifies the data set of the row
    numbers."""
    kind = "<f4" if dataset.y.dtype.kind == "f" else "<i4"
    digest = hashlib.sha256(dataset.y.astype(kind).tobytes()).digest()
    return np.frombuffer(digest[:8], "<i8")


def load_file(path: str | Path, dataset: Dataset) -> Partition:
    """Reads a partition from an .npz of flat integer arrays, clients one after another.

    Args:
      path: train, train_sizes, test, test_sizes and optionally val, val_sizes; the
        entries of train, test and val are row numbers of the data set's training
        examples followed by its test examples. `labels`, which `save` writes, is a
        hash of its labels.
      dataset: the data set of the row numbers.

    Raises:
      InputError: as `checked`, or the partition is of another data set.
    """
    found, known = read(path), _labels(dataset)
    required(path, found, _FILE[:4])
    arrays = {name: found[name] for name in _FILE if name in found}
    if not np.array_equal(arrays.pop("labels", known), known):
        raise InputError(
            f"{path} is a partition of other examples than these {len(dataset.y):,} of "
            f"{dataset.name}."
        )
    arrays.setdefault("val", np.zeros(0, np.int32))
    arrays.setdefault("val_sizes", np.zeros_like(arrays["train_sizes"]))
    return _checked(path, arrays, len(dataset.y))


def checked(source: str, p: Partition, dataset: Dataset) -> Partition:
    """Returns a partition that a user made.

    Args:
      source: name of its origin in messages.
      p: the partition.
      dataset: the data set of its row numbers.

    Raises:
      InputError: arrays are not of integers, sizes do not fit, a row is out of range or
        there more than once (test rows may be of several clients), or a client lacks
        training or test examples.
    """
    if not isinstance(p, Partition):
        raise InputError(
            f"{source} must be a Partition, as fedjax_pfl.data.partition.of_clients "
            f"makes it, got {type(p).__name__}."
        )
    return _checked(source, _contents(p), len(dataset.y))._replace(moved=int(p.moved))


def of_clients(
    train: Iterable[Any], test: Iterable[Any], val: Iterable[Any] | None = None
) -> Partition:
    """Returns the partition in which client i has the rows train[i], test[i] and
    val[i].

    Args:
      train: row numbers of the training examples of each client.
      test: of its test examples.
      val: of its validation examples; None: there are none.
    """
    train, arrays = list(train), dict[str, np.ndarray]()
    val = [()] * len(train) if val is None else val
    for part, own in (("train", train), ("test", test), ("val", val)):
        rows = [np.asarray(list(each)) for each in own]
        whole = all(each.dtype.kind in "iu" for each in rows if each.size)
        if len(rows) != len(train) or not rows or not whole:
            raise InputError(
                f"`{part}` must have a list of row numbers for each of {len(train)} "
                "clients."
            )
        arrays[part] = np.concatenate(rows)
        arrays[f"{part}_sizes"] = np.array([len(each) for each in rows])
    return build(**arrays)  # type: ignore[arg-type]  # `moved` is not among the arrays


def build(
    train: np.ndarray,
    train_sizes: np.ndarray,
    test: np.ndarray,
    test_sizes: np.ndarray,
    val: np.ndarray,
    val_sizes: np.ndarray,
    moved: int = 0,
) -> Partition:
    """Pads flat rows, clients one after another, to one width per part."""
    return Partition(
        _padded(train, train_sizes),
        train_sizes.astype(np.int32),
        _padded(test, test_sizes),
        test_sizes.astype(np.int32),
        _padded(val, val_sizes),
        val_sizes.astype(np.int32),
        int(moved),
    )


def select(p: Partition, ids: np.ndarray) -> Partition:
    """Returns the partition of the clients `ids` alone, in this order."""
    chosen = Partition(*(array[ids] for array in p[:-1]))
    return build(**_contents(chosen), moved=p.moved)


def keep(p: Partition, mask: np.ndarray) -> Partition:
    """Keeps the examples of a mask [n] bool, as for classes that arrive during a run.

    The widths are those of `p`: federations of the results share a compiled program.
    """
    parts: dict[str, Any] = {}
    for name in _PARTS:
        index, sizes = getattr(p, name), getattr(p, f"{name}_sizes")
        kept = (np.arange(index.shape[1]) < sizes[:, None]) & mask[index]
        order = np.argsort(~kept, axis=1, kind="stable")
        kept = np.take_along_axis(kept, order, axis=1)
        parts[name] = np.where(kept, np.take_along_axis(index, order, axis=1), 0)
        parts[f"{name}_sizes"] = kept.sum(axis=1).astype(sizes.dtype)
    return p._replace(**parts)


def flat(index: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the valid entries of padded rows [N, M], client after client."""
    return np.extract(_valid(index, sizes), index)


def _padded(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    index = np.zeros((len(sizes), sizes.max()), np.int32)
    index[_valid(index, sizes)] = rows
    return index


def _valid(index: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.arange(index.shape[1]) < sizes[:, None]


def _contents(p: Partition) -> dict[str, np.ndarray]:
    """The flat arrays of a partition without its padding."""
    arrays: dict[str, np.ndarray] = {}
    for part in _PARTS:
        sizes = np.asarray(getattr(p, f"{part}_sizes"))
        arrays[part] = flat(np.asarray(getattr(p, part)), sizes)
        arrays[f"{part}_sizes"] = sizes
    return arrays


def _checked(source: Any, arrays: dict[str, np.ndarray], n: int) -> Partition:
    """Returns the partition of flat arrays over `n` examples."""
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"{source}: {name} must be a flat array of integers, got "
                f"{array.dtype}{list(array.shape)}."
            )
        # unsigned integers would wrap
        arrays[name] = array.astype(np.int64)
    for part in _PARTS:
        _check_part(f"{source}: {part}", part, arrays, n)
    for one, other in (("train", "test"), ("train", "val"), ("val", "test")):
        shared = np.intersect1d(arrays[one], arrays[other])
        if shared.size:
            raise InputError(
                f"{source}: {one} and {other} must not share rows, got row "
                f"{shared[0]} in both."
            )
    return build(**arrays)  # type: ignore[arg-type]  # `moved` is not among the arrays


def _check_part(name: str, part: str, arrays: dict[str, np.ndarray], n: int) -> None:
    rows, sizes = arrays[part], arrays[f"{part}_sizes"]
    count = len(arrays["train_sizes"])
    if len(sizes) != count or not count or sizes.sum() != len(rows):
        raise InputError(
            f"{name}_sizes must have {count} clients and sum to the {len(rows)} rows."
        )
    if sizes.min() < (part != "val"):
        raise InputError(
            f"{name} must have an example of every client, got none of client "
            f"{sizes.argmin()}."
        )
    if len(rows) and not (rows.min() >= 0 and rows.max() < n):
        raise InputError(
            f"{name} must hold rows of the data set, 0..{n - 1}, got "
            f"{rows.min()}..{rows.max()}."
        )
    # several clients may be tested on the same examples
    owner = np.repeat(np.arange(count), sizes) if part == "test" else 0
    if len(np.unique(owner * n + rows)) < len(rows):
        raise InputError(f"{name} must hold every row once.")
