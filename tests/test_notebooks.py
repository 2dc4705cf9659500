"""The notebooks are made of their sources, stored without outputs, and run from top to
bottom."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in (FOLDER / "sources").glob("*.py"))

spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_source_says_without_outputs(name):
    stored = (FOLDER / f"{name}.ipynb").read_text()
    assert stored == build.text((FOLDER / "sources" / f"{name}.py").read_text()), (
        "run python notebooks/build.py"
    )
    cells = json.loads(stored)["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) > 5
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_nothing_else_is_a_notebook():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_draws(name, tmp_path, monkeypatch):
    figures = run(name, tmp_path, monkeypatch)
    # base64 of a PNG that shows something
    assert figures and all(len(figure) > 5000 for figure in figures)


@pytest.mark.filterwarnings("default")  # of nbclient and what it uses
def run(name: str, folder: Path, monkeypatch) -> list[str]:
    """The figures of a notebook that was executed at a tiny size; a cell that fails
    raises."""
    import nbformat
    from nbclient import NotebookClient

    for key, value in {
        "TINY": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("FEDJAX_PFL_CACHE", str(folder / "cache"))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.metadata.kernelspec.name = "python3"
    NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    data = [
        output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    if keep := os.environ.get("KEEP_NOTEBOOKS"):
        nbformat.write(notebook, Path(keep) / f"{name}.ipynb")
    return [found["image/png"] for found in data if "image/png" in found]


def test_the_kernel_is_this_python():
    from jupyter_client.kernelspec import KernelSpecManager

    assert KernelSpecManager().get_kernel_spec("python3").argv[0] in (
        sys.executable,
        "python",
    )
