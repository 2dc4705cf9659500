"""The notebooks are made of their sources, stored without outputs, and run from top to
bottom."""

import importlib.util
import json
import os
import re
import subprocess
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


@pytest.fixture
def first_cell(tmp_path, monkeypatch):
    """Runs the first cell in a folder without a checkout; returns what pip installs."""
    installed = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda words, check: installed.append(words))

    def run(**constants):
        code = build.SETUP
        for name, value in constants.items():
            code, count = re.subn(
                rf"^{name} = \S+", f"{name} = {value!r}", code, flags=re.M
            )
            assert count == 1
        exec(code, {})
        return installed[-1][-1]

    return run


def test_a_notebook_without_a_checkout_takes_a_wheel_or_an_address(
    first_cell, tmp_path
):
    with pytest.raises(SystemExit, match="into REPOSITORY") as error:
        first_cell()
    assert "\n" not in error.value.code
    address = "https://host/name.git"
    assert re.fullmatch(
        rf"fedjax_pfl(\[\w+\])? @ git\+{address}", first_cell(REPOSITORY=address)
    )
    assert re.fullmatch(r"fedjax_pfl(\[\w+\])?", first_cell(RELEASED=True))
    wheel = tmp_path / "fedjax_pfl-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert first_cell(REPOSITORY=address, RELEASED=True).startswith(str(wheel))


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
