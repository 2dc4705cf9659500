"""Tables: columns of numbers, booleans and categories as inputs."""

import re
from typing import NamedTuple

import numpy as np

from fedjax_pfl.data.datasets import Dataset, prepare_floats
from fedjax_pfl.data.preparation import (
    FILLS,
    Cells,
    apply,
    check_missing,
    fit,
    numbers,
    words,
)
from fedjax_pfl.data.sources import rows
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError

# columns that identify and are never inputs, as are those that end in _id
OWNERS = (
    *("client", "user", "speaker", "writer", "sensor", "hospital", "domain", "patient"),
    *("site", "subject", "participant", "person", "device", "station", "clinic"),
    *("center", "centre", "institution", "id"),
)
MOST_CATEGORIES = 100
OTHERS = ("column of clients", "left out")  # what is no input
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ][\d:.]+(Z|[+-][\d:]+)?)?")


class Seen(NamedTuple):
    """A column of a table as it was read."""

    kind: str  # identifier, label, target, split, number, boolean, date, category, text
    cells: np.ndarray  # [n], numbers with NaN or words with None where missing
    becomes: str  # input, label, target, split or of OTHERS


@register(
    "table:PATH",
    "rows of numbers: .csv, .tsv, .json or .jsonl with a column label, or target for "
    "regression; texts and identifiers are columns, such as the site",
)
def load(
    path: str,
    missing: str | None = None,
    categories: str | None = None,
    owner: str | None = None,
) -> Dataset:
    """Reads a table.

    Numbers and booleans are inputs, of mean 0 and deviation 1 over the training rows.
    `label` is a class; `target`, `target_2` ... are regression targets. All other
    columns are columns of the data set.

    Args:
      path: .csv, .tsv, .json or .jsonl, compressed (.gz) or not.
      missing: fills missing numbers by `mean` or `median`; `indicator` also adds an
        input that is 1 where a cell is missing. None: they are refused.
      categories: `onehot` makes an input of each category; None: they are no inputs.
      owner: column that identifies clients, whatever its name and type.

    Raises:
      InputError: the file cannot be read; it has no label, no target or no inputs; or a
        cell is missing or is no number.
    """
    seen, order, num_train, validation = survey(path, categories, owner)
    inputs = {name: x.cells for name, x in seen.items() if x.becomes == "input"}
    targets = {name: x.cells for name, x in seen.items() if x.kind == "target"}
    if ("label" in seen) == bool(targets):
        names = ", ".join(map(repr, seen))
        raise InputError(
            f"{path} must have a column `label`, or `target`, got {names}."
        )
    if not inputs:
        kinds = ", ".join(f"{name} ({x.kind})" for name, x in seen.items())
        raise InputError(f"{path} must have a column of numbers as input, got {kinds}.")
    for name, cells in inputs.items() if missing is None else ():
        hint = f" --missing={'|'.join(FILLS)} fills missing inputs."
        check_missing(f"{path}: {name}", cells, hint)
    classes = None
    if targets:
        for name, cells in targets.items():
            check_missing(f"{path}: {name}", cells)
        y, count = np.stack([*targets.values()], axis=1, dtype=np.float32), len(targets)
    else:
        y, count, classes = rows.classes(f"{path}: label", seen["label"].cells)
    others = {name: x.cells for name, x in seen.items() if x.becomes in OTHERS}
    if order is not None:
        inputs, others = (
            {name: cells[order] for name, cells in x.items()} for x in (inputs, others)
        )
        y = y[order]
    left = [f"{name} ({x.kind})" for name, x in seen.items() if x.becomes in OTHERS]
    raw, trained = Cells(inputs, missing), slice(num_train)
    columns = fit(raw, trained if validation is None else np.flatnonzero(~validation))
    return Dataset(
        f"table:{path}",
        apply(columns, inputs),
        y,
        num_train,
        count,
        prepare_floats,
        columns=others,
        validation=validation,
        cells=raw,
        inputs=columns,
        classes=classes,
        note=f"no inputs: {', '.join(left)}" if left else "",
    )


def identifies(name: str) -> bool:
    """Returns whether the name of a column says that it identifies."""
    return name.lower() in OWNERS or name.lower().endswith("_id")


def survey(
    path: str, categories: str | None = None, owner: str | None = None
) -> tuple[dict[str, Seen], np.ndarray | None, int, np.ndarray | None]:
    """Returns the columns of a table by name, and the split of `rows.split`.

    Arguments and errors as of `load`.
    """

    def typed(name: str) -> bool:
        return name in ("label", "split", owner) or identifies(name)

    frame = rows.read(path, typed)
    if isinstance(frame, dict):
        raise InputError(f"{path} must hold rows with named columns.")
    if owner is not None and owner not in frame:
        known = ", ".join(x for x in frame if x not in ("label", "split"))
        raise InputError(f"{path} must have a column {owner}, got {known}.")
    seen: dict[str, Seen] = {}
    for name in frame:
        cells, named = frame[name], f"{path}: {name}"
        if name in ("label", "split"):
            seen[name] = Seen(name, cells, name)
        elif typed(name):
            seen[name] = Seen("identifier", words(cells), OTHERS[0])
        elif (found := numbers(named, cells)) is None:
            found = words(cells)
            kind = _kind(found)
            onehot = kind == "category" and categories is not None
            seen[name] = Seen(kind, found, "input" if onehot else OTHERS[1])
        elif name == "target" or name.startswith("target_"):
            seen[name] = Seen("target", found, "target")
        else:
            typed_in = cells.dtype.kind not in "iuf"
            truth = typed_in and set(found[~np.isnan(found)]) <= {0, 1}
            seen[name] = Seen("boolean" if truth else "number", found, "input")
    if owner is not None:
        check_missing(f"{path}: {owner}", seen[owner].cells)
    return seen, *rows.split(path, frame)


def _kind(cells: np.ndarray) -> str:
    """Returns the type of words: date, category or text."""
    distinct = {word for word in cells if word is not None}
    if all(_DATE.fullmatch(word) for word in distinct):
        return "date"
    few = len(distinct) <= min(MOST_CATEGORIES, len(cells) // 2)
    return "category" if few else "text"


def describe(path: str, categories: str | None = None, owner: str | None = None) -> str:
    """Returns the columns of a table, their types, and what each becomes."""
    import pandas as pd

    seen, _, num_train, _ = survey(path, categories, owner)
    lines = []
    for name, x in seen.items():
        gaps, becomes = int(pd.isna(x.cells).sum()), x.becomes
        values = len(pd.unique(x.cells[~pd.isna(x.cells)]))
        if x.becomes == "input" and gaps:
            becomes = "input; --missing fills its cells"
        elif x.kind == "category" and x.becomes != "input":
            becomes = f"left out; --categories=onehot makes {values} inputs"
        lines.append((name, x.kind, gaps, values, becomes))
    names = ("column", "type", "missing", "values", "becomes")
    table = pd.DataFrame(lines, columns=list(names)).to_string(index=False)
    return f"{path}: {len(x.cells):,} rows, {num_train:,} for training\n{table}"
