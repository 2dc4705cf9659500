"""Damaged and odd files of data, and what loading each of them gives.

`python -m tests.data_in FOLDER` writes all files; `tests/test_data_in.py` writes them one
by one and compares. `TABLE.md` lists them. Each module adds the files of its formats to
CASES: a file that is refused states the error, a file that is read the right values.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

MODULES = ("arrays", "tables", "texts", "images")


class Case(NamedTuple):
    """One file or folder."""

    name: str  # file or folder, unique
    what: str  # what is odd about it
    # content of the file, or path -> None, which writes it
    content: str | bytes | Callable[[Path], Any]
    kind: str  # loaded as KIND:PATH
    # a pattern of the error, or (data set, path) -> None, which asserts the right values
    expected: str | Callable[[Any, Path], Any]
    options: Mapping[str, Any] = MappingProxyType({})  # of `pfl.load`

    def write(self, folder: Path) -> Path:
        """Writes the file and returns its path."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(self.content, str):
            path.write_bytes(self.content.encode())
        elif isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        return path


def cases() -> list[Case]:
    """Returns the cases of all modules."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in MODULES]
    return [case for module in modules for case in module.CASES]


def table() -> str:
    """Returns TABLE.md: every file, what is odd, and what comes of it."""
    rows = [
        (x.name, x.what, x.expected if isinstance(x.expected, str) else "read")
        for x in cases()
    ]
    lines = [f"| `{a}` | {b} | {c.replace('|', ' or ')} |" for a, b, c in rows]
    head = "| file | what is odd | refused, with this error, or read |\n|---|---|---|"
    return "\n".join(["# Damaged and odd files\n", head, *lines, ""])
