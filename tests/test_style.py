"""The checks a machine can make of the source: lint, format, types, the direction of imports."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_source(command):
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_methods_import_neither_the_loop_nor_each_other():
    folder = ROOT / "fedjax_pfl" / "algorithms"
    families = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert families
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            source = path.read_text()
            assert "simulate" not in source and "fedjax_pfl.data" not in source
            assert not [name for name in families if f"algorithms.{name} import" in source]
