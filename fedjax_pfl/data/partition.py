"""What a partition is: the padded rows of every client, their digest, and their
file."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.data.datasets import Dataset, read_npz
from fedjax_pfl.errors import InputError

_PARTS = ("train", "test", "val")


class Partition(NamedTuple):
    """Every client's examples as row numbers of Dataset.x, shuffled, padded with 0 past
    the sizes."""

    train: np.ndarray  # [N, M] int32
    train_sizes: np.ndarray  # [N] int32, at least 1
    test: np.ndarray  # [N, M'] int32
    test_sizes: np.ndarray  # [N] int32, at least 1
    val: np.ndarray  # [N, M''] int32; M'' is 0 without validation examples
    val_sizes: np.ndarray  # [N] int32
    moved: int = 0  # examples moved so that every client has its minimum


def class_counts(p: Partition, dataset: Dataset) -> np.ndarray:
    """Training examples of each class: [N, C] int32."""
    client = np.repeat(np.arange(len(p.train)), p.train_sizes)
    label = dataset.y[flat(p.train, p.train_sizes)]
    return tally(client, label, len(p.train), dataset.num_classes).astype(np.int32)


def tally(
    client: np.ndarray, label: np.ndarray, num_clients: int, num_classes: int
) -> np.ndarray:
    """Counts [N, C] of (client, label) pairs."""
    return np.bincount(
        client * num_classes + label, minlength=num_clients * num_classes
    ).reshape(num_clients, -1)


def digest(p: Partition) -> str:
    """SHA-256 (hex) of who owns what in which order; padding and `moved` do not count,
    so a saved file has its own."""
    content = hashlib.sha256()
    for name, array in _contents(p).items():
        content.update(f"{name} {len(array)}\n".encode())
        content.update(array.astype("<i4").tobytes())
    return content.hexdigest()


def save(path: str | Path, p: Partition, dataset: Dataset) -> None:
    """Writes a partition of a data set as .npz in the format that `file:PATH` reads;
    the file appears whole or not at all."""
    part = Path(f"{path}.part")
    with open(part, "wb") as file:
        np.savez_compressed(file, **_data(dataset), **_contents(p))  # type: ignore[arg-type]  # numpy's stub
    os.replace(part, path)


def _data(dataset: Dataset) -> dict[str, np.ndarray]:
    """Hashes of the labels and of a thousand inputs, each [1] int64: by them row
    numbers know the data set that they are of."""
    few = np.ascontiguousarray(dataset.x[:: max(1, len(dataset.x) // 1000)])
    found = {
        "labels": dataset.y.astype("<i4"),
        "inputs": few.astype(few.dtype.newbyteorder("<")),
    }
    return {
        name: np.frombuffer(hashlib.sha256(x.tobytes()).digest()[:8], "<i8")
        for name, x in found.items()
    }


def load_file(path: str | Path, dataset: Dataset) -> Partition:
    """Reads a partition from an .npz of flat int arrays, clients one after another.

    Args:
      path: train, train_sizes, test, test_sizes and optionally val, val_sizes; the
        entries of train, test and val are row numbers of the data set's training
        examples followed by its test examples. `labels` and `inputs`, which `save`
        writes, are hashes of its labels and of some inputs.
      dataset: what the row numbers refer to.

    Raises:
      InputError: an array is missing, not of integers or out of range, sizes do not
        fit, a client lacks training or test examples, an example is there more than
        once, or the partition is of other data.
    """
    arrays = read_npz(
        path,
        ("train", "train_sizes", "test", "test_sizes"),
        ("val", "val_sizes", "labels", "inputs"),
    )
    if any(
        not np.array_equal(arrays.pop(name, known), known)
        for name, known in _data(dataset).items()
    ):
        raise InputError(
            f"{path} is a partition of other examples than these {len(dataset.y):,} of "
            f"{dataset.name}: take it with "
            "the data set, and the part of it, that it was made of."
        )
    if ("val" in arrays) != ("val_sizes" in arrays):
        raise InputError(
            f"{path} has only one of val and val_sizes: store both, or neither."
        )
    if "val" not in arrays:
        arrays |= {
            "val": np.zeros(0, np.int32),
            "val_sizes": np.zeros_like(arrays["train_sizes"]),
        }
    return _checked(path, arrays, len(dataset.y))


def checked(source: str, p: Partition, dataset: Dataset) -> Partition:
    """Returns a partition that a user made.

    Args:
      source: where it is from, for the messages.

    Raises:
      InputError: as `load_file`.
    """
    if not isinstance(p, Partition):
        raise InputError(
            f"{source} is {type(p).__name__}, not a Partition, as "
            "fedjax_pfl.data.partition.of_clients makes it."
        )
    for part in _PARTS:
        index, sizes = (
            np.asarray(getattr(p, part)),
            np.asarray(getattr(p, f"{part}_sizes")),
        )
        if (
            index.ndim != 2
            or sizes.shape != index.shape[:1]
            or index.dtype.kind not in "iu"
        ):
            raise InputError(
                f"{source}: {part} is {index.dtype}{list(index.shape)} with sizes "
                f"{list(sizes.shape)}: it must be "
                "[clients, rows] of integers, padded, and its sizes [clients]."
            )
    return _checked(source, _contents(p), len(dataset.y))._replace(moved=int(p.moved))


def of_clients(
    train: Iterable[Any], test: Iterable[Any], val: Iterable[Any] | None = None
) -> Partition:
    """The partition that gives client i the rows train[i], test[i] and val[i] of a data
    set.

    Args:
      train: for each client the row numbers of its training examples.
      test: of its test examples.
      val: of its validation examples; None: there are none.
    """
    given = {"train": train, "test": test} | ({} if val is None else {"val": val})
    lists = {
        part: list(own) if isinstance(own, Iterable) else []
        for part, own in given.items()
    }
    count, arrays = len(lists["train"]), dict[str, np.ndarray]()
    for part, own in ({"val": [()] * count} | lists).items():
        rows = [_numbers(each) for each in own]
        if (
            len(rows) != count
            or not rows
            or any(x.ndim != 1 or x.dtype.kind not in "iu" for x in rows)
        ):
            kinds = ", ".join(
                sorted({str(x.dtype) for x in rows if x.dtype.kind not in "iu"})
            )
            what = f" (here {kinds})" if kinds else ""
            raise InputError(
                f"{part} must have a list of row numbers{what} for each of {count} "
                "clients, at least one."
            )
        arrays |= {
            part: np.concatenate(rows),
            f"{part}_sizes": np.array([len(each) for each in rows]),
        }
    return build(**arrays)  # type: ignore[arg-type]  # `moved`, the one int, is not among the arrays


def _numbers(own: Any) -> np.ndarray:
    """The row numbers of one client, whatever holds them."""
    rows = np.asarray(
        own
        if isinstance(own, np.ndarray) or not isinstance(own, Iterable)
        else list(own)
    )
    return rows if rows.size else np.zeros(0, np.int64)


def build(
    train: np.ndarray,
    train_sizes: np.ndarray,
    test: np.ndarray,
    test_sizes: np.ndarray,
    val: np.ndarray,
    val_sizes: np.ndarray,
    moved: int = 0,
) -> Partition:
    """Pads flat rows (clients one after another) to one width a part."""
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
    """The partition among the clients `ids` alone, in this order."""
    chosen = Partition(*(array[ids] for array in p[:-1]))
    return build(**_contents(chosen), moved=p.moved)


def flat(index: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The valid entries of padded rows [N, M], client after client."""
    return np.extract(_valid(index, sizes), index)


def _padded(rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    index = np.zeros((len(sizes), sizes.max()), np.int32)
    index[_valid(index, sizes)] = rows
    return index


def _valid(index: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.arange(index.shape[1]) < sizes[:, None]


def _contents(p: Partition) -> dict[str, np.ndarray]:
    """The flat arrays that say everything."""
    arrays: dict[str, np.ndarray] = {}
    for part in _PARTS:
        index, sizes = (
            np.asarray(getattr(p, part)),
            np.asarray(getattr(p, f"{part}_sizes")),
        )
        arrays |= {part: flat(index, sizes), f"{part}_sizes": sizes}
    return arrays


def _checked(source: Any, arrays: dict[str, np.ndarray], n: int) -> Partition:
    """The partition of flat arrays over `n` examples; InputError unless they are
    one."""
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"{source}: {name} is {array.dtype}{list(array.shape)}: it must be a "
                "flat array of integers."
            )
        # what does not fit is negative, and out of range
        arrays[name] = array.astype(np.int64)
    for part in _PARTS:
        _check_part(
            source,
            part,
            arrays[part],
            arrays[f"{part}_sizes"],
            len(arrays["train_sizes"]),
            n,
        )
    _check_disjoint(source, arrays, n)
    return build(**arrays)  # type: ignore[arg-type]  # `moved`, the one int, is not among the arrays


def _check_part(
    path: Any, part: str, rows: np.ndarray, sizes: np.ndarray, num_clients: int, n: int
) -> None:
    if len(sizes) != num_clients or not num_clients:
        raise InputError(
            f"{path}: {part}_sizes has {len(sizes)} clients but train_sizes "
            f"{num_clients}: they must agree."
        )
    if part != "val" and sizes.min() < 1:
        raise InputError(
            f"{path}: client {sizes.argmin()} has no {part} example: give every client "
            "at least one."
        )
    if sizes.min() < 0 or sizes.max() > len(rows) or sizes.sum() != len(rows):
        raise InputError(
            f"{path}: {part}_sizes sum to {sizes.sum()} but {part} has {len(rows)} "
            "rows: they must agree."
        )
    if len(rows) and not (rows.min() >= 0 and rows.max() < n):
        wrong = rows.min() if rows.min() < 0 else rows.max()
        raise InputError(
            f"{path}: {part} holds the row {wrong}, but the data set has rows "
            f"0..{n - 1}: is it another one?"
        )
    repeated = np.flatnonzero(np.bincount(rows, minlength=n) > 1)
    # several clients may be tested on the same examples
    if part == "test" and len(repeated):
        own = np.sort(np.repeat(np.arange(num_clients), sizes) * n + rows)
        repeated = np.unique(own[1:][own[1:] == own[:-1]] % n)
    if len(repeated):
        raise InputError(
            f"{path}: {_these(repeated)} in {part} more than once: keep one."
        )


def _check_disjoint(path: Any, arrays: dict[str, np.ndarray], n: int) -> None:
    for one, other in (("train", "test"), ("train", "val"), ("val", "test")):
        shared = np.flatnonzero(
            np.bincount(arrays[one], minlength=n).astype(bool)
            & np.isin(np.arange(n), arrays[other])
        )
        if len(shared):
            raise InputError(
                f"{path}: {_these(shared)} in {one} and in {other}: keep them apart."
            )


def _these(rows: np.ndarray) -> str:
    """Rows as the subject of a sentence, with its verb."""
    return (
        f"row {rows[0]} is"
        if len(rows) == 1
        else f"{len(rows)} rows, first {rows[0]}, are"
    )
