"""The files of a run directory: written whole or not at all, and read with a sentence where they are damaged."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from fedjax_pfl.errors import InputError

Row = dict[str, Any]


def read_json(path: Path, keys: tuple[str, ...] = ()) -> Any:
    """Reads an object from a file of a run directory; InputError if it is missing, damaged or lacks one of `keys`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent} is not a run directory: it has no {path.name}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}).") from None
    except ValueError as error:
        raise _damaged(path, error) from None
    if not isinstance(content, dict):
        raise _damaged(path, "it holds no object")
    if missing := [key for key in keys if key not in content]:
        raise _damaged(path, f"it lacks {missing[0]!r}")
    return content


def _damaged(path: Path, why: Any) -> InputError:
    return InputError(f"{path} is damaged ({why}): start a new run with another --workdir.")


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    os.replace(part, path)


def write_bytes(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes a file whole or not at all; `write` is given the open file."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        write(file)
    os.replace(part, path)


def read_rows(path: Path) -> list[Row]:
    """Reads a .jsonl up to its first line that is torn or no row."""
    rows: list[Row] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or "round" not in row:
            break
        rows.append(row)
    return rows
