"""Reading .npz files that a user wrote, with a sentence for each that is damaged."""

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pfl.errors import InputError

# What numpy raises on files that are not as they were written; NotImplementedError: an
# unknown way of compressing.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    OSError,
    EOFError,
    AttributeError,
    TypeError,
    ValueError,
)


def read_npz(
    path: str | Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Reads the named arrays of an .npz file.

    Raises:
      InputError: no such file, not an .npz, a required array is missing, or an array
        holds Python objects.
    """
    path = os.path.expanduser(path)
    # unlike Path.is_file, False for a name that is too long
    if not os.path.isfile(path):
        raise InputError(
            f"There is no file {path!r}: give the path of an .npz with the arrays "
            f"{', '.join(required)}."
        )
    if not zipfile.is_zipfile(path) and os.access(path, os.R_OK) and not _was_zip(path):
        what = "it is a .npy of one array, a text, or another file"
        raise InputError(
            f"{path} cannot be read as .npz ({what}): write it with numpy.savez."
        )
    try:
        # Opened here because np.load leaves a damaged file open.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            missing = [name for name in required if name not in file]
            if missing:
                raise InputError(
                    f"{path} lacks the array {missing[0]!r}: it has "
                    f"{', '.join(file.files) or 'none'}."
                )
            return {
                name: _array(path, file, name)
                for name in (*required, *optional)
                if name in file
            }
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(
            f"{path} cannot be read as .npz ({error}): write it with numpy.savez."
        ) from error


def _was_zip(path: str) -> bool:
    """Does a file begin as an .npz does? Then it is one that was damaged."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _array(path: str | Path, file: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(file[name])
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise InputError(
            f"{path}: {name} holds Python objects: store numbers in one rectangular "
            "array."
        ) from error
