"""Decoded arrays, written to a folder once."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import logging


def folder() -> Path:
    """Returns the folder of decoded arrays: the variable FEDJAX_PFL_CACHE, else
    ~/.cache/fedjax_pfl."""
    name = os.environ.get("FEDJAX_PFL_CACHE") or "~/.cache/fedjax_pfl"
    return Path(os.path.expanduser(name))


def stored(
    path: Path, source: str, decode: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Returns the decoded arrays, which are written to the cache file once."""
    if path.is_file():
        with np.load(path) as file:
            return dict(file)
    arrays = decode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # renamed, so that no reader ever sees half a file
        part = path.with_suffix(f".{os.getpid()}.part.npz")
        np.savez(part, **arrays)  # type: ignore[arg-type]  # numpy's stub
        os.replace(part, path)
    except OSError as error:
        logging.warning("%s is not cached and will be decoded again: %s", source, error)
    return arrays
