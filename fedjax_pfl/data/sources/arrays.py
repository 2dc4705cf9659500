"""Arrays of .npz and .npy files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.datasets import SPLITS, Dataset, from_arrays
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, in_one_line

ARRAYS = ("x", "y", "x_val", "y_val", "x_test", "y_test")


@register(
    "npz:PATH",
    "your own arrays x and y, optionally x_val, y_val, x_test and y_test: an .npz, or "
    "a folder of .npy or .npz files; other arrays [n] are columns, such as the user",
)
def load(path: str) -> Dataset:
    """Reads the arrays of an .npz, or of a folder: x.npy and y.npy, or train.npz,
    val.npz and test.npz.

    Raises:
      InputError: a file cannot be read, or as of `from_arrays`.
    """
    folder = Path(path).expanduser()
    if not os.path.isdir(folder):  # also for a name that is too long
        return from_arrays(**named(path, read(path)), name=f"npz:{path}")
    files = sorted(folder.glob("*.npz"))
    found = {file.stem: read(file)["x"] for file in sorted(folder.glob("*.npy"))}
    for file in files:
        part = SPLITS.get(file.stem.lower(), "train" if len(files) == 1 else "")
        if not part:
            raise InputError(f"{file} must be named train, val or test.")
        end = "" if part == "train" else f"_{part}"
        found |= {f"{name}{end}": array for name, array in read(file).items()}
    return from_arrays(**named(path, found), name=f"npz:{path}")


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, or that of an .npy file as `x`.

    Raises:
      InputError: the file cannot be read, or holds objects.
    """
    try:
        # opened here because numpy leaves a damaged file open
        with open(Path(path).expanduser(), "rb") as stream:
            found = np.load(stream, allow_pickle=False)
            return {"x": found} if isinstance(found, np.ndarray) else dict(found)
    except Exception as error:  # of the zip file or of numpy
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error


def named(source: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `from_arrays`; all other arrays are columns."""
    required(source, found, ARRAYS[:2])
    names = {x.removesuffix("_val").removesuffix("_test") for x in found}
    columns = {}
    for name in sorted(names - set(ARRAYS)):
        ends = [end for end in ("", "_val", "_test") if f"{name}{end}" in found]
        parts = [np.asarray(found[f"{name}{end}"]) for end in ends]
        flat = all(part.ndim == 1 for part in parts)  # others are refused later
        columns[name] = np.concatenate(parts) if flat else parts[0]
    arrays = {name: found[name] for name in ARRAYS if name in found}
    return arrays | {"columns": columns}


def required(source: Any, found: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises InputError unless all arrays of these names are there."""
    if not set(names) <= set(found):
        raise InputError(
            f"{source} must have the arrays {', '.join(names)}, got "
            f"{', '.join(found) or 'none'}."
        )
