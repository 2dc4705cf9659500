"""Functions of the authors' code run with this library's on the same numbers.

    python -m benchmarks.originals --repository=FedADMM=PATH --repository=floco=PATH
    [--results=FILE]

NAME is a repository of `benchmarks.original_functions` or `benchmarks.original_rounds`,
PATH its checkout. Each check cuts a function or class out of a file there, runs it with
PyTorch on a CPU, and prints the largest difference from the result here, relative to
the largest entry. The rows that were found are kept in FILE, and the table of all of
them is printed as Markdown. PyTorch, and for FedPAC cvxpy, must be installed; no file
of the checkout is changed.
"""

import ast
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from fedjax_pfl.errors import InputError, choose, in_one_line

FLAGS = flags.FLAGS
RESULTS = "benchmarks/results/originals.json"
# method -> largest differences by name of what was compared
Run = Callable[[Path], dict[str, tuple[Any, Any]]]


class Check(NamedTuple):
    """A function of the authors' code and its counterpart here."""

    method: str
    repository: str  # OWNER/NAME
    compared: str
    differs: str  # what differs on purpose
    run: Run  # checkout -> {name: (theirs, ours)}


CHECKS: dict[str, Check] = {}  # by method


def check(
    method: str, repository: str, compared: str, differs: str = ""
) -> Callable[[Run], Run]:
    """Registers a check of a method."""

    def decorate(run: Run) -> Run:
        CHECKS[method] = Check(method, repository, compared, differs, run)
        return run

    return decorate


def cut(path: Path, name: str, namespace: dict[str, Any]) -> Any:
    """Returns a function or class of a Python file without the file's imports.

    Args:
      name: a name at the top of the file, or CLASS.METHOD, which is returned as a
        function.
      namespace: the globals that its body needs; what is cut is added to them.

    Raises:
      InputError: the file has no such name.
    """
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    source = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(source).body
    node: Any = None
    for part in name.split("."):
        found = [x for x in body if getattr(x, "name", None) == part]
        if not found:
            raise InputError(f"{path} has no {name}.")
        node = found[0]
        body = node.body
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    code = compile(textwrap.dedent("\n".join(lines)), str(path), "exec")
    exec(code, namespace)
    return namespace[node.name]


def difference(theirs: Any, ours: Any) -> float:
    """Returns the largest difference of two arrays, or of their lists, relative to the
    largest entry.

    Raises:
      InputError: the shapes differ.
    """
    if isinstance(theirs, list | tuple):
        pairs = zip(theirs, ours, strict=True)
        return max(difference(a, b) for a, b in pairs)
    a, b = np.asarray(theirs, np.float64), np.asarray(ours, np.float64)
    if a.shape != b.shape:
        raise InputError(f"The shapes {a.shape} and {b.shape} differ.")
    scale = np.max(np.abs(a), initial=0) or 1.0
    return float(np.max(np.abs(a - b), initial=0) / scale)


def row(found: Check, checkout: Path) -> dict[str, Any]:
    """Returns the result of one check."""
    pairs = found.run(checkout)
    each = {name: difference(*pair) for name, pair in pairs.items()}
    return {
        "repository": found.repository,
        "compared": found.compared,
        "differs": found.differs,
        "difference": max(each.values()),
        "each": each,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the Markdown table of results by method."""
    lines = [
        "| method | repository | compared | difference | what differs on purpose |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for method, found in sorted(rows.items()):
        shown = f"{found['difference']:.0e}" if found["difference"] else "0"
        cells = (method, found["repository"], found["compared"], shown)
        lines.append("| " + " | ".join((*cells, found["differs"])) + " |")
    return "\n".join(lines)


def chosen(repositories: Iterable[str]) -> dict[str, Path]:
    """Returns the checkouts of NAME=PATH by repository, OWNER/NAME."""
    known = {c.repository.split("/")[1]: c.repository for c in CHECKS.values()}
    found = {}
    for given in repositories:
        name, equals, path = given.partition("=")
        if not equals:
            raise InputError(f"--repository must be NAME=PATH, got {given!r}.")
        found[known[choose("repository", name, known)]] = Path(path)
    return found


def main(argv: list[str]) -> None:
    """Runs the checks of the repositories given, and prints the table."""
    del argv
    # registered where imported, which needs PyTorch
    from benchmarks import original_functions, original_rounds  # noqa: F401

    path = Path(FLAGS.results)
    rows = json.loads(path.read_text()) if path.exists() else {}
    checkouts = chosen(FLAGS.repository)
    for found in CHECKS.values():
        if found.repository not in checkouts:
            continue
        try:
            rows[found.method] = row(found, checkouts[found.repository])
        except Exception as error:
            print(f"{found.method}: {in_one_line(error)}", file=sys.stderr)
    if checkouts:
        path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    flags.DEFINE_multi_string("repository", [], "NAME=PATH of a checkout; repeatable")
    flags.DEFINE_string("results", RESULTS, "JSON of the rows found so far")
    from benchmarks import originals, report  # one registry, not that of __main__

    report.run(originals.main)
