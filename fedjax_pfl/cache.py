"""Decoded arrays, written to a folder once."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging


def folder() -> Path:
    """Returns the folder of decoded arrays: the variable FEDJAX_PFL_CACHE, else
    ~/.cache/fedjax_pfl."""
    name = os.environ.get("FEDJAX_PFL_CACHE") or "~/.cache/fedjax_pfl"
    return Path(os.path.expanduser(name))


def stored(
    source: Path,
    name: str,
    facts: list[Any],
    files: Iterable[Path],
    decode: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Returns the decoded arrays of a folder, which are written to the cache once.

    Args:
      source: the folder.
      name: begins the name of the cache file.
      facts: all else that the arrays depend on, as values for JSON.
      files: those that are decoded; a change of one decodes all again.
    """
    stats = [
        (str(file.relative_to(source)), file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
        if file.is_file()
    ]
    content = json.dumps([*facts, str(source.resolve()), stats])
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    path = folder() / f"{name}-{key}.npz"
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
