"""Converts notebooks/sources (jupytext's percent format) to notebooks.

Usage: `python notebooks/build.py`. Each notebook opens with its title and a badge,
then the cells that install the project and find the device. The same sources give the
same files.
"""

import sys
from pathlib import Path

import jupytext
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).parent
BADGE = (
    "[![Open in "
    "Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)"
)
SETUP = """\
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

TINY = bool(os.environ.get("TINY"))  # a size at which all cells run in seconds, and show nothing
REPOSITORY = ""  # git address of fedjax_pfl, for a notebook without a checkout or a wheel
RELEASED = False  # a release on the package index sets it

# Install from the checkout that has this notebook, else from a wheel in its folder, else from REPOSITORY.
folders = (Path.cwd(), *Path.cwd().parents)
root = next((p for p in folders if (p / "fedjax_pfl" / "types.py").exists()), None)
if root is not None:
    sys.path.insert(0, str(root))
if not all(map(importlib.util.find_spec, ("fedjax_pfl", "jax", "flax", "optax"))):
    tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    extra = "[cuda]" if shutil.which("nvidia-smi") else "[tpu]" if tpu else ""
    wheels = sorted(Path.cwd().glob("fedjax_pfl-*.whl"))
    if root is not None:
        package = ["-e", f"{root}{extra}"]
    elif wheels:
        package = [f"{wheels[-1]}{extra}"]
    elif REPOSITORY or RELEASED:
        package = [f"fedjax_pfl{extra}" + f" @ git+{REPOSITORY}" * bool(REPOSITORY)]
    else:
        sys.exit("Put a wheel of fedjax_pfl into this folder, or its git address into REPOSITORY.")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *package], check=True)
    print("Installed", package[-1])
"""
DEVICE = """\
import jax
import matplotlib.pyplot as plt
import numpy as np

from fedjax_pfl.engine import xla

xla.split_cpu()  # on a CPU every core is a device
xla.keep_compilations()
devices = jax.devices()
print(f"Running on {len(devices)} x {devices[0].device_kind} ({devices[0].platform}).")
"""


def text(source: str) -> str:
    """Returns the notebook of a source as JSON."""
    notebook = jupytext.reads(source, fmt="py:percent")
    title = notebook.cells[0]
    head, _, intro = title.source.partition("\n")
    title.source = f"{head}\n\n{BADGE}\n{intro}"
    notebook.cells[1:1] = [new_code_cell(x.rstrip()) for x in (SETUP, DEVICE)]
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}  # jupytext keeps the sources' blank lines here
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return jupytext.writes(notebook, fmt="ipynb")


def main(folder: Path = FOLDER) -> None:
    for path in sorted((FOLDER / "sources").glob("*.py")):
        (folder / f"{path.stem}.ipynb").write_text(text(path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
