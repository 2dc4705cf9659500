"""The checks a machine can make of the source: lint, format, types, sizes, the
direction of imports."""

import ast
import graphlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_pfl

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_source(command):
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_methods_import_neither_the_loop_nor_each_other():
    folder = ROOT / "fedjax_pfl" / "algorithms"
    families = {path.stem for path in folder.glob("*.py")} - {
        "__init__",
        "hypernetworks",
        "prototypes",
        "public_data",
        "registry",
        "shared_model",
    }
    assert families
    for path in folder.rglob("*.py"):
        if path.stem != "__init__":
            source = path.read_text()
            assert "simulate" not in source and "fedjax_pfl.data" not in source
            assert not [
                name for name in families if f"algorithms.{name} import" in source
            ]


def test_modules_of_data_import_each_other_in_one_direction():
    """Also inside functions; an import of a package is one of its `__init__`."""
    folder, graph = ROOT / "fedjax_pfl", {}
    for path in (folder / "data").rglob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{x.name}" for x in node.names}
                found |= {node.module} | names
        graph[path] = [
            folder.parent / f"{'/'.join(x.split('.'))}.py"
            for x in found
            if x.startswith("fedjax_pfl.data")
        ]
    assert len(graph) > 10
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_public_names_are_few_and_documented():
    assert len(fedjax_pfl.__all__) <= 30
    for name in fedjax_pfl.__all__:
        found = getattr(fedjax_pfl, name)
        assert isinstance(found, dict) or (inspect.getdoc(found) or "").split("\n\n")[
            0
        ].endswith("."), name
