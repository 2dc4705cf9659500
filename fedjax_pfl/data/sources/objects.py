"""Data sets of Python objects: functions, arrays, and Hugging Face's `datasets`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_pfl import user_code
from fedjax_pfl.data.datasets import (
    SPLITS,
    Dataset,
    checked,
    from_arrays,
    prepared,
    stored,
    stored_inputs,
)
from fedjax_pfl.data.sources.arrays import named
from fedjax_pfl.data.sources.images import plain
from fedjax_pfl.errors import InputError

# columns of a Hugging Face data set that are taken without `columns`
_INPUTS = ("image", "img", "pixel_values", "x")

_LABELS = ("label", "labels", "fine_label", "y")
# ends of the names of arrays by split, in the order of their examples
_ENDS = {"train": "", "val": "_val", "test": "_test"}


def called(source: Any, seed: int, columns: tuple[str, str] | None) -> Dataset:
    """Returns the data set that a function returns."""
    own = isinstance(source, str)
    function = user_code.load("dataset", source) if own else source
    name = source if own else getattr(function, "__name__", "dataset")
    given = {"seed": seed} if "seed" in user_code.parameters(function) else {}
    call = user_code.bound(function, "dataset", name, **given)
    with user_code.blamed("dataset", name):
        return converted(call(), name, columns)


def converted(made: Any, name: str, columns: tuple[str, str] | None) -> Dataset:
    """Returns the data set of a Dataset, arrays or a Hugging Face data set."""
    if isinstance(made, Dataset):
        x, y = stored_inputs(f"{name}: x", np.asarray(made.x)), np.asarray(made.y)
        found = checked(made._replace(name=name, x=x, y=y))
        prepared(found)
        return found._replace(y=stored(y))
    parts = made.values() if isinstance(made, Mapping) else [made]
    if any(hasattr(part, "column_names") for part in parts):
        return _hugging_face(made, name, columns)
    if isinstance(made, tuple):
        return from_arrays(*made, name=name)
    if isinstance(made, Mapping):
        return from_arrays(**named(name, made), name=name)
    raise InputError(
        f"`{name}` must be a fedjax_pfl.Dataset, arrays (x, y) or a Hugging Face data "
        f"set, got {type(made).__name__}."
    )


def _hugging_face(made: Any, name: str, columns: tuple[str, str] | None) -> Dataset:
    """A data set of the library `datasets`, which is not imported."""
    given = made if isinstance(made, Mapping) else {"train": made}
    splits = {SPLITS.get(split.lower(), split): part for split, part in given.items()}
    if "train" not in splits or len(splits) < len(given) or {*splits} - {*_ENDS}:
        raise InputError(
            f"{name} must have a split train, and may have val and test, got "
            f"{', '.join(given)}."
        )
    found = list(splits["train"].column_names)
    x, y = columns or (
        next((name for name in known if name in found), "")
        for known in (_INPUTS, _LABELS)
    )
    if x not in found or y not in found:
        raise InputError(
            f"`columns` must name the inputs and the labels of {name}, got "
            f"{columns}. It has {', '.join(found)}."
        )
    arrays: dict[str, Any] = {}
    for split, end in _ENDS.items():
        if split in splits:
            rows = [
                np.asarray(plain(each) if hasattr(each, "getbands") else each)
                for each in splits[split][x]
            ]
            if len({row.shape for row in rows}) > 1:
                raise InputError(f"{name}: {x} must have one shape. Resize it first.")
            arrays[f"x{end}"] = np.asarray(rows)
            arrays[f"y{end}"] = np.asarray(list(splits[split][y]))
    features = splits["train"].features
    parts = [splits[split] for split in _ENDS if split in splits]
    # Images and lists have other types: they are no values of clients.
    values = {
        other: np.concatenate([np.asarray(list(part[other])) for part in parts])
        for other in found
        if other not in (x, y)
        and all(other in part.column_names for part in parts)
        and str(getattr(features[other], "dtype", "")).startswith(("int", "string"))
    }
    classes = getattr(features[y], "num_classes", None)
    return from_arrays(**arrays, name=name, num_classes=classes, columns=values)
