"""Rows with named columns: .csv, .tsv, .json and .jsonl, read by pandas and json."""

import contextlib
import csv
import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.datasets import MOST_CLASSES, SPLITS
from fedjax_pfl.data.preparation import MISSING, refuse
from fedjax_pfl.errors import InputError, in_one_line

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON = (".json", ".jsonl", ".ndjson")


def read(path: str, typed: Callable[[str], bool]) -> Any:
    """Reads rows as a pandas frame, or a JSON object as a dictionary.

    Args:
      path: .csv, .tsv, .json or .jsonl, compressed (.gz) or not.
      typed: name of a column -> whether its cells are texts, exactly as they are typed.

    Raises:
      InputError: the file cannot be read or has no rows, or a row has other columns.
    """
    file, suffix = _known(path, (*_SEPARATORS, *_JSON))
    with _readable(path):
        if suffix in _SEPARATORS:
            return _csv(file, _SEPARATORS[suffix], typed)
        content = _decoded(file, suffix != ".json")
        return content if isinstance(content, dict) else frame(path, content, typed)


def objects(path: str) -> list[dict[str, Any]]:
    """Reads the rows of a .json or .jsonl file, .gz or not, whatever their cells.

    Raises:
      InputError: the file cannot be read, or has something else.
    """
    file, suffix = _known(path, _JSON)
    with _readable(path):
        content: list[dict[str, Any]] = _decoded(file, suffix != ".json")
    _check_objects(path, content)
    return content


def _known(path: str, suffixes: Sequence[str]) -> tuple[Path, str]:
    """Returns the file and its suffix before .gz."""
    file = Path(path).expanduser()
    suffix = Path(file.name.lower().removesuffix(".gz")).suffix
    if suffix not in suffixes:
        raise InputError(f"{path} must end in one of {', '.join(suffixes)} (.gz too).")
    return file, suffix


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turns the errors of readers into InputError."""
    try:
        yield
    except InputError:
        raise
    except Warning as warning:
        raise InputError(f"{path}: row 1 has more fields than the header.") from warning
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as e:
        raise InputError(f"{path} cannot be read ({in_one_line(e)}).") from e


def _opened(file: Path) -> Any:
    zipped = file.suffix.lower() == ".gz"
    # without the byte order mark of Excel
    options: Any = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
    return gzip.open(file, **options) if zipped else open(file, **options)


def _csv(file: Path, separator: str, typed: Callable[[str], bool]) -> Any:
    import pandas as pd

    with _opened(file) as stream:
        names = next(csv.reader(stream, delimiter=separator), [])
    _check_names(file, names)
    options: Any = {"sep": separator, "keep_default_na": False, "index_col": False}
    options["compression"] = "gzip" if file.suffix.lower() == ".gz" else None
    texts = [name for name in names if typed(name)]
    na = {name: MISSING for name in names if name not in texts}
    typing: Any = {"dtype": dict.fromkeys(texts, str), "na_values": na}
    with warnings.catch_warnings():
        # of columns with numbers and texts, which are refused later with their row
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        # of a first row with more fields than the header
        warnings.simplefilter("error", pd.errors.ParserWarning)
        frame = pd.read_csv(file, **typing, **options)
    if not len(frame):
        raise InputError(f"{file} must have rows.")
    last = frame[names[-1]]
    if (last.isna() | (last == "")).any():
        _check_fields(file, separator, len(names))
    # what is missing among numbers may be a word among texts
    again = [
        name
        for name in names
        if not pd.api.types.is_numeric_dtype(frame[name]) and frame[name].isna().any()
    ]
    if again:
        found = pd.read_csv(file, dtype=str, usecols=again, na_values=[""], **options)
        frame = frame.assign(**{name: found[name] for name in again})
    return frame


def _check_fields(file: Path, separator: str, count: int) -> None:
    """Raises InputError for a row with fewer fields than the header."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with _opened(file) as stream:
            rows = (row for row in csv.reader(stream, delimiter=separator) if row)
            for i, row in enumerate(rows):
                if len(row) < count:
                    raise InputError(
                        f"{file}: row {i} must have {count} fields, as the header, got "
                        f"{len(row)}."
                    )
    finally:
        csv.field_size_limit(limit)


def _check_names(path: Any, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if not name.strip():
            raise InputError(f"{path}: column {i + 1} must have a name.")
        if name in names[:i]:
            raise InputError(f"{path} must have one column {name}, got two.")


def _decoded(file: Path, lines: bool) -> Any:
    with _opened(file) as stream:
        text = stream.read()
    if not lines:
        return json.loads(text, object_pairs_hook=_object)
    rows = []
    for i, line in enumerate(text.split("\n"), 1):  # texts may have other line ends
        if line.strip():
            try:
                rows.append(json.loads(line, object_pairs_hook=_object))
            except ValueError as error:
                raise ValueError(f"line {i}: {error}") from error
    return rows


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has a name twice: {[name for name, _ in pairs]}")
    return found


def _check_objects(path: str, rows: Any) -> None:
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path} must hold rows with named columns.")
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"{path}: row {i} must be an object, got {row!r:.40}.")


def frame(path: str, rows: Any, typed: Callable[[str], bool]) -> Any:
    """Returns objects of numbers and texts as a pandas frame; `typed` as of `read`.

    Raises:
      InputError: a row is no object, or a cell is a list or an object.
    """
    import pandas as pd

    _check_objects(path, rows)
    for i, row in enumerate(rows, 1):
        for name, cell in row.items():
            if isinstance(cell, list | dict):
                kind = "a list" if isinstance(cell, list) else "an object"
                raise InputError(
                    f"{path}: {name} of row {i} must be a number or a text, got {kind}."
                )
    names = list(dict.fromkeys(name for row in rows for name in row))
    _check_names(path, names)
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name in filter(typed, names):
        columns[name] = [None if x is None else str(x) for x in columns[name]]
    return pd.DataFrame(columns)


def split(path: str, frame: Any) -> tuple[np.ndarray | None, int, np.ndarray | None]:
    """Orders rows by their column `split`: training, validation, test.

    Returns:
      (the rows in this order, None without the column; the number of rows of training
      and validation; marks of validation among these, or None).

    Raises:
      InputError: a row has another value than train, val or test, in any case.
    """
    import pandas as pd

    if "split" not in frame:
        return None, len(frame), None
    codes, values = pd.factorize(frame["split"])
    parts = [SPLITS.get(str(value).strip().lower(), "") for value in values]
    rank = np.array([("train", "val", "test", "").index(x) for x in parts] + [3])[codes]
    wanted = "must be train, val or test"
    refuse(f"{path}: split", rank == 3, wanted, frame["split"].to_numpy())
    sizes = np.bincount(rank, minlength=3)
    if not sizes[0]:
        raise InputError(f"{path} must have rows with split=train.")
    marks = np.repeat([False, True], sizes[:2]) if sizes[1] else None
    return np.argsort(rank, kind="stable"), int(sizes[0] + sizes[1]), marks


def classes(named: str, cells: Any) -> tuple[np.ndarray, int, tuple[str, ...] | None]:
    """Returns classes [n] int32, their number and their names.

    Whole numbers are class numbers, whose names are None. Words are numbered in sorted
    order.

    Args:
      named: begins messages, such as FILE: label.
      cells: [n] texts as they are typed.

    Raises:
      InputError: a label is missing, no class number among numbers, or too large.
    """
    import pandas as pd

    codes, words = pd.factorize(cells, sort=True)
    words = [str(word) for word in words]
    bad = np.array([not word.strip() for word in words] + [True])
    reason = "must not be missing"
    values = pd.to_numeric(pd.Series(words, dtype=object), errors="coerce").to_numpy()
    known = np.append(np.isfinite(values), False)
    numeric = known[codes].mean() > 0.5
    if numeric and not bad[codes].any():
        whole = np.append((values >= 0) & (values % 1 == 0), False)
        bad = ~(whole & (np.append(values, 0) < MOST_CLASSES))
        reason = f"must be a class number in [0, {MOST_CLASSES:,})"
    refuse(named, bad[codes], reason, np.array([*words, ""], object)[codes])
    if not numeric:
        return codes.astype(np.int32), len(words), tuple(words)
    y = values[codes].astype(np.int32)
    return y, int(y.max()) + 1, None
