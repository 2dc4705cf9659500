"""The preparation of inputs: the numbers by which raw rows become inputs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from fedjax_pfl.errors import InputError

FILLS = ("mean", "median", "indicator")
# cells of a column of numbers that are missing, those of pandas
MISSING = (
    *("", "NA", "N/A", "n/a", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None"),
    *("<NA>", "#N/A", "#N/A N/A", "#NA", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
_CACHED = 4096  # rows whose inputs stay in a processor's cache


class Column(NamedTuple):
    """A column of a table that is an input, with its numbers.

    A number becomes (number - mean) / scale. A category becomes one input per known
    category, 1 where the cell has it; a missing or another one is 0 everywhere.
    """

    name: str
    mean: float = 0.0
    scale: float = 1.0
    fill: float | None = None  # of missing numbers; None: they are refused
    indicator: bool = False  # one more input, 1 where the cell is missing
    categories: tuple[str, ...] | None = None  # None: a column of numbers


class Cells(NamedTuple):
    """Raw cells of a table, of which inputs are prepared."""

    # {input: [n]}: numbers with NaN where missing, or categories with None
    inputs: Mapping[str, np.ndarray]
    missing: str | None  # of FILLS; None: no cell is missing

    def take(self, rows: np.ndarray) -> "Cells":
        """Returns the cells of some rows."""
        return self._replace(inputs={name: x[rows] for name, x in self.inputs.items()})


class Preparation(NamedTuple):
    """Numbers and words by which a run prepares raw rows.

    `inputs` prepares raw rows of a table. Raw texts are prepared by
    `sources.text.encode(texts, words, max_length, tokenizer)`. Other inputs have fixed
    preparations. The outputs' class i is `classes[i]`.

    `as_json` is written to a run directory, and `from_json` reads it again.
    """

    columns: tuple[Column, ...] = ()  # of a table, in the order of the inputs
    words: tuple[str, ...] | None = None  # of texts: the text of token i
    tokenizer: str | None = None
    max_length: int | None = None
    classes: tuple[str, ...] | None = None  # None: classes are numbers
    # "clients": training rows of the clients that train; else --prepare
    source: str = "clients"

    def inputs(self, rows: Mapping[str, Any]) -> np.ndarray:
        """Returns raw rows of a table as inputs [n, K] float32.

        Args:
          rows: {column: [n]}, such as a pandas frame. Other columns are ignored.

        Raises:
          InputError: a column or a number is missing, or a cell is no number.
        """
        found = {}
        for column in self.columns:
            if column.name not in rows:
                raise InputError(f"The rows must have a column {column.name}.")
            cells = numbers(column.name, rows[column.name])
            if column.categories is not None:
                found[column.name] = words(rows[column.name])
                _warn_of_others(column, found[column.name])
            elif cells is None:
                raise InputError(f"{column.name} must be numbers.")
            else:
                if column.fill is None:
                    check_missing(column.name, cells)
                found[column.name] = cells
        return apply(self.columns, found)

    def as_json(self) -> dict[str, Any]:
        """Returns the preparation as values for JSON."""
        return self._asdict() | {"columns": [x._asdict() for x in self.columns]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Preparation":
        """Returns the preparation of what `as_json` returned."""
        columns = [
            Column(**x | {"categories": _tuple(x["categories"])})
            for x in content["columns"]
        ]
        lists = {name: _tuple(content[name]) for name in ("words", "classes")}
        return cls(**{**content, **lists, "columns": tuple(columns)})


def _warn_of_others(column: Column, cells: np.ndarray) -> None:
    """Logs the cells whose category no training row had, which count as missing."""
    known = {*(column.categories or ()), None}
    others = [x for x in cells if x not in known]
    if others:
        text = "%s: %d rows have categories that no training row had, such as %r."
        logging.warning(text, column.name, len(others), others[0])


def _tuple(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def fit(cells: Cells, rows: np.ndarray | slice) -> tuple[Column, ...]:
    """Returns the columns with numbers of some rows.

    Numbers are those of scikit-learn's SimpleImputer, then StandardScaler.

    Args:
      cells: of all rows.
      rows: training examples of the clients that train.

    Raises:
      InputError: a column has no number in these rows, or its variance is not finite.
    """
    return tuple(
        _fit(name, values[rows], cells.missing) for name, values in cells.inputs.items()
    )


def unfitted(cells: Cells) -> tuple[Column, ...]:
    """Returns the columns with numbers that no row decides: numbers stay as they are,
    missing ones are 0.

    Raises:
      InputError: a column has categories, which its rows decide.
    """
    for name, values in cells.inputs.items():
        if values.dtype == object:
            raise InputError(f"{name} must be numbers without rows to prepare by.")
    fill = None if cells.missing is None else 0.0
    indicator = cells.missing == "indicator"
    return tuple(Column(name, 0.0, 1.0, fill, indicator) for name in cells.inputs)


def _fit(name: str, values: np.ndarray, missing: str | None) -> Column:
    if values.dtype == object:
        known = sorted({value for value in values if value is not None})
        marked = missing == "indicator" and any(value is None for value in values)
        return Column(name, categories=tuple(known), indicator=marked)
    x = np.asarray(values, np.float64)
    gaps = np.isnan(x)
    if gaps.all():
        raise InputError(f"{name} must have a number in the training rows.")
    fill = None
    if missing is not None:
        fill = float((np.median if missing == "median" else np.mean)(x[~gaps]))
        x = np.where(gaps, fill, x)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, scale = float(x.mean()), float(x.std())
    if not np.isfinite(scale):
        raise InputError(f"{name} must have a finite variance, got {x.max():g}.")
    constant = x.min() == x.max()
    indicator = missing == "indicator" and bool(gaps.any())
    return Column(name, mean, 1.0 if constant else scale, fill, indicator)


def apply(columns: Sequence[Column], cells: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns raw cells {column: [n]} as inputs [n, K] float32."""
    count = len(next(iter(cells.values())))
    widths = [len(c.categories or " ") + c.indicator for c in columns]
    starts = np.cumsum([0, *widths[:-1]])
    x = np.zeros((count, sum(widths)), np.float32)
    for first in range(0, count, _CACHED):
        piece = slice(first, first + _CACHED)
        for column, start in zip(columns, starts, strict=True):
            _apply(column, cells[column.name][piece], x[piece, start:])
    return x


def _apply(column: Column, values: np.ndarray, x: np.ndarray) -> None:
    """Writes raw cells [n] into the first columns of x [n, K]."""
    # imported here: pandas takes half a second
    import pandas as pd

    if column.categories is None:
        filled = values
        if column.fill is not None:
            filled = np.where(pd.isna(values), column.fill, values)
        x[:, 0] = (filled - column.mean) / column.scale
    else:
        code = pd.Index(column.categories, dtype=object).get_indexer(values)
        known = np.flatnonzero(code >= 0)
        x[known, code[known]] = 1
    if column.indicator:
        x[:, len(column.categories or " ")] = pd.isna(values)


def numbers(name: str, cells: Any) -> np.ndarray | None:
    """Returns cells as numbers [n], NaN where they are missing, or None for texts.

    True and False are 1 and 0. A column is text only if no cell is a number.

    Args:
      name: begins messages, such as FILE: COLUMN.

    Raises:
      InputError: some cells are numbers, and another one is not, or is infinite.
    """
    import pandas as pd

    values = np.asarray(cells)
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.dtype.kind not in "iuf":
        codes, distinct = pd.factorize(pd.Series(cells, dtype=object))
        truth = {str(word).lower() for word in distinct if str(word) not in MISSING}
        read = _truth if truth and truth <= {"true", "false"} else _number
        found = [read(word) for word in distinct]
        texts = np.array([x is None for x in found], bool)
        if texts.any() and not any(x is not None and x == x for x in found):
            return None
        seen = np.array([*distinct, None], object)
        refuse(name, np.append(texts, False)[codes], "must be a number", seen[codes])
        values = np.array([*found, np.nan], np.float64)[codes]
    refuse(name, np.isinf(values), "must be finite")
    return values


def _truth(word: Any) -> float:
    return np.nan if str(word) in MISSING else float(str(word).lower() == "true")


def _number(word: Any) -> float | None:
    """Returns a cell as a number, NaN where it is missing, or None for a text."""
    if str(word).strip() in MISSING:
        return np.nan
    try:
        return None if isinstance(word, bool) or "_" in str(word) else float(word)
    except (TypeError, ValueError, OverflowError):
        return None


def refuse(
    name: str, wrong: np.ndarray, reason: str, cells: Any = None, hint: str = ""
) -> None:
    """Raises InputError for the first row, counted from 1, where `wrong` [n] is True;
    with its cell if `cells` [n] are given."""
    if wrong.any():
        row = int(np.argmax(wrong))
        got = "" if cells is None else f", got {cells[row]!r}"
        raise InputError(f"{name} of row {row + 1} {reason}{got}.{hint}")


def check_missing(name: str, values: np.ndarray, hint: str = "") -> None:
    """Raises InputError for a missing cell."""
    import pandas as pd

    gaps = np.asarray(pd.isna(values))
    refuse(name, gaps, f"is missing, {gaps.sum():,} in all", hint=hint)


def words(cells: Any) -> np.ndarray:
    """Returns cells as texts [n], None where they are missing."""
    import pandas as pd

    values = np.asarray(pd.Series(cells, dtype=object))
    pairs = zip(values, pd.isna(values) | (values == ""), strict=True)
    return np.array([None if gap else str(cell) for cell, gap in pairs], object)
