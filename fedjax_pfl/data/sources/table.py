"""Tables of numbers."""

import numpy as np

from fedjax_pfl.data.datasets import Dataset, from_arrays
from fedjax_pfl.data.sources import text
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError

# columns of a table that are values of clients, never inputs
OWNERS = ("client", "user", "speaker", "writer", "sensor", "hospital", "domain")


@register(
    "table:PATH",
    "numbers: .csv, .json or .jsonl rows with a column label, or target for "
    "regression; texts are columns, such as the sensor",
)
def load(path: str) -> Dataset:
    """Reads a table of numbers, .csv, .json or .jsonl.

    Numbers are inputs, scaled to mean 0 and deviation 1 over the training rows. Texts,
    and columns named as in `OWNERS`, are columns of the data set. `label` is a class;
    `target`, `target_2` ... are regression targets.

    Raises:
      InputError: the file cannot be read, or has no label, no target or no inputs.
    """
    name, columns = f"table:{path}", dict[str, np.ndarray]()
    rows, num_train = text.as_columns(path, text.read(path), ())
    targets = [x for x in rows if x == "target" or x.startswith("target_")]
    if ("label" in rows) == bool(targets):
        raise InputError(f"{path} must have a column `label`, or `target`.")
    inputs = []
    for column, values in rows.items():
        numbers = None if column in OWNERS else _numbers(values)
        if column == "label":
            y, classes = text.classes_of(values)
        elif column in targets:
            if numbers is None:
                raise InputError(f"{path}: {column} must be numbers.")
        elif numbers is None:
            columns[column] = values.astype(str)
        else:
            inputs.append(numbers)
    if not inputs:
        raise InputError(f"{path} must have a column of numbers next to its labels.")
    x = np.stack(inputs, axis=1)
    mean, scale = x[:num_train].mean(axis=0), x[:num_train].std(axis=0)
    x = (x - mean) / np.where(scale > 0, scale, 1)
    if targets:
        y = np.stack([np.asarray(rows[t], np.float32) for t in targets], axis=1)
        classes = len(targets)
    made = from_arrays(x, y, name=name, num_classes=classes, columns=columns)
    return made._replace(num_train=num_train)


def _numbers(values: np.ndarray) -> np.ndarray | None:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return None
