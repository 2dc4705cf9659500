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


def imports(folder):
    """{module: the modules that it imports}, also inside functions and for types; an
    import of a package is one of its `__init__`."""
    files = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path
        for path in folder.rglob("*.py")
    }
    graph = {}
    for module, path in files.items():
        names = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names += [x.name for x in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [f"{node.module}.{x.name}" for x in node.names]
        graph[module] = set()
        for name in names:
            parents = (name, f"{name}.__init__", name.rpartition(".")[0])
            found = [x for x in (*parents, f"{parents[2]}.__init__") if x in files]
            graph[module] |= {*found[:1]} - {module}
    return graph


def test_modules_import_each_other_in_one_direction():
    graph = imports(ROOT / "fedjax_pfl")
    assert len(graph) > 200 and sum(map(len, graph.values())) > 800
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_packages_import_each_other_in_one_direction():
    """`experiment` is the highest floor: no other package imports it."""
    floors: dict = {}
    for module, found in imports(ROOT / "fedjax_pfl").items():
        own = module.split(".")[1]
        floors.setdefault(own, set()).update({x.split(".")[1] for x in found} - {own})
    order = list(graphlib.TopologicalSorter(floors).static_order())
    assert order.index("data") < order.index("engine") < order.index("experiment")
    assert not [floor for floor, found in floors.items() if "experiment" in found]


def test_the_public_names_are_few_and_documented():
    assert len(fedjax_pfl.__all__) <= 30
    for name in fedjax_pfl.__all__:
        found = getattr(fedjax_pfl, name)
        assert isinstance(found, dict) or (inspect.getdoc(found) or "").split("\n\n")[
            0
        ].endswith("."), name
