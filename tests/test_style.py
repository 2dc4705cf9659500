"""The checks a machine can make of the source: lint, format, types, sizes, the direction of
imports."""

import ast
import inspect
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import fedjax_pfl

ROOT = Path(__file__).parent.parent
MOST_OF_A_FUNCTION, MOST_OF_A_FILE = 60, 300  # lines of code; lines
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_source(command):
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def too_long(source: str) -> list[str]:
    """The functions whose code, nested functions included and docstrings not, has too many lines;
    and the file."""
    nodes, lines = list(ast.walk(ast.parse(source))), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    sizes = [(n.name, len(lines & {*range(n.lineno, n.end_lineno + 1)})) for n in nodes if isinstance(n, FUNCTIONS)]
    found = [f"{name}: {size} lines of code" for name, size in sizes if size > MOST_OF_A_FUNCTION]
    count = len(source.splitlines())
    return found + ([f"{count} lines"] if count > MOST_OF_A_FILE else [])


def test_what_is_too_long():
    body = "    x = 1\n" * (MOST_OF_A_FUNCTION - 1)
    fits = 'def f():\n    """One.\n\n    Two.\n    """\n\n    # three\n' + body
    assert too_long(fits) == []
    assert too_long(fits + "    def g():\n        y = 2\n") == [f"f: {MOST_OF_A_FUNCTION + 2} lines of code"]
    assert too_long("\n" * MOST_OF_A_FILE) == [] != too_long("\n" * (MOST_OF_A_FILE + 1))


@pytest.mark.parametrize("folder", ["fedjax_pfl", "experiments", "benchmarks"])
def test_no_function_and_no_file_is_too_long(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert not {str(path.relative_to(ROOT)): found for path in files if (found := too_long(path.read_text()))}


def docstrings(source: str) -> list[str]:
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    found = [
        ast.get_docstring(node, clean=False) for node in ast.walk(ast.parse(source)) if isinstance(node, documented)
    ]
    return [text for text in found if text]


@pytest.mark.parametrize("folder", ["fedjax_pfl", "experiments", "benchmarks", "tests"])
def test_docstrings_have_100_columns(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for text in docstrings(path.read_text()):
            for i, line in enumerate(text.split("\n")):  # the first without its indentation and quotes; no tables
                assert len(line) <= 100 - 3 * (i == 0) or "   " in line.strip(), f"{path}: {line}"


def test_methods_import_neither_the_loop_nor_each_other():
    folder = ROOT / "fedjax_pfl" / "algorithms"
    families = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert families
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            source = path.read_text()
            assert "simulate" not in source and "fedjax_pfl.data" not in source
            assert not [name for name in families if f"algorithms.{name} import" in source]


def test_the_public_names_are_few_and_documented():
    assert len(fedjax_pfl.__all__) <= 30
    for name in fedjax_pfl.__all__:
        found = getattr(fedjax_pfl, name)
        assert isinstance(found, dict) or (inspect.getdoc(found) or "").split("\n\n")[0].endswith("."), name
