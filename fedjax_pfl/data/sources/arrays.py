"""Arrays of .npz and .npy files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.data.datasets import Dataset, from_arrays
from fedjax_pfl.data.sources.registry import register
from fedjax_pfl.errors import InputError, in_one_line

ARRAYS = ("x", "y", "x_test", "y_test")


@register(
    "npz:PATH",
    "your own arrays x and y, optionally x_test and y_test: an .npz, or a folder "
    "of .npy or .npz files; other arrays [n] are columns, such as the user",
)
def load(path: str) -> Dataset:
    """Reads the arrays of an .npz file or of a folder."""
    return from_arrays(**_read(path), name=f"npz:{path}")


def _read(path: str) -> dict[str, Any]:
    """Reads the arrays of an .npz, or of a folder: x.npy and y.npy, or train.npz and
    test.npz."""
    folder = Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        found = read_npz(path, ARRAYS[:2], None)
        columns = {}
        for name in sorted(
            {name.removesuffix("_test") for name in found} - set(ARRAYS)
        ):
            parts = [found[end] for end in (name, f"{name}_test") if end in found]
            columns[name] = np.concatenate(parts)
        return named(path, found) | {"columns": columns}
    found = {file.stem: np.load(file) for file in folder.glob("*.npy")}
    for file in folder.glob("*.npz"):
        end = "_test" if file.stem == "test" else ""
        arrays = read_npz(file, ARRAYS[:2], ARRAYS[2:])
        found |= {f"{name}{end}": array for name, array in arrays.items()}
    return named(path, found)


def read_npz(
    path: str | Path,
    required: tuple[str, ...],
    optional: tuple[str, ...] | None = (),
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an .npz file, all of them for optional=None.

    Raises:
      InputError: the file cannot be read, or a required array is missing.
    """
    try:
        # opened here because numpy leaves a damaged file open
        with open(os.path.expanduser(path), "rb") as stream, np.load(stream) as file:
            found = dict(file)
    except Exception as error:  # of the zip file or of numpy
        raise InputError(f"{path} cannot be read ({in_one_line(error)}).") from error
    known = named(path, found, required, optional or ())
    return found if optional is None else known


def named(
    source: Any,
    found: Mapping[str, Any],
    required: tuple[str, ...] = ARRAYS[:2],
    optional: tuple[str, ...] = ARRAYS[2:],
) -> dict[str, Any]:
    for name in required:
        if name not in found:
            raise InputError(
                f"{source} must have the arrays {', '.join(required)}, got "
                f"{', '.join(found) or 'none'}."
            )
    return {name: found[name] for name in (*required, *optional) if name in found}
