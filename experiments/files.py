"""The files of a run directory: written whole or not at all, and read with a sentence
where they are damaged."""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from experiments import schema
from fedjax_pfl.errors import InputError

Row = dict[str, Any]
_OBJECT = schema.Object({})  # any
# where a file is missing or damaged that is not written anew
_WAY = "start a new run with another --workdir"


def read_json(path: Path, wanted: schema.Object = _OBJECT) -> Any:
    """Reads an object from a file of a run directory; InputError if it is missing, or
    is not as `wanted` says."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (path.parent / "config.json").exists():
            raise InputError(f"{path.parent} has no {path.name}: {_WAY}.") from None
        raise InputError(
            f"{path.parent} is not a run directory: it has no {path.name}."
        ) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error})."
        ) from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if found := schema.problem(content, wanted):
        raise damaged(path, found)
    return content


def read_derived(path: Path, wanted: schema.Object) -> Any:
    """As `read_json` of a file that is written anew anyway: {} if it is missing or
    damaged."""
    try:
        return read_json(path, wanted)
    except InputError:
        return {}


def damaged(path: Path, why: Any) -> InputError:
    """What is said of a file that nothing can be made of."""
    return InputError(f"{path} is damaged ({str(why).splitlines()[0]}): {_WAY}.")


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    write_bytes(path, lambda file: file.write(text.encode()))


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows under the names that any of them has, in the order in which they come
    first; rows are read twice."""
    names = dict.fromkeys(name for row in rows for name in row)

    def content(file: BinaryIO) -> None:
        with io.TextIOWrapper(file, "utf-8", newline="") as text:
            writer = csv.DictWriter(text, list(names), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_bytes(path, content)


def write_bytes(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes a file whole or not at all; `write` is given the open file."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        write(file)
    os.replace(part, path)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a .jsonl, up to the first line that is torn or none; read anew each
    time, never held together."""

    path: Path

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in lines(self.path))


def read_rows(path: Path) -> list[Row]:
    """Reads a .jsonl up to its first line that is torn or no row."""
    return list(Rows(path))


def lines(
    path: Path, wanted: schema.Object = schema.ROW
) -> Iterator[tuple[bytes, Row]]:
    """The lines of a .jsonl, one after another, and the rows that they say, up to the
    first that is torn or none."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not line.endswith(b"\n") or schema.problem(row, wanted):
                return
            yield line, row
