"""Makes the notebooks of their sources: `python notebooks/build.py`; the same sources
give the same files.

A source is a Python file of cells: `# %% [markdown]` begins a text, every line of it a
comment, `# %%` begins code. Each notebook begins with the cells that install the
project and find the device."""

import json
import sys
from pathlib import Path
from typing import Any

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

# Install from the checkout that has this notebook, else from the package index.
folders = (Path.cwd(), *Path.cwd().parents)
root = next((p for p in folders if (p / "fedjax_pfl" / "types.py").exists()), None)
if root is not None:
    sys.path.insert(0, str(root))
if not all(map(importlib.util.find_spec, ("fedjax_pfl", "jax", "flax", "optax"))):
    tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    extra = "[cuda]" if shutil.which("nvidia-smi") else "[tpu]" if tpu else ""
    package = ["fedjax_pfl" + extra] if root is None else ["-e", f"{root}{extra}"]
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


def cells(source: str) -> list[tuple[str, str]]:
    """The cells of a source: (kind, text)."""
    found: list[tuple[str, list[str]]] = []
    for line in source.splitlines():
        if line.startswith("# %%"):
            found.append(("markdown" if "[markdown]" in line else "code", []))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"A source begins with a cell, not with {line!r}.")
    texts = [(kind, "\n".join(lines).strip("\n")) for kind, lines in found]
    return [
        (kind, "\n".join(x[2:] for x in t.splitlines()) if kind == "markdown" else t)
        for kind, t in texts
    ]


def notebook(source: str) -> dict[str, Any]:
    """The notebook of a source: its title, the badge, the setup, and the rest."""
    (kind, title), *rest = cells(source)
    if kind != "markdown" or not title.startswith("# "):
        raise ValueError("A notebook begins with its title.")
    head, _, intro = title.partition("\n")
    whole = [
        ("markdown", f"{head}\n\n{BADGE}\n{intro}"),
        ("code", SETUP.rstrip()),
        ("code", DEVICE.rstrip()),
        *rest,
    ]
    return {
        "cells": [_cell(i, kind, text) for i, (kind, text) in enumerate(whole)],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
        **code,
    }


def text(source: str) -> str:
    """A notebook's file."""
    return (
        json.dumps(notebook(source), indent=1, ensure_ascii=False, sort_keys=True)
        + "\n"
    )


def main(folder: Path = FOLDER) -> None:
    for path in sorted((FOLDER / "sources").glob("*.py")):
        (folder / f"{path.stem}.ipynb").write_text(text(path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
